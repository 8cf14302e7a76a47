"""Starts the script finetune.py by `accelerate launch`, and in other ways, and reads what each job
wrote."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import labs
from labs.checks.scripts import forked
from labs.checks.scripts.commands import SECONDS, CommandResult, run_command
from labs.checks.scripts.files import FileText, missing_script, read_metrics, require_keys
from labs.checks.verdicts import Verdict, Wrong, shows
from labs.meters.evidence import RankStepRecord, read_ranks
from labs.training import fine_tuning, strategies
from labs.words import named_ranks
from labs.workers import devices
from labs.workers.launch_error import LaunchError

# What a job with several processes may be; FSDP is ZeRO-3.
KINDS = ("one process", "separate", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")

_KEYS = {"ranks": list, "losses": list, "tokens_per_second": float}  # of the file of metrics


@dataclass(frozen=True)
class StartedJob:
    """What a job wrote. ranks: the record of each rank. losses: step by step, as the script says;
    tokens_per_second too."""

    ranks: list[RankStepRecord]
    losses: list[float]
    tokens_per_second: float

    def __repr__(self):
        return "\n".join(f"rank {rank} │ {line}" for rank, did in enumerate(self.ranks)
                         for line in repr(did).splitlines())


class Jobs(dict[str, StartedJob]):
    """How a job was started -> what it wrote. Shows the records of the first one, and what the
    library calls each."""

    def __repr__(self):
        records = [f"{how}\n{job!r}" for how, job in list(self.items())[:1]]
        return "\n".join([*records, *(f"{how}: {len(job.ranks)} × {job.ranks[0].library}"
                                      for how, job in self.items())])


class ScriptFailed(LaunchError):
    """A script failed on a rank, or was stopped. output[r]: what rank r had printed."""

    def __init__(self, sentence: str, rank: int, output: list[str]):
        super().__init__(sentence)
        self.rank, self.output = rank, output


@shows("DeepSpeed's configuration")
def show_deepspeed_config(stage: int) -> FileText:
    """The configuration, as a JSON file has it, with which DeepSpeed trains the small Qwen2."""
    with torch.device("meta"):
        model = fine_tuning.qwen2()
    return FileText(json.dumps(strategies.deepspeed_config(model, stage), indent=2))


def accelerate(script: str, *arguments: object, config: str = "accelerate.yaml",
               ranks: int | None = None) -> CommandResult | Verdict:
    """Runs `accelerate launch --config_file CONFIG script arguments`, as a terminal would. ranks:
    None means one for each GPU, and 2 on CPUs, also where there is one GPU only."""
    with _enough_devices():
        ranks = ranks or max(2, devices.gpus())
        hidden = {} if devices.gpus() else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        return run_command(["accelerate", "launch", "--config_file", config, "--num_processes",
                            ranks, script, *arguments], environment=hidden)


@shows("Jobs of finetune.py")
def finetune_jobs(launched: CommandResult, script: str = "finetune.py",
                  metrics: str | Path = "finetune.json") -> Jobs:
    """Starts the script as torchrun does, in one process and with other options. Returns how it was
    started -> what it wrote; the first one is `launched`, the run of `accelerate launch`. Raises
    Wrong where that has failed or has not written its metrics; ScriptFailed."""
    before = {"accelerate launch": _job(read_metrics(launched, metrics, _KEYS))}
    return Jobs(before | start_otherwise(script))


def start_otherwise(script: str) -> dict[str, StartedJob]:
    """How the script was started, as torchrun does -> what it wrote. Raises ScriptFailed."""
    if missing := missing_script(script):
        raise Wrong(missing, code="file_missing")
    with _enough_devices():
        labs.launch(_nothing, ranks=1, quiet=True)  # the first launch takes seconds
        return {name: _forked(script, ranks, options)
                for name, (ranks, options) in _ways().items()}


def _ways() -> dict[str, tuple[int, list[str]]]:
    """How to start it -> (ranks, options)."""
    several = max(2, devices.gpus())
    ways = {"--cpu, one process": (1, ["--cpu"]), "--cpu": (several, ["--cpu"])}
    return ways if devices.gpus() else ways | {"--cpu --shard": (several, ["--cpu", "--shard"])}


def _nothing():
    """The work of a launch that only starts the fork server."""


def _forked(script, ranks, options) -> StartedJob:
    found = forked.run(script, tuple(options), ranks, seconds=SECONDS)
    if found.code == 0 and found.metrics is not None:
        require_keys(found.metrics, f"the file of {script}'s --metrics", _KEYS)
        return _job(found.metrics)
    name = " ".join(map(str, [script, *options]))
    if found.code is None:
        still = ", computed nothing any more" if found.seconds < SECONDS else ""
        raise ScriptFailed(f"{name} was not done after {found.seconds:.0f} s{still}, and was "
                           f"stopped: {'; '.join(found.last_calls())}", 0, found.output)
    # When a rank fails, the job ends the others with SIGTERM: these have not failed by themselves.
    failed = [rank for rank, code in enumerate(found.codes) if code and code != -signal.SIGTERM]
    if not failed:
        raise ScriptFailed(f"{name} has written no metrics", 0, found.output)
    raise ScriptFailed(f"{name} failed on {named_ranks(failed)}", failed[0], found.output)


def _job(metrics) -> StartedJob:
    return StartedJob(read_ranks(metrics["ranks"]), metrics["losses"], metrics["tokens_per_second"])


@contextmanager
def _enough_devices() -> Iterator[None]:
    """Inside, a machine with one GPU has none: NCCL wants a GPU for each rank."""
    with devices.on("cpu" if devices.gpus() < 2 else None):
        yield

"""Starts the script finetune.py by `accelerate launch`, and in other ways, and reads what each job
left."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import labs
from labs.exercises.verdicts import Verdict
from labs.meters.evidence import RankEvidence, read_ranks
from labs.scaling.runs import forked
from labs.scaling.runs.commands import SECONDS, CommandResult, run_command
from labs.workers import devices

# What a job with several processes may be; FSDP is ZeRO-3.
KINDS = ("one process", "separate", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


@dataclass(frozen=True)
class Job:
    """What a job left. ranks: what each rank did. losses: step by step, as the script says;
    tokens_per_second too."""

    ranks: list[RankEvidence]
    losses: list[float]
    tokens_per_second: float

    def __repr__(self):
        return "\n".join(f"rank {rank} │ {line}" for rank, did in enumerate(self.ranks)
                         for line in repr(did).splitlines())


def accelerate(script: str, *arguments: object, config: str = "accelerate.yaml",
               ranks: int | None = None) -> CommandResult | Verdict:
    """Runs `accelerate launch --config_file CONFIG script arguments`, as a terminal would. ranks:
    None means one for each GPU, and 2 on CPUs, also where there is one GPU only."""
    with _enough_devices():
        ranks = ranks or max(2, devices.gpus())
        hidden = {} if devices.gpus() else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        return run_command(["accelerate", "launch", "--config_file", config, "--num_processes",
                            ranks, script, *arguments], environment=hidden)


def read_job(path: str | Path = "metrics.json") -> Job:
    """The job of finetune.py that left this file of metrics. Raises RuntimeError where another
    script has written it: the job before has failed, and its output says why."""
    metrics = json.loads(Path(path).read_text())
    if not isinstance(metrics["ranks"], list):  # of train.py it is their number
        raise RuntimeError(f"{path} is not of finetune.py: look at what its job has printed")
    return _job(metrics)


def start_otherwise(script: str = "finetune.py") -> dict[str, Job]:
    """Starts the script as torchrun does, in one process and with other options. Returns how it was
    started -> what it left."""
    with _enough_devices():
        several = max(2, devices.gpus())
        ways = {"--cpu, one process": (1, ["--cpu"]), "--cpu": (several, ["--cpu"])}
        if not devices.gpus():
            ways["--cpu --shard"] = several, ["--cpu", "--shard"]
        labs.launch(_nothing, ranks=1, quiet=True)  # the first launch takes seconds
        return {name: _forked(script, ranks, options) for name, (ranks, options) in ways.items()}


def _nothing():
    """The work of a launch that only starts the fork server."""


def _forked(script, ranks, options) -> Job:
    found = forked.run(script, tuple(options), ranks, seconds=SECONDS)
    if found.code or found.metrics is None:
        how = "failed" if found.code is not None else f"was stopped after {found.seconds:.0f} s"
        raise RuntimeError(f"{script} {' '.join(map(str, options))} {how}:\n"
                           f"{''.join(found.output)[-2000:]}")
    return _job(found.metrics)


def _job(metrics) -> Job:
    return Job(read_ranks(metrics["ranks"]), metrics["losses"], metrics["tokens_per_second"])


@contextmanager
def _enough_devices() -> Iterator[None]:
    """Inside, a machine with one GPU has none: NCCL wants a GPU for each rank."""
    with devices.on("cpu" if devices.gpus() < 2 else None):
        yield

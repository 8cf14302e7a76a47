"""One rank of an 8-rank job on one real GPU: 1B, 7B and 8B in a fake process group, with strategies
and recipes that fit the card by prediction. The other ranks do not exist: what this one gathers and
reduces is allocated, and nobody fills it."""

import argparse
import json
import sys
import time
from dataclasses import dataclass

import torch
from _bench.memory_measured import fake_ranks, in_fresh_process
from _unattended import machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labs.predictions import hardware
from labs.predictions.dryrun import ddp, dry_run, jobs
from labs.training.hf_configs import config, make
from labs.workers import cuda

RANKS = 8
GB = 1e9


@dataclass(frozen=True)
class Case:
    """A row: a model of hf_configs' or of `BILLION`, and how it is trained. sequence: tokens."""

    model: str
    strategy: str = "fsdp2"
    precision: str = "fp32"
    checkpointing: str = "none"
    batch: int = 1
    sequence: int = 2048

    @property
    def name(self) -> str:
        words = [self.model, self.strategy, self.precision, f"{self.batch}x{self.sequence}"]
        return ", ".join(words + ["checkpointing"] * (self.checkpointing == "full"))

    def job(self, device: str, small: bool) -> jobs.DryRunJob:
        """The same for labs.predictions.dryrun."""
        return jobs.DryRunJob(_config(self.model, small), RANKS, self.strategy, self.batch,
                        64 if small else self.sequence, self.precision, self.checkpointing,
                        device=device)


BILLION = "GPT-2 1B"
CASES = [Case(BILLION, "ddp", batch=4, sequence=1024), Case(BILLION, batch=4, sequence=1024),
         Case(BILLION, "fsdp2", "mixed", batch=4, sequence=1024)]
CASES += [Case(model, "fsdp2", *recipe) for model in ("Llama-2-7B", "Llama-3-8B")
          for recipe in (("fp32", "none"), ("mixed", "none"), ("mixed", "full", 4))]


def _config(model, small):
    """The model's configuration; small: with the shape of its family, and few parameters."""
    if model == BILLION:
        wide = make("gpt2", n_embd=2048, n_layer=20, n_head=16)
        return make("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=500) if small else wide
    if not small:
        return config(model)
    return make("llama", hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=config(model).num_key_value_heads // 8, intermediate_size=128,
                vocab_size=500)


def predicted(case: Case, small: bool, device: str) -> int:
    """In a process of its own: the bytes at the peak of a step on a GPU, by a dry run with the
    operators of `device`. A GPU's keep other tensors for backward than the CPU's."""
    job = case.job(device, small)
    run = dry_run(job.model, ranks=RANKS, strategy=job.strategy, batch=job.batch,
                  sequence=job.sequence, precision=job.precision,
                  checkpointing=job.checkpointing, device=device, backend="nccl")
    return run.peak.total + _workspace()


def _predicted(case, small) -> tuple[int, str]:
    """(bytes, by whose operators): the GPU's, or where they cannot be faked, the CPU's."""
    try:
        return in_fresh_process(predicted, case, small, "cuda"), "cuda"
    except RuntimeError:
        return in_fresh_process(predicted, case, small, "cpu"), "cpu"


def _workspace() -> int:
    """Bytes that cuBLAS takes from PyTorch's allocator; no tensor is behind them."""
    version = "".join(map(str, cuda.capability()))
    return hardware.overheads(architecture=f"sm{version}")["cuBLAS"]


def measure(case: Case, small: bool) -> dict:
    """In a process of its own: the bytes at the peak of the second step, and its seconds."""
    job = case.job("cuda", small)
    with fake_ranks(job):
        module, optimizer = _built(job)
        data = jobs.batch(job, None)
        for _ in range(2):
            cuda.reset_peak()
            seconds = cuda.seconds(lambda: jobs.step(job, module, optimizer, data))
        held = cuda.memory()
    return {"bytes": held.peak, "reserved": held.reserved, "driver": held.used, "seconds": seconds}


def _built(job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on this rank's GPU. Under FSDP2 it is built without memory and only the shards are
    allocated: all of 8B in fp32 would be 32 GB on every rank. Their numbers mean nothing."""
    sharded = job.strategy == "fsdp2" and job.model.model_type != "gpt2"
    mesh = init_device_mesh("cuda", (job.ranks,)) if job.strategy == "fsdp2" else None
    model = jobs.build(job, "meta" if sharded else None)
    module, optimizer = jobs.wrap(job, model, mesh)
    if sharded:
        module.to_empty(device="cuda")
        for parameter in module.parameters():
            nn.init.normal_(parameter.to_local(), std=0.02)
        optimizer = job.optimizer(module.parameters(), lr=1e-3)
    ddp.complete_all_reduces(module)
    return module, optimizer


def row(case: Case, card: int, small: bool) -> dict:
    """One case: predicted, whether that fits `card` bytes, and measured if it does."""
    began = time.monotonic()
    found = {"case": case.name, "predicted_bytes": None, "measured_bytes": None, "off_pct": None}
    try:
        nbytes, found["operators"] = _predicted(case, small)
        found["predicted_bytes"] = nbytes
        found["fits"] = nbytes + hardware.overhead(1) <= card
        if found["fits"]:
            measured = in_fresh_process(measure, case, small)
            found |= {"measured_bytes": measured.pop("bytes"), **measured}
            found["off_pct"] = 100 * (nbytes / found["measured_bytes"] - 1)
    except RuntimeError as error:
        found["error"] = str(error)
    return found | {"took_s": time.monotonic() - began}


def line(found: dict) -> str:
    """A row for the log."""
    if found.get("error"):
        return f"{found['case']:40s} {found['error']}"
    numbers = f"{found['case']:40s} predicted {found['predicted_bytes'] / GB:8.3f} GB"
    if not found["fits"]:
        return f"{numbers}  does not fit"
    return (f"{numbers}  measured {found['measured_bytes'] / GB:8.3f} GB  {found['off_pct']:+.1f} %"
            f"  step {found['seconds']:.3f} s")


def main(arguments: list) -> int:
    parser = argparse.ArgumentParser(prog="python -m _on_gpu.one_rank", description=__doc__)
    parser.add_argument("out", help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="every fourth case, few parameters")
    options = parser.parse_args(arguments)
    card = min(gpu["bytes"] for gpu in in_fresh_process(machine.found)["gpus"])
    about = {"ranks": RANKS, "card_bytes": card, "small": options.small,
             "workspace_bytes": in_fresh_process(_workspace)}
    rows = []
    for case in CASES[::4] if options.small else CASES:
        rows.append(row(case, card, options.small))
        print(line(rows[-1]), flush=True)
        with open(options.out, "w") as file:  # after each: the time may be over at any moment
            json.dump({**about, "rows": rows}, file, indent=1)
    return int(any(found.get("error") for found in rows))


if __name__ == "__main__":
    # under its own name, so that other processes can unpickle its functions
    from _on_gpu import one_rank

    sys.exit(one_rank.main(sys.argv[1:]))

"""What the script elastic.py is given: its options, the process group, its data, and its notes."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

CONTEXT = 64  # tokens of a sample
NUMBERS = {"steps": 50, "every": 5, "batch": 16, "samples": 320, "seed": 0, "layers": 3,
           "hidden": 128}


def parse_options() -> argparse.Namespace:
    """The command line's. steps: of the whole training. every: how many steps lie between two
    checkpoints. batch: samples of a step, of all ranks together. metrics: the file in which rank 0
    notes what is done. checkpoints: an existing folder. timeout: seconds after which a collective
    fails; None: torch's default, half an hour with gloo."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--metrics", type=Path, default=Path("elastic.jsonl"))
    parser.add_argument("--checkpoints", type=Path, default=Path("elastic_checkpoints"))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--timeout", type=float)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    return options


def join_group(options: argparse.Namespace) -> torch.device:
    """Joins the process group that the environment describes, and notes it; returns this rank's
    device."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    # torchrun sets LOCAL_WORLD_SIZE to the ranks on this host.
    shared = gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # NCCL wants a GPU for each rank
    dist.init_process_group("gloo" if shared else None)
    device = torch.device("cpu")
    if gpus:
        torch.accelerator.set_device_index(local % gpus)
        device = torch.device(torch.accelerator.current_accelerator().type, local % gpus)
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if options.timeout:  # not from the start: on a busy machine ranks meet later than that
        # Private: torch 2.13 has no public function that changes the timeout of an existing group.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=options.timeout))
    note(options, "joined", pids=pids)
    return device


def leave_group() -> None:
    """Waits for all ranks, then leaves the process group."""
    dist.barrier()
    # torch 2.13 deadlocks where gloo's thread still drops its reference to a tensor, for which it
    # needs the interpreter, while DDP's destructor holds the interpreter and joins that thread.
    time.sleep(0.2)
    dist.destroy_process_group()


def batches(windows: torch.Tensor, options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Without end, from the first step on: this rank's samples of each step. All ranks together
    have options.batch of them, however many ranks there are."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for batch in global_batches(len(windows), options.batch, options.seed):
        yield windows[batch[rank::ranks]]


def global_batches(samples: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Without end: the samples of each step, of all ranks together, by their number."""
    # A generator of its own, from the first step on: the order is the same after a restart, and on
    # any number of ranks.
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(samples, generator=draw).split(batch)  # (batch,) sample numbers


def note(options: argparse.Namespace, event: str, **values: object) -> None:
    """Rank 0 appends a line of JSON to the file of metrics."""
    if dist.get_rank():
        return
    line = {"event": event, "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            "ranks": dist.get_world_size(), "time": time.time(), **values}
    with open(options.metrics, "a") as file:
        file.write(json.dumps(line) + "\n")

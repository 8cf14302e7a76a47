"""Runs a function on the ranks of several hosts, which torchrun starts: `run_on_hosts` is the
caller's side, and this file as a script is what each rank executes. Ranks use the CPU and gloo,
because the link that is measured is slower than any device."""

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labs.predictions.host_links import Topology
from labs.workers import devices, processes
from labs.workers.hosts import hosts
from labs.workers.launch_error import Stopped
from labs.workers.pickling import pack, unpack

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 100.0  # seconds of one run, from its start; a busy machine needs a minute
START = "1gbit"  # the bandwidth while ranks start and warm up


def run_on_hosts(work: Callable, *args, topology: Topology, timeout: float = TIMEOUT) -> list[Any]:
    """What `work(*args)` returns on each rank of hosts on this machine; something that JSON knows.

    The process group is up, each link carries 1 Gbit/s until `set_bandwidth` changes that. Raises
    HostsUnavailable, JobFailed where a rank failed or `timeout` seconds have passed, and Stopped
    where it is interrupted.
    """
    with processes.temporary_folder() as folder:
        Path(folder, "work").write_bytes(pack(work, args))
        with _short_interrupt(), hosts(topology.hosts, bandwidth=START) as found:
            # What ranks print while they measure is of no interest, unless one of them fails.
            found.run(["torchrun", "--nproc-per-node", str(topology.ranks), "-m", __name__, folder],
                      folder=str(ROOT), quiet=True, timeout=timeout, environment={
                          "CUDA_VISIBLE_DEVICES": "",  # they compute on the CPU
                          "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])})
        results = [Path(folder, f"rank{rank}.json") for rank in range(topology.world_size)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in results]


@contextlib.contextmanager
def _short_interrupt() -> Iterator[None]:
    """An interrupt would name the command that starts this file, which the student has not seen."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped("interrupted; all ranks on the hosts were stopped") from None


def main(folder: str) -> None:
    """On a rank: runs what lies in the folder, and writes there what it returns."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    work, args = unpack(Path(folder, "work").read_bytes())
    with devices.on("cpu"):
        result = work(*args)
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    # gloo's threads may still hold tensors of Python's; when they drop them they wait for the
    # interpreter's lock, which the end of the group has while it waits for these threads.
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

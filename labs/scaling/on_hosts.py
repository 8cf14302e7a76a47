"""Runs a function on the ranks of several hosts: `run_on_hosts` is the caller's side, and this file
as a script is what each host executes. It imports torch once and forks the host's ranks, which
takes a third of the time of torchrun, whose ranks and agents each import it again. Ranks use the
CPU and gloo, because the link that is measured is slower than any device."""

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labs.predictions.communication.host_links import Topology
from labs.workers import devices, processes
from labs.workers.hosts import hosts
from labs.workers.launch_error import Stopped
from labs.workers.pickling import pack, unpack

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 100.0  # seconds of one run, from its start; a busy machine needs a minute
PORT = 29500  # of host 0, on which the ranks meet; each host has ports of its own
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
            found.run([sys.executable, "-m", __name__, folder, str(topology.hosts),
                       str(topology.ranks)],
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


def main(folder: str, hosts: int, ranks: int) -> int:
    """On a host: forks its ranks and waits for them; returns the host's exit code. Where a rank
    fails, the others are killed: they would wait for it."""
    work = unpack(Path(folder, "work").read_bytes())
    host = int(socket.gethostname().removeprefix("host"))
    children = {}
    for local in range(ranks):
        pid = os.fork()
        if pid == 0:
            # os._exit: the child of a fork must not run the clean-up of its parent.
            os._exit(_be_a_rank(folder, *work, LOCAL_RANK=local, RANK=host * ranks + local,
                                WORLD_SIZE=hosts * ranks, MASTER_ADDR="host0", MASTER_PORT=PORT))
        children[pid] = local
    while children:
        pid, status = os.wait()
        children.pop(pid)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
    return 0


def _be_a_rank(folder, work, args, **variables) -> int:
    """In a forked process: runs `work(*args)` as a rank; returns its exit code."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        _run(folder, work, args)
    except BaseException:
        # in one piece: the ranks of a host share its output
        sys.stderr.write(traceback.format_exc())
        sys.stderr.flush()
        return 1
    return 0


def _run(folder, work, args) -> None:
    """On a rank: runs the work, and writes into the folder what it returns."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    with devices.on("cpu"):
        result = work(*args)
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    # gloo's threads may still hold tensors of Python's; when they drop them they wait for the
    # interpreter's lock, which the end of the group has while it waits for these threads.
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    # of the module, not of __main__: into that `unpack` puts what the notebook defines
    from labs.scaling import on_hosts

    sys.exit(on_hosts.main(sys.argv[1], *map(int, sys.argv[2:])))

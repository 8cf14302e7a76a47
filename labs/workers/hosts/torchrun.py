"""The command line of torchrun on each of several hosts."""

import sys
from collections.abc import Sequence
from pathlib import PurePath

# Each rank's lines, whole and marked, in the output of its host. With --tee every rank prints to a
# file of its own: on one pipe, lines of several ranks would run into each other.
LINE_PREFIX = "rank ${rank} │ "


def torchrun(command: Sequence[str], number: int, addresses: Sequence[str], job: int) -> list[str]:
    """Returns the command for host `number` of those with these addresses.

    What torchrun needs to find the other hosts stands before the caller's own arguments, and of
    an argument that is given twice torchrun takes the last: the caller's. job: different for jobs
    that run at the same time.
    """
    return [sys.executable, "-m", "torch.distributed.run",
            "--nnodes", str(len(addresses)),
            "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{addresses[0]}:{29_500 + job}",
            "--rdzv-id", f"job{job}",
            # By itself no host would know that it is the first one: all have the same machine.
            "--rdzv-conf", f"is_host={'true' if number == 0 else 'false'}",
            "--local-addr", addresses[number],
            "--log-dir", f"/run/job{job}-host{number}",  # in memory, gone with the hosts
            "--tee", "3",
            *command[1:]]


def is_torchrun(command: Sequence[str]) -> bool:
    return PurePath(command[0]).name == "torchrun"

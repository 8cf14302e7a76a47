"""The functions around every collective: their order, and what other threads do meanwhile."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from labs.workers.collective_kernels import around_collectives
from labs.workers.launcher import launch

pytestmark = pytest.mark.usefixtures("warm_launcher")


def _order():
    seen = []

    def noting(name):
        def around(collective, issue):
            seen.append(f"{name} {collective.kind}")
            try:
                return issue()
            finally:
                seen.append(name)
        return around

    with around_collectives(noting("first")), around_collectives(noting("link"), innermost=True), \
            around_collectives(noting("second")):
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))
    return seen


def _turns_of_another_thread():
    """How often another thread runs while this one is inside a collective for 0.4 s."""
    turns, done = [], threading.Event()

    def count():
        while not done.wait(0.01):
            turns.append(time.monotonic())

    with around_collectives(lambda collective, issue: issue()):
        if dist.get_rank():
            time.sleep(0.4)
        else:
            threading.Thread(target=count).start()
        dist.monitored_barrier()  # blocks where others only issue
    done.set()
    return len(turns)


def test_the_innermost_stays_inside_and_all_are_gone_afterwards():
    [seen] = launch(_order, ranks=1, quiet=True)
    assert seen == ["second all_reduce", "first all_reduce", "link all_reduce", "link", "first",
                    "second"]


def test_other_threads_run_while_a_collective_is_issued():
    """Else gloo's thread and this one can wait for each other's locks for ever: about every
    thousandth step on a slow link did."""
    assert launch(_turns_of_another_thread, ranks=2, quiet=True)[0] > 10

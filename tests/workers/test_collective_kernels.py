"""The functions around every collective: their order, and what other threads do meanwhile."""

import threading
import time
from datetime import timedelta

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


def _another_thread_runs():
    """Rank 0 is inside a collective until another of its threads has had 10 turns, which rank 1
    waits for."""
    store = dist.distributed_c10d._get_default_store()

    def turn():
        for _ in range(10):
            time.sleep(0.01)
        store.set("turned", "")

    with around_collectives(lambda collective, issue: issue()):
        if dist.get_rank():
            store.wait(["turned"], timedelta(seconds=20))
        else:
            threading.Thread(target=turn).start()
        dist.monitored_barrier(timeout=timedelta(seconds=60))  # blocks where others only issue


def test_the_innermost_stays_inside_and_all_are_gone_afterwards():
    [seen] = launch(_order, ranks=1, quiet=True)
    assert seen == ["second all_reduce", "first all_reduce", "link all_reduce", "link", "first",
                    "second"]


def test_other_threads_run_while_a_collective_is_issued():
    """Else gloo's thread and this one can wait for each other's locks for ever: about every
    thousandth step on a slow link did."""
    launch(_another_thread_runs, ranks=2, quiet=True)

"""The launcher inside a live Jupyter kernel: cells, interrupts, restarts, and a killed kernel."""

import os
import signal

import leaks
import pytest
from notebook_kernel import Kernel

HANGING = """
import time, torch, torch.distributed as dist
from labs import launch
def work():
    print("ready")
    {body}
launch(work, ranks=2, hang_after=60)
"""


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run("import torch, torch.distributed as dist\nfrom labs import launch\nprint('ok')")
    yield kernel
    kernel.close()


def test_a_function_from_a_cell_runs_on_ranks(kernel):
    text, error = kernel.run("""
def work(x):
    print("hello from", dist.get_rank())
    total = torch.tensor([x])
    dist.all_reduce(total)
    return total.item()
launch(work, 3, ranks=2)""")
    assert error is None, error
    assert "rank 0 │ hello from 0\nrank 1 │ hello from 1\n" in text and "[6, 6]" in text


def test_a_kernel_has_no_child_that_its_shutdown_would_wait_for(kernel):
    text, error = kernel.run("""import os, psutil
launch(os.getpid, ranks=2, quiet=True)
children = psutil.Process().children(recursive=True)
len(children), [child.cmdline() for child in children if os.getpgid(child.pid) == os.getpgrp()]""")
    assert error is None, error
    assert "(2, [])" in text  # the resource tracker and the fork server


def test_an_error_names_cell_and_line_and_nothing_of_ours(kernel):
    text, error = kernel.run("""def broken():
    if dist.get_rank() == 1:
        raise ValueError("mine")
    dist.all_reduce(torch.ones(1))
launch(broken, ranks=2)""")
    assert "RankFailed: rank 1 raised ValueError: mine" in error
    assert 'line 3, in broken:  raise ValueError("mine")' in error and "In [" in error
    assert "rank 0 waits in all_reduce (#1) at In [" in error
    assert "labs/workers" not in error and "Traceback" not in error


@pytest.mark.parametrize("body", ["dist.recv(torch.ones(1), 1 - dist.get_rank())",
                                  "time.sleep(60)"], ids=["collective", "compute"])
def test_an_interrupt_leaves_nothing_and_the_next_cell_works(kernel, body):
    kernel.start(HANGING.format(body=body))
    kernel.finish(until="rank 1 │ ready")
    assert len(leaks.workers_of(kernel.pid)) == 2
    kernel.manager.interrupt_kernel()
    _, error = kernel.finish(timeout=30)
    assert "interrupted; all ranks were stopped" in error and "line" in error
    assert leaks.until(lambda: not leaks.workers_of(kernel.pid), 2)
    assert "[0, 1]" in kernel.run("launch(dist.get_rank, ranks=2)")[0]


def _runs(process):
    return process.is_running() and process.status() != "zombie"


def _end_with(action):
    """Starts a hanging launch in a new kernel, ends the kernel by `action`; what was left."""
    kernel = Kernel()
    try:
        kernel.start(HANGING.format(body="dist.recv(torch.ones(1), 1 - dist.get_rank())"))
        kernel.finish(until="rank 1 │ ready")
        workers = leaks.workers_of(kernel.pid)
        servers = [worker.parent() for worker in workers[:1]]
        assert len(workers) == 2 and os.listdir(kernel.temporary)
        action(kernel)
        leaks.until(lambda: not any(map(_runs, workers + servers))
                        and not leaks.temporary_files(kernel.temporary), 5)
        return (list(filter(_runs, workers + servers)),
                leaks.temporary_files(kernel.temporary))
    finally:
        kernel.close()


@pytest.mark.slow
def test_a_killed_kernel_takes_its_ranks_and_files_along():
    assert _end_with(lambda kernel: os.kill(kernel.pid, signal.SIGKILL)) == ([], set())


@pytest.mark.slow
def test_a_restarted_kernel_takes_its_ranks_and_files_along():
    assert _end_with(lambda kernel: kernel.manager.restart_kernel(now=True)) == ([], set())

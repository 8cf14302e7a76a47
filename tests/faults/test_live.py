"""What happens to a live kernel while ranks run: interrupts, a second kernel, a busy process."""

import time

import leaks
import pytest
from notebook_kernel import Kernel

WORK = """
def work():
    print("ready")
    {body}
    return dist.get_rank()
"""


@pytest.mark.parametrize("body", ["dist.recv(torch.ones(1), 1 - dist.get_rank())",
                                  "while True: pass", "time.sleep(3600)"],
                         ids=["collective", "loop", "sleep"])
def test_an_interrupt_says_where_the_ranks_were(in_kernel, body):
    in_kernel.run(WORK.format(body=body))
    in_kernel.start("launch(work, ranks=2, hang_after=60)")
    in_kernel.finish(until="rank 1 │ ready")
    in_kernel.manager.interrupt_kernel()
    _, error = in_kernel.finish(timeout=30)
    assert "interrupted; all ranks were stopped" in error and "line 3" in error, error
    assert "Traceback" not in error


def test_an_impatient_student_interrupts_twice(in_kernel):
    in_kernel.run(WORK.format(body="while True: pass"))
    in_kernel.start("launch(work, ranks=2, hang_after=60)")
    in_kernel.finish(until="rank 1 │ ready")
    in_kernel.manager.interrupt_kernel()
    time.sleep(0.1)
    in_kernel.manager.interrupt_kernel()
    # An interrupt while IPython shows the first one's message: IPython prints its own line alone.
    told = "{}{}".format(*in_kernel.finish())
    assert "interrupted; all ranks were stopped" in told or "KeyboardInterrupt" in told, told


@pytest.mark.slow
def test_an_interrupt_while_a_large_result_arrives(in_kernel):
    in_kernel.run("def large():\n    return torch.ones(250_000_000)")
    in_kernel.start("large_results = launch(large, ranks=2)")
    in_kernel.finish(until="results")
    in_kernel.manager.interrupt_kernel()
    _, error = in_kernel.finish()
    assert "interrupted; all ranks were stopped" in error, error


def test_interrupts_at_any_moment(in_kernel):
    """Whatever a launch is doing just then: it ends, by a result or by the interruption."""
    in_kernel.run(WORK.format(body="dist.barrier()"))
    for step in range(15):
        in_kernel.start("print('begun')\nprint(launch(work, ranks=4))")
        in_kernel.finish(until="begun")  # an interrupt that comes before is of no launch
        time.sleep(0.02 * step)
        in_kernel.manager.interrupt_kernel()
        shown, error = in_kernel.finish()
        assert "[0, 1, 2, 3]" in shown if error is None else "nterrupt" in error, (shown, error)
        # an interrupt that came after the cell's end would hit the next one
        assert leaks.until(lambda: in_kernel.run("print('idle')") == ("idle\n", None))


@pytest.mark.slow
def test_an_interrupt_during_start_up():
    """The very first launch waits until the fork server has imported torch."""
    kernel = Kernel()
    try:
        kernel.run("import torch, torch.distributed as dist\nfrom labs import launch")
        before = leaks.Snapshot(kernel.pid)
        kernel.start("launch(dist.get_rank, ranks=2)")
        time.sleep(0.7)
        kernel.manager.interrupt_kernel()
        shown, error = kernel.finish()
        assert "interrupted; all ranks were stopped\nranks 0 and 1 were still starting" in error
        assert before.left(seconds=20) == {}
        shown, error = kernel.run("launch(dist.get_rank, ranks=2)")
        assert "[0, 1]" in shown and "EOFError" not in shown, shown
    finally:
        kernel.close()


@pytest.mark.slow
def test_two_notebooks_launch_at_the_same_moment(in_kernel):
    code = """
totals = []
for turn in range(12):
    while time.time() < {start} + turn * 0.3: time.sleep(0.001)
    totals += launch(next_launch, ranks=2, quiet=True)
print(totals == [2.0] * 24)"""
    other = Kernel()
    try:
        other.run("import time, sys\nfrom labs import launch\n"
                  "import torch, torch.distributed as dist\n"
                  "def next_launch():\n    total = torch.ones(1)\n    dist.all_reduce(total)\n"
                  "    return total.item()\nlaunch(next_launch, ranks=2)")
        code = code.format(start=time.time() + 1)
        for kernel in (in_kernel, other):
            kernel.start(code)
        for kernel in (in_kernel, other):
            shown, error = kernel.finish()
            # on a busy machine a launch takes long enough to be announced, quiet or not
            assert shown.endswith("True\n") and error is None, (shown, error)
    finally:
        other.close()


def test_a_launch_inside_a_thread(in_kernel):
    shown, error = in_kernel.run("""
def work():
    print("in a thread")
    return dist.get_rank()
got = []
thread = threading.Thread(target=lambda: got.append(launch(work, ranks=2)))
thread.start(); thread.join()
print(got)""")
    assert error is None and "[[0, 1]]" in shown and "rank 1 │ in a thread" in shown, shown


def test_openmp_threads_and_an_event_loop_run_in_the_kernel(in_kernel):
    shown, error = in_kernel.run("""
import asyncio
torch.set_num_threads(2)
stop = threading.Event()
def burn():
    while not stop.is_set(): torch.ones(400, 400) @ torch.ones(400, 400)
thread = threading.Thread(target=burn)
thread.start()
async def tick():
    while not stop.is_set(): await asyncio.sleep(0.01)
ticking = asyncio.ensure_future(tick())
await asyncio.sleep(0.1)
try:
    print(launch(next_launch, ranks=2, quiet=True))
finally:
    stop.set(); thread.join(); await ticking""")
    assert error is None and "[2.0, 2.0]" in shown, (shown, error)


@pytest.mark.gpu
def test_cuda_is_initialised_in_the_kernel(kernel_with_cuda):
    shown, error = kernel_with_cuda.run("""
here = torch.ones(3, device="cuda")
def work():
    value = torch.ones(2, device=labs.device())
    dist.all_reduce(value)
    return value
there = launch(work, ranks=2)[1]
print(there.is_cuda, (there + here[:2]).tolist())""")
    assert error is None and "True [3.0, 3.0]" in shown, (shown, error)


@pytest.mark.gpu
def test_a_gpu_has_a_memory_limit_too(next_launch_works):
    import torch

    import labs

    def work():
        torch.empty(2**30, dtype=torch.uint8, device=labs.device())

    with pytest.raises(labs.OutOfMemory) as caught:
        labs.launch(work, ranks=2, memory_limit=5e8, quiet=True)
    assert (caught.value.asked, caught.value.allowed) == (2**30, 500_000_000)

"""What goes wrong on ranks with GPUs, and which message a student must then get: a table like
`faults.table`, for tests marked gpu and for scripts/on-gpu."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from faults.table import Fault

import labs
from labs.workers import cuda

FOREVER = 2**62  # clock cycles of a kernel that only waits


def ones(*sizes):
    return torch.ones(*sizes, device=labs.device())


def wait_in_a_kernel():
    """Waits for the others where a student does: after the collective has been launched."""
    total = ones(2)
    dist.all_reduce(total)
    return total.sum().item()


# Each begins with a collective that works: in the first one NCCL connects.


def raises_while_another_waits_in_a_kernel():
    wait_in_a_kernel()
    if dist.get_rank() == 1:
        raise ValueError("not this one")
    wait_in_a_kernel()


def is_killed_while_another_waits_in_a_kernel():
    wait_in_a_kernel()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_a_kernel()


def returns_while_another_waits_in_a_kernel():
    wait_in_a_kernel()
    if dist.get_rank() == 1:
        return
    wait_in_a_kernel()


def calls_another_collective_on_the_gpu():
    wait_in_a_kernel()
    if dist.get_rank() == 1:
        dist.broadcast(ones(2), 0)
    wait_in_a_kernel()


def calls_another_shape_on_the_gpu():
    dist.all_reduce(ones(2 + dist.get_rank()))


def never_connects():
    """Rank 1 never makes NCCL's first call."""
    if dist.get_rank() == 0:
        wait_in_a_kernel()


def is_stuck_in_a_kernel():
    if dist.get_rank() == 1:
        torch.cuda._sleep(FOREVER)
        ones(1).item()
    wait_in_a_kernel()


def wants_too_much_of_the_gpu():
    wait_in_a_kernel()
    if dist.get_rank() == 1:
        torch.empty(2**30, dtype=torch.uint8, device=labs.device())
    wait_in_a_kernel()


def wants_more_than_the_gpu_has():
    torch.empty(10**14, dtype=torch.uint8, device=labs.device())


def wants_too_much_while_a_collective_waits():
    """The error must be reported although a kernel of NCCL's is in flight."""
    wait_in_a_kernel()
    if dist.get_rank() == 1:
        dist.all_reduce(ones(2), async_op=True)
        torch.empty(2**30, dtype=torch.uint8, device=labs.device())
    else:
        dist.recv(ones(2), 1)


def indexes_out_of_range():
    if dist.get_rank() == 1:
        position = torch.tensor([7], device=labs.device())
        ones(3)[position].sum().item()
    wait_in_a_kernel()


def uses_one_gpu_on_all_ranks():
    total = torch.ones(2, device="cuda:0")
    dist.all_reduce(total)
    return total.tolist()


def is_interrupted(notebook):
    """Rank 1 presses Ctrl-C in the process that launched it, once rank 0 waits."""
    wait_in_a_kernel()
    if dist.get_rank() == 1:
        time.sleep(2)
        os.kill(notebook, signal.SIGINT)
        threading.Event().wait()
    wait_in_a_kernel()


LIMITED = {"memory_limit": 500_000_000}
FAULTS = [
    Fault(raises_while_another_waits_in_a_kernel, ("rank 1 raised ValueError: not this one",
                                                   "rank 0 waits in all_reduce"), within=15),
    Fault(is_killed_while_another_waits_in_a_kernel, ("rank 1 was killed by signal 9",), within=15),
    Fault(returns_while_another_waits_in_a_kernel, (
        "rank 0 waits in all_reduce (#2)", "rank 1 already returned", "never joined all_reduce"),
        error="RanksStuck", within=20),
    Fault(calls_another_collective_on_the_gpu, ("rank 1 calls broadcast", "rank 0 calls all_reduce"
                                                ), error="RanksStuck", within=15),
    Fault(calls_another_shape_on_the_gpu, ("float32 [2]", "rank 1 calls all_reduce of float32 [3]"),
          error="RanksStuck", within=15),
    Fault(never_connects, ("rank 0 waits in all_reduce", "rank 1 already returned"),
          error="RanksStuck", within=90),
    Fault(wants_too_much_of_the_gpu, ("rank 1 ran out of memory", "asked for 1.07 GB",
                                      "memory_limit is 500 MB"), error="OutOfMemory",
          options=LIMITED, within=15),
    Fault(wants_too_much_while_a_collective_waits, ("rank 1 ran out of memory",),
          error="OutOfMemory", options=LIMITED, within=15),
    Fault(is_interrupted, ("interrupted; all ranks were stopped", "rank 0 waits in all_reduce"),
          error="Interrupted", within=25),
    Fault(wants_more_than_the_gpu_has, ("its GPU has no more",), error="OutOfMemory", within=15),
    Fault(is_stuck_in_a_kernel, ("not done after 5 s", "rank 1 computes"), error="RanksStuck",
          options={"timeout": 5}, within=30),
    Fault(indexes_out_of_range, ("rank 1", "a kernel's assertion failed"), within=20),
    Fault(uses_one_gpu_on_all_ranks, ("two ranks use the same GPU",), within=60),
]
SECONDS = (returns_while_another_waits_in_a_kernel, never_connects, is_interrupted,
           is_stuck_in_a_kernel)  # take some, on any machine
_SEVERAL_GPUS = (uses_one_gpu_on_all_ranks,)


def cannot(fault) -> str:
    """Why this machine cannot have the fault, or nothing."""
    if fault.function in _SEVERAL_GPUS and cuda.count() < 2:
        return "needs several GPUs"
    return ""


def shown(fault) -> str:
    """Launches it on 2 ranks; returns what a student would read."""
    arguments = [os.getpid()] if fault.error == "Interrupted" else []
    try:
        found = labs.launch(fault.function, *arguments, ranks=2, quiet=True, **fault.options)
        return f"it returned {found}"
    except (labs.LaunchError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"

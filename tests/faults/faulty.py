"""What students do wrong: functions that run on every rank, as they would stand in a cell.

Each stands alone: a test sends its source into a notebook cell, the bench imports it.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["ctypes", "np", "os", "signal", "sys", "threading", "time", "torch", "warnings", "dist"]


# 1. exceptions


def raises_on_one():
    if dist.get_rank() == 1:
        raise ValueError("not this one")
    dist.all_reduce(torch.ones(2))


def raises_on_all():
    raise ValueError("not this one")


def raises_on_all_one_after_the_other():
    time.sleep(0.2 * dist.get_rank())
    raise ValueError("not this one")


def raises_on_rank_0_while_others_wait():
    if dist.get_rank() == 0:
        time.sleep(0.3)
        raise ValueError("not this one")
    dist.all_reduce(torch.ones(2))


def raises_in_a_hook():
    weight = torch.ones(2, requires_grad=True)

    def hook(gradient):
        raise KeyError("in the hook")

    if dist.get_rank() == 1:
        weight.register_hook(hook)
    weight.sum().backward()
    dist.all_reduce(weight.grad)


def raises_in_a_module():
    import users_module

    users_module.outer(dist.get_rank())
    dist.barrier()


def raises_what_cannot_be_shown():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    raise Broken


def raises_a_flood():
    raise ValueError("word " * 1_000_000)


# 2. collectives that do not fit together


def returns_early():
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(2))


def never_calls():
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(2))


def calls_different_collectives():
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(2), 0)
    else:
        dist.all_reduce(torch.ones(2))


def calls_with_different_shapes():
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def calls_with_different_dtypes():
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if dist.get_rank() else torch.float32))


def calls_in_different_order():
    first, second = torch.ones(2), torch.ones(3)
    for tensor in (first, second) if dist.get_rank() else (second, first):
        dist.all_reduce(tensor)


def calls_on_rank_0_only():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def receives_what_nobody_sends():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(2), src=0)


# 3. ranks that do not get on


def loops_for_ever():
    while dist.get_rank() == 1:
        pass
    dist.all_reduce(torch.ones(2))


def loops_after_others_returned():
    while dist.get_rank() == 1:
        pass


def all_loop():
    while True:
        time.sleep(0.01)


def sleeps_an_hour():
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.barrier()


def blocks_in_cpp():
    if dist.get_rank() == 1:
        ctypes.CDLL(None).pause()
    dist.all_reduce(torch.ones(2))


def blocks_in_cpp_holding_the_interpreter():
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).pause()
    dist.all_reduce(torch.ones(2))


def is_suspended():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))


def is_suspended_in_a_message():
    """As a rank may be that returns something large: what it sends has only begun to arrive."""
    from labs.workers import channel

    if dist.get_rank() == 1:
        with channel._channel._lock:
            size_of_the_message = (1_000_000).to_bytes(4, "big")
            os.write(channel._channel.connection.fileno(), size_of_the_message)
            os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))


def is_killed_in_a_message():
    from labs.workers import channel

    if dist.get_rank() == 1:
        with channel._channel._lock:
            size_of_the_message = (1_000_000).to_bytes(4, "big")
            os.write(channel._channel.connection.fileno(), size_of_the_message)
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


# 4. ranks that leave


def calls_sys_exit():
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(2))


def calls_os_exit():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(2))


def is_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


def crashes():
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(2))


def aborts():
    if dist.get_rank() == 1:
        os.abort()
    dist.all_reduce(torch.ones(2))


def raises_keyboard_interrupt():
    if dist.get_rank() == 1:
        raise KeyboardInterrupt
    dist.all_reduce(torch.ones(2))


def destroys_the_group():
    dist.destroy_process_group()
    dist.all_reduce(torch.ones(2))


# 5. memory


def wants_too_much_on_one():
    if dist.get_rank() == 1:
        torch.empty(100_000_000)
    dist.all_reduce(torch.ones(2))


def wants_too_much_on_all():
    torch.empty(100_000_000)


def grows_too_much():
    held = []
    while True:
        held.append(torch.ones(1_000_000))


def wants_a_large_array():
    np.ones(50_000_000)


def wants_more_than_the_machine_has():
    torch.empty(10**14)


# 7. values that travel badly


def returns_a_lock():
    return threading.Lock() if dist.get_rank() == 1 else None


def returns_a_generator():
    return (i for i in range(3)) if dist.get_rank() == 1 else None


def returns_an_open_file():
    return open(os.devnull) if dist.get_rank() == 1 else None  # noqa: SIM115


def returns_a_gigabyte():
    return torch.ones(250_000_000) if dist.get_rank() == 1 else None


def reports_nan():
    from labs import report

    for step in range(3):
        report(step=step, loss=float("nan") if step else 1.0)
    return dist.get_rank()


# 8. output


def prints_a_flood():
    for number in range(100_000):
        print("line", number)
    return dist.get_rank()


def prints_a_blob():
    print("before", flush=True)
    os.write(1, bytes(range(256)) * 10_000 + b"\n")
    print("after")
    return dist.get_rank()


def asks_for_input():
    return input("your name? ")


def warns_on_every_rank():
    for _ in range(3):
        warnings.warn("careful", stacklevel=1)
    return dist.get_rank()


def warns_in_a_forked_child():
    """As a DataLoader's worker may: it is forked while another thread of the rank sends."""
    from labs.workers import channel

    with channel._channel._lock:
        child = os.fork()
        if child == 0:
            warnings.warn("from a child", stacklevel=1)
            os._exit(0)
    return os.waitpid(child, 0)[1]


def reports_in_a_forked_child():
    """What a child writes into the rank's pipe would meet what the rank writes."""
    from labs import report

    child = os.fork()
    for step in range(2_000):
        report(step=step, loss=1.0)
    if child == 0:
        os._exit(0)
    return os.waitpid(child, 0)[1]


def hangs_without_a_heartbeat():
    """A look at the main thread may fail, for example where a library changes what is looked at."""
    [beats] = [thread for thread in threading.enumerate() if thread.name == "labs-heartbeat"]
    usual, failed = beats.progress, []

    def progress():
        if not failed:
            failed.append(True)
            raise RuntimeError("dictionary changed size during iteration")
        return usual()

    beats.progress = progress
    while not failed:
        time.sleep(0.1)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def launches_again():
    from labs import launch

    return launch(print, ranks=2)


# what comes after every fault


def next_launch():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

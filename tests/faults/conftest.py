import time

import leaks
import pytest

IMPORTS = """
import ctypes, os, signal, sys, threading, time, warnings
import numpy as np
import torch, torch.distributed as dist
import labs
from labs import launch
from faults.faulty import next_launch
launch(int, ranks=1, quiet=True)
print("ok")
"""


def ready_kernel():
    """A kernel of its own, ready to launch."""
    import os

    from notebook_kernel import Kernel  # of Jupyter, which a machine with GPUs may lack

    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([os.path.dirname(here), here, os.environ.get("PYTHONPATH", "")])
    kernel = Kernel(PYTHONPATH=path)
    text, error = kernel.run(IMPORTS)
    assert error is None, error
    return kernel


@pytest.fixture(scope="session")
def kernel():
    """One kernel for many faults."""
    kernel = ready_kernel()
    yield kernel
    kernel.close()


@pytest.fixture
def kernel_with_cuda():
    """A kernel that may keep a CUDA context: it ends with the test."""
    kernel = ready_kernel()
    yield kernel
    kernel.close()


@pytest.fixture
def in_kernel(kernel):
    """The kernel; afterwards nothing is left of the test's launches, and the next one works."""
    before = leaks.Snapshot(kernel.pid, kernel.temporary)
    yield kernel
    assert before.left() == {}
    began = time.monotonic()
    text, error = kernel.run("launch(next_launch, ranks=2, quiet=True)")
    assert error is None and "[2.0, 2.0]" in text, error
    assert time.monotonic() - began < 10


@pytest.fixture
def next_launch_works(warm_launcher):
    """Afterwards nothing is left of the test's launches, and the next one works."""
    from faults.faulty import next_launch

    from labs import launch

    before = leaks.Snapshot()
    yield
    assert before.left() == {}
    assert launch(next_launch, ranks=2, quiet=True) == [2.0, 2.0]

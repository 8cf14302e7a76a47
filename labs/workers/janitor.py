"""Loaded into the fork server: the last one out turns off the light.

The fork server outlives a kernel that was killed by a moment. It uses it to remove the private
directory (its own socket, the rendezvous files) that nobody else is left to remove.
"""

import atexit
import os
import shutil
import sys
from functools import partial
from multiprocessing import forkserver


def _leave(server):
    if os.getpid() != server:
        return
    address = forkserver._forkserver._forkserver_address
    if isinstance(address, str) and os.path.basename(os.path.dirname(address)).startswith("pymp-"):
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    os._exit(0)  # taking down an interpreter that has imported torch takes another second


def _forget_labs(server):
    # Workers inherit this process's modules, and must import the labs that is on disk by then.
    if os.getppid() != server:
        return  # a child of a worker
    for name in [name for name in sys.modules if name.split(".")[0] == "labs"]:
        del sys.modules[name]


def _say_nothing_of_an_interrupt(kind, error, traceback):
    # A caller that was interrupted while it started a rank leaves the rank without its orders.
    if kind is not EOFError:
        sys.__excepthook__(kind, error, traceback)


if sys.argv[:1] == ["-c"]:  # only in the fork server, which is started with `python -c`
    if hasattr(os, "setsid"):
        os.setsid()  # a signal to the kernel's process group must not take the janitor along
    atexit.register(_leave, os.getpid())
    os.register_at_fork(after_in_child=partial(_forget_labs, os.getpid()))
    sys.excepthook = _say_nothing_of_an_interrupt

"""Loaded into the fork server: the last one out turns off the light.

The fork server outlives a kernel that was killed by a moment. It uses it to remove the private
directory (its own socket, the rendezvous files) that nobody else is left to remove.
"""

import atexit
import gc
import os
import shutil
import sys
from functools import partial
from multiprocessing import forkserver

_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_imported = {}


def _leave(server):
    if os.getpid() != server:
        return
    address = forkserver._forkserver._forkserver_address
    if isinstance(address, str) and os.path.basename(os.path.dirname(address)).startswith("pymp-"):
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    os._exit(0)  # taking down an interpreter that has imported torch takes another second


def _ready_a_worker(server):
    if os.getppid() != server:
        return  # a child of a worker
    if os.environ.get("LABS_HOME") != _HOME or _dates(_imported) != _imported:
        for name in _imported:  # a worker runs the labs that is on disk, and that of its caller
            del sys.modules[name]


def _dates(names) -> dict:
    """When the file of each module was last changed."""
    try:
        return {name: os.stat(sys.modules[name].__file__).st_mtime_ns for name in names}
    except OSError:
        return {}


def all_is_imported():
    """Called when the server has imported all it will: remembers what it has of labs, so that no
    worker need look through all modules. To touch a shared page is to copy it."""
    _imported.update(_dates([name for name in sys.modules if name.split(".")[0] == "labs"]))
    gc.collect()
    gc.freeze()  # nor need its garbage collector look at what is shared


def _say_nothing_of_an_interrupt(kind, error, traceback):
    # A caller that was interrupted while it started a rank leaves the rank without its orders.
    if kind is not EOFError:
        sys.__excepthook__(kind, error, traceback)


if sys.argv[:1] == ["-c"]:  # only in the fork server, which is started with `python -c`
    if hasattr(os, "setsid"):
        os.setsid()  # a signal to the kernel's process group must not take the janitor along
    atexit.register(_leave, os.getpid())
    os.register_at_fork(after_in_child=partial(_ready_a_worker, os.getpid()))
    sys.excepthook = _say_nothing_of_an_interrupt

"""In the fork server: removes its temporary directory when it exits, and drops modules of labs that
are out of date from its forks.

The fork server outlives a killed kernel by a moment. It is the only process left then that can
remove its own socket and the rendezvous files.
"""

import atexit
import gc
import os
import shutil
import sys
from functools import partial
from multiprocessing import forkserver

_LABS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_modification_times = {}  # of the files of labs that the server has imported


def _remove_directory(server):
    """Removes the fork server's temporary directory when the server, not a fork of it, exits."""
    if os.getpid() != server:
        return
    address = forkserver._forkserver._forkserver_address
    if isinstance(address, str) and os.path.basename(os.path.dirname(address)).startswith("pymp-"):
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    os._exit(0)  # finalizing an interpreter that has imported torch takes another second


def _forget_outdated_labs(server):
    """In a fresh fork: a rank must run the labs of its caller, as it is on disk now."""
    if os.getppid() != server:
        return  # a child of a rank, such as a DataLoader's
    if (os.environ.get("LABS_HOME") != _LABS
            or _times(_modification_times) != _modification_times):
        for name in _modification_times:
            del sys.modules[name]


def _times(names) -> dict[str, int]:
    """When the file of each module was last changed, in nanoseconds."""
    try:
        return {name: os.stat(sys.modules[name].__file__).st_mtime_ns for name in names}
    except OSError:
        return {}


def freeze_imports() -> None:
    """Called when the server has imported everything: notes which modules are of labs, so that no
    fork has to search `sys.modules`. A fork copies each shared page of memory that it writes to,
    and a reference count is a write; `gc.freeze` keeps its garbage collector off them, too."""
    _modification_times.update(
        _times([name for name in sys.modules if name.split(".")[0] == "labs"]))
    gc.collect()
    gc.freeze()


def _hide_eof_error(kind, error, traceback):
    # A caller that was interrupted while it started a rank closes the pipe that would have
    # carried the rank's arguments: the fork's EOFError means nothing to the student.
    if kind is not EOFError:
        sys.__excepthook__(kind, error, traceback)


if sys.argv[:1] == ["-c"]:  # only in the fork server, which is started with `python -c`
    if hasattr(os, "setsid"):
        os.setsid()  # a signal to the kernel's process group must not end the fork server
    atexit.register(_remove_directory, os.getpid())
    os.register_at_fork(after_in_child=partial(_forget_outdated_labs, os.getpid()))
    sys.excepthook = _hide_eof_error

"""In the fork server: imports what all ranks share, once."""

import contextlib
import ctypes
import gc
import mmap
import sys
from importlib import import_module
from pkgutil import iter_modules

from labs.workers import forkserver_cleanup, third_party

# A preloaded module stays as it was when the server started: third-party packages, and of labs what
# a check's ranks begin with (a name is no import: nothing here calls these packages). When one of
# its files has changed since, forkserver_cleanup drops it.
MODULES = [
    *third_party.MODULES,
    "labs.workers.worker",
    "labs.training.strategies.tensors_by_category",
    "labs.predictions.memory.recipes",
]
PACKAGES = ["labs.checks", "labs.pictures"]  # all their modules
_MADV_COLLAPSE = 25  # since Linux 6.1
_HUGE_PAGE = 2**21  # bytes


def _import_all():
    # What is imported stays: to look through it for garbage again and again would take 0.45 s of
    # the 5 s of CPU of a first launch (torch 2.13).
    gc.disable()
    for name in [*MODULES, *_modules_of_packages()]:
        # An import that raises must not end the server: torch._dynamo makes a directory, which
        # fails where /tmp is full. The rank that needs the module will report the reason.
        with contextlib.suppress(Exception):
            import_module(name)
    forkserver_cleanup.freeze_imports()
    gc.enable()


def _modules_of_packages() -> list[str]:
    return [found.name for package in PACKAGES
            for found in iter_modules(import_module(package).__path__, f"{package}.")
            if not found.ispkg]


def _collapse_heap():
    """Asks Linux to keep the heap in huge pages. A fork copies the page table: 250 MB in small
    pages are 60,000 entries for each rank, and most of the time that its start takes."""
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        areas = [line.split() for line in maps]
    for span, access, *_, name in (area if len(area) > 5 else [*area, "[heap]"] for area in areas):
        if access == "rw-p" and name == "[heap]":
            first, last = (int(end, 16) for end in span.split("-"))
            for start in range(-(-first // _HUGE_PAGE) * _HUGE_PAGE, last - _HUGE_PAGE + 1,
                               _HUGE_PAGE):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)


_import_all()
if sys.platform == "linux" and mmap.PAGESIZE < _HUGE_PAGE:
    with contextlib.suppress(OSError, AttributeError):
        _collapse_heap()

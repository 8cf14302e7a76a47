"""What the fork server imports once, for all workers to share."""

import contextlib
import ctypes
import mmap
import sys
from importlib import import_module

from labs.workers import forkserver_cleanup

# A preloaded module stays as it was when the server started: third-party ones, and of labs only
# what a worker begins with, which the janitor drops when a file of it has changed since.
MODULES = [
    "numpy",
    "cloudpickle",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # torch.optim imports it at the first step
    "torch.profiler",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "labs.workers.worker",
]
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_HUGE = 2**21  # bytes of a huge page


def _import_all():
    for name in MODULES:
        with contextlib.suppress(Exception):  # the rank that needs it will say what is wrong
            import_module(name)
    forkserver_cleanup.all_is_imported()


def _gather_in_huge_pages():
    """Asks Linux to keep the heap in huge pages. A fork copies the page table: 250 MB in small
    pages are 60,000 entries for each worker, and most of the time that its start takes."""
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        areas = [line.split() for line in maps]
    for span, access, *_, name in (area if len(area) > 5 else [*area, "[heap]"] for area in areas):
        if access == "rw-p" and name == "[heap]":
            first, last = (int(end, 16) for end in span.split("-"))
            for start in range(-(-first // _HUGE) * _HUGE, last - _HUGE + 1, _HUGE):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_HUGE), _COLLAPSE)


_import_all()
if sys.platform == "linux" and mmap.PAGESIZE < _HUGE:
    with contextlib.suppress(OSError, AttributeError):
        _gather_in_huge_pages()

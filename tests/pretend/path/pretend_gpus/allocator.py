"""torch's CPU allocator, as a GPU's: it keeps the peak of what tensors hold, and refuses more than
a limit. Exact, in all threads, those of C++ too.

Its `allocate` is replaced by a few instructions of machine code (x86-64), which go on to the
original. A function of Python would need the interpreter's lock there, and threads of gloo that
hold locks of their own would wait for it for ever.
"""

import ctypes
import mmap

import torch

from pretend_gpus import private

_TRIED = 123_457  # bytes
_ALLOCATE, _FUNCTIONS = 2, 8  # in its table of virtual functions: place, and how many are copied
_UNLIMITED = 2**62
REFUSED = str(2**62)  # bytes: what the original is asked for in place of what exceeds the limit


class _Cells(ctypes.Structure):
    """Bytes: where c10 counts those of all tensors; the most that are allowed on the GPU; those of
    the host; the most so far on the GPU; the allocation that was refused last."""

    _fields_ = [("counted", ctypes.c_void_p), ("allowed", ctypes.c_int64),
                ("host", ctypes.c_int64), ("peak", ctypes.c_int64), ("refused", ctypes.c_int64)]


_cells = _Cells(allowed=_UNLIMITED)
_kept = []  # memory that C++ points to


def install() -> None:
    """Makes c10 count the bytes of all tensors, and replaces its allocator's function."""
    _cells.counted = ctypes.addressof(private.live_bytes())
    place = private.default_allocator()
    functions = (ctypes.c_void_p * (2 + _FUNCTIONS)).from_buffer_copy(
        ctypes.string_at(place.value - 16, 8 * (2 + _FUNCTIONS)))  # with type information before
    functions[2 + _ALLOCATE] = _code(functions[2 + _ALLOCATE])
    place.value = ctypes.addressof(functions) + 16
    _kept.append(functions)
    private.require(_is_asked(), "c10's allocator is not asked for tensors' memory")


def _is_asked():
    """Whether one more tensor passes the new function."""
    torch.empty(_TRIED, dtype=torch.uint8)
    found = _cells.peak >= _TRIED
    reset_peak()
    return found


def _code(original):
    """Returns the address of DataPtr allocate(this, nbytes): rdi is the result's, rdx nbytes."""
    def imm64(value):
        return value.to_bytes(8, "little")

    code = b"".join([
        b"\x48\xb8", imm64(ctypes.addressof(_cells)),  # mov rax, cells
        b"\x48\x8b\x08\x48\x8b\x09",  # rcx = *cells.counted
        b"\x48\x01\xd1",  # rcx += nbytes
        b"\x48\x2b\x48\x10",  # rcx -= cells.host
        b"\x48\x3b\x48\x08\x7f\x16",  # if rcx > cells.allowed: goto refuse
        b"\x48\x3b\x48\x18\x7e\x04",  # if rcx > cells.peak:
        b"\x48\x89\x48\x18",  # cells.peak = rcx
        b"\x48\xb8", imm64(original), b"\xff\xe0",  # go on: goto original
        b"\x48\x89\x50\x20",  # refuse: cells.refused = nbytes
        b"\x48\xba", imm64(int(REFUSED)), b"\xeb\xe4"])  # nbytes = REFUSED; goto go on
    # private: a fork has cells of its own, and must not share code that points to them
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                     prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    _kept.append(page)
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def allocated() -> int:
    """Returns the bytes of this process's tensors on the GPU."""
    return ctypes.c_int64.from_address(_cells.counted).value - _cells.host


def peak() -> int:
    """Returns the most of that since `reset_peak`."""
    return max(_cells.peak, allocated())


def reset_peak() -> None:
    _cells.peak = allocated()


def limit(nbytes: int) -> None:
    """From now on an allocation after which tensors on the GPU would have more bytes fails."""
    _cells.allowed = nbytes


def refused() -> int:
    """Returns the bytes of the allocation that failed last."""
    return _cells.refused


def count_on_host(nbytes: int) -> None:
    """So many bytes more, or less, are the host's: of tensors that are, or will be, on the CPU."""
    _cells.host += nbytes

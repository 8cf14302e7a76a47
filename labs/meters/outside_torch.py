"""Bytes that student code allocates outside torch's allocator: NumPy arrays, bytes, pickled data,
lists of numbers, and mapped files, shared memory among them.

Python's and NumPy's allocations are traced exactly (tracemalloc), so that models of a few KB can be
judged; the process's resident set moves by MB for reasons of its own (imports, free lists).
"""

import functools
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

from labs.workers.source_lines import Place

_SMALLEST = 512  # bytes of a block that counts: hooks, closures and lists of parameters are smaller
_NUMPY = 389047  # np.lib.tracemalloc_domain
# Where copies are allocated on behalf of the student: pickled, copied, saved.
_FOR_STUDENT = ("pickle.py", "copy.py", os.path.join("torch", "serialization.py"),
                os.path.join("torch", "_utils.py"))


@dataclass(frozen=True)
class Held:
    """Bytes outside torch, and the student's line that allocated most of them (None where a library
    did it for them)."""

    bytes: int = 0
    place: Place | None = None


class OutsideTorch:
    """`with OutsideTorch() as outside:` traces what is allocated inside; `outside.held()` is what
    of it is still there."""

    def __enter__(self):
        self._mapped = dict(_mapped_files())
        self._started = not tracemalloc.is_tracing()
        # Somebody else may be tracing already: then what was there before is subtracted.
        self._before = sum(self._by_line().values()) if not self._started else 0
        if self._started:
            tracemalloc.start()
        return self

    def __exit__(self, *exception):
        if self._started:
            tracemalloc.stop()

    def held(self) -> Held:
        """What is allocated now."""
        by_line = self._by_line()
        mapped = sum(size - self._mapped.get(name, 0) for name, size in _mapped_files())
        total = sum(by_line.values()) - self._before + max(0, mapped)
        lines = [line for line in by_line if Place(*line, "").is_students]
        most = max(lines, key=by_line.get, default=None)
        return Held(total, most and Place(*most, ""))

    def _by_line(self) -> dict[tuple[str, int], int]:
        found = {}
        # the raw traces: a snapshot's own objects take 50 times as long to read
        traces = tracemalloc.take_snapshot().traces._traces
        for domain, size, frames, *_ in [trace for trace in traces if trace[1] >= _SMALLEST]:
            if domain == _NUMPY or _is_students(frames[0][0]):
                found[frames[0]] = found.get(frames[0], 0) + size
        return found


@functools.cache
def _is_students(filename) -> bool:
    return filename.endswith(_FOR_STUDENT) or Place(filename, 0, "").is_students


def _mapped_files() -> Iterator[tuple[str, int]]:
    """(name and device, bytes) of the files that this process has mapped, libraries left out; where
    there is no /proc, nothing."""
    sizes = {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                addresses, _, _, device, inode, *name = line.split(maxsplit=5)
                if inode != "0" and ".so" not in name[0]:
                    begin, end = (int(address, 16) for address in addresses.split("-"))
                    key = f"{name[0].strip()} {device} {inode}"
                    sizes[key] = sizes.get(key, 0) + end - begin
    except OSError:
        return
    yield from sizes.items()

"""What a GPU's allocator and driver say of a run, beside what was recorded of it."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median

from labs.meters.allocations import Allocation
from labs.workers import cuda

_SAME = 1_000_000  # nanoseconds by which two clocks may place one event apart
# The only threads without the profiler are the backend's.
_OTHER_THREAD = "c10d:: on a thread of its own"


@dataclass(frozen=True)
class Allocator:
    """What a GPU's allocator and driver say of the run that was recorded, in bytes.

    peak: torch.cuda.max_memory_allocated, less what was there before. difference: what the recorded
    peak has more than that; 0 on an H200, in 27 of 27 recordings.
    rounding: what blocks have more than the tensors in them, at the peak. workspaces: cuBLAS's, of
    the recorded bytes; a later run in the same process finds them made. reserved, used: as in
    `GpuMemory`, when the run was over.
    """

    peak: int
    difference: int
    rounding: int
    workspaces: int
    reserved: int
    used: int

    @property
    def agreement(self) -> str:
        """How the allocator's own peak compares with the recorded one, in words."""
        if not self.difference:
            return "as recorded"
        return (f"{abs(self.difference):,} bytes {'less' if self.difference > 0 else 'more'} than "
                "recorded")

    def __str__(self):
        return (f"the allocator's own peak of the run is {self.peak:,} bytes, {self.agreement}; "
                f"reserved {self.reserved:,}, the driver shows {self.used:,}")


def start() -> cuda.GpuMemory:
    """On a rank: returns what its GPU holds as a recording begins; peaks count from now on."""
    # Cached blocks of earlier runs would count in what this run reserves.
    cuda.empty_cache()
    cuda.reset_peak()
    return cuda.memory()


def compare(before: cuda.GpuMemory, recorded: int, workspaces: int) -> Allocator:
    """On a rank: returns what the allocator says of the run since `before`, whose recorded peak and
    workspaces have so many bytes."""
    after = cuda.memory()
    peak = after.peak - before.allocated
    return Allocator(peak, recorded - peak, after.peak - after.requested, workspaces,
                     after.reserved, after.used)


def complete(allocations: list[Allocation], history: list[tuple[int, int, int]]) -> None:
    """Corrects, in place, what the profiler has recorded by the allocator's own history (see
    `cuda.allocation_history`). A GPU's backward runs on a thread of autograd, and most of what that
    thread frees, saved tensors and FSDP2's gathered parameters, the profiler does not see; nor what
    a backend's threads allocate and free. Does nothing where there is no history.

    An allocation keeps the profiler's time, so that it stays on the right side of the marks; a free
    that was not seen gets one between its neighbours' in the history.
    """
    blocks = _blocks(history)
    pairs = _paired(allocations, blocks)
    if not pairs:
        return
    offset = median(mine.begin - block.time for mine, block in pairs)
    times = _times(history, pairs, offset)
    for mine, block in pairs:
        end = times[block.freed] if block.freed is not None else 2**63
        if mine.missed or abs(end - mine.end) > _SAME:
            mine.end = max(end, mine.begin)
        mine.missed = False
    seen = {block.index for _, block in pairs}
    for block in blocks:
        if block.index not in seen:
            nbytes = -(-block.nbytes // cuda.BLOCK) * cuda.BLOCK
            end = times[block.freed] if block.freed is not None else 2**63
            allocations.append(Allocation(block.address, nbytes, times[block.index],
                                          (_OTHER_THREAD,), end, missed=False))


@dataclass
class _Block:
    """A block of the history. index, freed: positions there at which it was given and, if it was,
    taken back. time: nanoseconds."""

    index: int
    time: int
    address: int
    nbytes: int
    freed: int | None = None


def _blocks(history) -> list[_Block]:
    blocks, live = [], {}
    for index, (time, address, nbytes) in enumerate(history):
        if nbytes > 0:
            live[address] = _Block(index, time, address, nbytes)
            blocks.append(live[address])
        elif address in live:  # else it was there before the history began
            live.pop(address).freed = index
    return blocks


def _paired(allocations, blocks) -> list[tuple[Allocation, _Block]]:
    """Each recorded allocation with its block. At one address both come in order; the history may
    have more, of other threads: then the nearest in time is meant that leaves one for each of the
    later ones."""
    here = defaultdict(list)  # address -> blocks that are not paired yet
    for block in blocks:
        here[block.address].append(block)
    remaining = Counter(mine.address for mine in allocations)
    pairs = []
    for mine in allocations:  # in order of time
        left = here[mine.address]
        spare = len(left) - remaining[mine.address]
        remaining[mine.address] -= 1
        if left:
            best = min(range(max(spare, 0) + 1), key=lambda i: abs(left[i].time - mine.begin))
            pairs.append((mine, left[best]))
            del left[:best + 1]
    return pairs


def _times(history, pairs, offset) -> list[int]:
    """A time on the profiler's clock for each entry of the history, in the history's order."""
    times = [round(time + offset) for time, _, _ in history]
    for mine, block in pairs:
        times[block.index] = mine.begin
    fixed = {block.index for _, block in pairs}
    latest = 2**63
    for index in reversed(range(len(times))):
        if index in fixed:
            latest = times[index]
        else:
            times[index] = min(times[index], latest)
    earliest = 0
    for index, time in enumerate(times):
        if index not in fixed:
            times[index] = max(time, earliest)
        earliest = max(earliest, times[index])
    return times

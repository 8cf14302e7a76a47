"""What a GPU's allocator and driver say of a run, beside what was recorded of it."""

from dataclasses import dataclass

from labs.workers import cuda


@dataclass(frozen=True)
class Allocator:
    """What a GPU's allocator and driver say of the run that was recorded, in bytes.

    peak: torch.cuda.max_memory_allocated, less what was there before. difference: what the recorded
    peak has more than that; the profiler misses what threads of its backend free or allocate.
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

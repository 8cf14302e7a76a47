"""What a rank really has in memory, by category, over the steps of the plain loop.

torch's profiler reports every allocation, those of C++ included, and every allocation is followed
until it is freed. On a CPU the sizes are the tensors'; on a GPU they are those of the caching
allocator's blocks, and its own peak is reported beside the recorded one.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, sleep
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import distributed
from torch.profiler import ProfilerActivity, profile, record_function

from labs.meters import gpu_allocator
from labs.meters.allocations import (
    COMPARES_SHAPES,
    MARK,
    end_temporaries,
    follow,
    read_profile,
)
from labs.meters.outside_torch import Held, OutsideTorch
from labs.meters.waits import WaitObserver
from labs.training.memory_categories import Memory
from labs.workers import cuda, devices

PHASES = ("build", "forward", "backward", "step")
_DELAY, _MAX_DELAY = 5e-4, 0.05  # seconds
_longer = 1  # times that delay, see `wait_longer`
_COMMUNICATION = ("FSDP::all_gather", "FSDP::post_backward_reduce", "FSDP::reduce_scatter",
                  "fsdp::", "c10d::", "gloo:", "nccl:", "ZeRO::")
_BACKENDS = ("c10d::", "gloo:", "nccl:")
# In them cuBLAS takes its workspaces from torch's allocator, for good: forward's thread and
# backward's have one each.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm",
             "aten::_addmm_activation")
_DDP = "DistributedDataParallel.forward"  # all of forward, and new buckets before it


@dataclass(frozen=True)
class Report:
    """Bytes by category at the end of each phase of the last step, and at the moment of the run at
    which the total was highest. peaks: phase -> Memory at its highest moment, of the last step too;
    the whole of building is "build". outside: phase -> what is allocated outside torch at its end,
    where that was asked for. allocator: None on a CPU. gathered: the most bytes of the last step
    that FSDP2's all-gathers had allocated at once: their flat outputs, and the parameters copied
    out of them."""

    phases: dict[str, Memory]
    peak: Memory
    peaks: dict[str, Memory] = field(default_factory=dict)
    outside: dict[str, Held] = field(default_factory=dict)
    allocator: gpu_allocator.Allocator | None = None
    gathered: int = 0

    @property
    def step_peak(self) -> Memory:
        """Memory at the highest moment of the last step: building is over, and all that the first
        step makes is there."""
        return max((self.peaks[phase] for phase in PHASES[1:]), key=lambda held: held.total)

    def __repr__(self):
        rows = {**self.phases, "peak": self.peak}
        lines = [f"{name:10s}{memory.total:>14,} bytes  " + ", ".join(
            f"{category} {value:,}" for category, value in memory.by_name().items() if value)
            for name, memory in rows.items()]
        return "\n".join([*lines, *([str(self.allocator)] if self.allocator else [])])


def leanest(reports: list[Report]) -> Report:
    """Phase by phase the smallest of several reports of the same job: the profiler misses frees on
    gloo's threads at times, so a report may be too high, but never too low."""
    def least(pick):
        return min(map(pick, reports), key=lambda held: held.total)

    return Report({phase: least(lambda r, p=phase: r.phases[p]) for phase in PHASES},
                  least(lambda r: r.peak),
                  {phase: least(lambda r, p=phase: r.peaks[p]) for phase in PHASES},
                  {phase: min((r.outside[phase] for r in reports), key=lambda held: held.bytes)
                   for phase in reports[0].outside},
                  min(reports, key=lambda r: r.peak.total).allocator,
                  min(r.gathered for r in reports))


def record(build, batches, held=None, outside: bool = False) -> Report:
    """On a rank: runs the plain loop over the batches and reports the memory of its device.

    build() returns (module, optimizer); it is called inside, so that all it allocates is recorded.
    Create the batches before. At least two steps show what lasts from step to step. held(module,
    optimizer) -> category -> tensors, for a library that keeps them in attributes of its own.
    outside: also records what student code holds outside torch, for which Python's allocations are
    traced, so that it takes up to twice as long. On a GPU what torch's allocator keeps unused goes
    back to the driver first.
    """
    before = gpu_allocator.start() if devices.device().type == "cuda" else None
    loop, batches = _RecordedLoop(held or _held_by_torch, outside), list(batches)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    history = cuda.allocation_history() if before else nullcontext([])
    with (loop.traced, _DelayedWaits(), _ddps_comparison_named(), history as given,
          profiler as recorded):
        loop.run(build, batches)
    changes, times = read_profile(recorded)
    allocations = follow(changes)
    gpu_allocator.complete(allocations, given)
    report = _report(allocations, times, loop.marks)
    workspaces = sum(each.nbytes for each in allocations if each.is_workspace)
    return replace(report, outside=loop.outside, allocator=before and gpu_allocator.compare(
        before, report.peak.total, workspaces))


class _RecordedLoop:
    """The plain loop with a mark after each phase. marks: (name, category -> addresses). outside:
    phase -> what is allocated outside torch, after building and in the last step."""

    def __init__(self, held, outside):
        self._held, self._saved, self.marks, self.outside = held, set(), [], {}
        self.traced = OutsideTorch() if outside else nullcontext()
        self._outside_phases = set(PHASES[:1] if outside else ())  # it takes 30 ms each time

    def run(self, build, batches):
        self._job = build()
        self._mark("build")
        for number, batch in enumerate(batches, 1):
            if number == len(batches) and self._outside_phases:
                self._outside_phases = set(PHASES[1:])
            self._step(*self._job, batch)

    def _step(self, module, optimizer, batch):
        # Both hooks return the tensor that they get: nothing is copied, only the addresses are
        # noted. A hook that returned another object would change what autograd keeps allocated.
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            loss = module(**batch).loss
        self._mark("forward")
        loss.backward()
        # While the loss is held, its bytes count after backward too.
        del loss
        self._mark("backward")
        optimizer.step()
        self._mark("step")
        optimizer.zero_grad()
        # After zero_grad(): what is alive at a boundary lasts from step to step.
        self._mark("boundary")
        self._saved.clear()

    def _pack(self, tensor):
        self._saved.add(_address(tensor))
        return tensor

    def _mark(self, phase):
        """Records which addresses hold which category at this moment."""
        if phase in self._outside_phases:
            self.outside[phase] = self.traced.held()
        addresses = {category: {_address(t) for t in tensors}
                     for category, tensors in self._held(*self._job).items()}
        # Saved tensors count at the end of forward only: in backward they are freed one after the
        # other, and their addresses are used again.
        addresses["activations"] = set(self._saved) if phase == "forward" else set()
        with record_function(f"{MARK}{len(self.marks)}"):
            self.marks.append((phase, addresses))


class _DelayedWaits(WaitObserver):
    """Sleeps 0.5 ms after each wait for a collective, and until gloo's threads sleep, so that they
    drop their references first: the profiler misses frees on those threads."""

    def wait_ended(self, waited):
        # On a busy machine a thread gets a core only after several ms. With a limit: another
        # collective may be computing on one of these threads.
        until = perf_counter() + _MAX_DELAY * _longer
        sleep(_DELAY * _longer)
        while _gloo_runs() and perf_counter() < until:
            sleep(_DELAY)


def _gloo_runs() -> bool:
    """Whether a thread on which gloo's collectives run has a core, or waits for one. False where
    there is no /proc (macOS)."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        try:
            # number (name) state ...; the name may have spaces
            name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended meanwhile
            continue
        if name.startswith("pt_gloo_runloo") and rest.split()[0] == "R":
            return True
    return False


@contextmanager
def wait_longer(times: float) -> Iterator[None]:
    """Inside, what is recorded gives gloo's thread `times` as long to drop its references: on a
    busy machine it gets a core late, and the profiler misses more frees."""
    global _longer
    before, _longer = _longer, times
    try:
        yield
    finally:
        _longer = before


@contextmanager
def _ddps_comparison_named() -> Iterator[None]:
    """Inside, DDP compares its parameters' shapes within a span: C++ allocates and frees what it
    sends for that, and gloo's thread may hold it last."""
    name = "_verify_param_shape_across_processes"  # private: where it is missing, no span is
    compare = getattr(distributed, name, None)

    def named(*args, **kwargs):
        with record_function(COMPARES_SHAPES):
            return compare(*args, **kwargs)

    with mock.patch.object(distributed, name, named) if compare else nullcontext():
        yield


def _held_by_torch(module, optimizer) -> dict:
    parameters = list(module.parameters())
    parameters += [p for group in optimizer.param_groups for p in group["params"]]  # and shards
    return {"parameters": parameters + list(module.buffers()),
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer_state": [value for state in optimizer.state.values()
                                for value in state.values() if isinstance(value, torch.Tensor)]}


def _address(tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor: this rank's shard
    return local.untyped_storage().data_ptr()


def _report(allocations, times, marks) -> Report:
    kept = {address for _, held in marks for addresses in held.values() for address in addresses}
    end_temporaries(allocations, times, kept)
    _categorise(allocations, times, marks)
    names = [name for name, _ in marks]
    last = {name: index for index, name in enumerate(names)}
    # The mark before a phase's last mark is the phase's begin.
    begins = {phase: times[last[phase] - 1] if last[phase] else 0 for phase in PHASES}
    highest = {phase: _highest(allocations, begins[phase], times[last[phase]]) for phase in PHASES}
    return Report({phase: _held(allocations, times[last[phase]]) for phase in PHASES},
                  _held(allocations, _highest(allocations)),
                  {phase: _held(allocations, time) for phase, time in highest.items()},
                  gathered=_most_gathered(allocations, begins["forward"], times[last["step"]]))


def _most_gathered(allocations, begin, end) -> int:
    """The most bytes of gathered parameters at once. A backend's own copies are not FSDP's."""
    gathered = [each for each in allocations
                if any(span.startswith("FSDP::all_gather") for span in each.spans)
                and not any(span.startswith(_BACKENDS) for span in each.spans)]
    return _held(gathered, _highest(gathered, begin, end)).total


def _categorise(allocations, times, marks):
    """Sets each allocation's category, for its whole life: what a mark found at its address, else
    what its spans and its lifetime imply."""
    alive = [[b for b in allocations if b.begin <= time < b.end] for time in times]
    # In this order: the first category that a mark finds at an address stays, so a parameter that
    # forward saves is a parameter and no activation.
    for category in ("parameters", "gradients", "optimizer_state", "buffers", "activations"):
        for here, (name, held) in zip(alive, marks, strict=True):
            # parameters that come with forward are gathered ones, which FSDP keeps until backward
            gathered = (name, category) == ("forward", "parameters")
            for allocation in here:
                if not allocation.category and allocation.address in held.get(category, ()):
                    allocation.category = "buffers" if gathered else category
    boundaries = [time for (name, _), time in zip(marks, times, strict=True) if name == "boundary"]
    for allocation in allocations:
        if not allocation.category:
            allocation.category = _by_lifetime(allocation, boundaries, times, marks)


def _by_lifetime(allocation, boundaries, times, marks) -> str:
    steps = sum(allocation.begin <= time < allocation.end for time in boundaries)
    lasts = steps > (0 if _DDP in allocation.spans else 1)
    # no tensor of the program's: the marks have not found it
    if lasts and devices.device().type == "cuda" and {*allocation.spans[-1:]} & {*_PRODUCTS}:
        allocation.is_workspace = True
        return "other"
    if lasts or any(span.startswith(_COMMUNICATION) for span in allocation.spans):
        return "buffers"
    before = bisect_right(times, allocation.begin) - 1
    phase = marks[before][0] if before >= 0 else ""
    return "activations" if phase in ("build", "boundary", "forward") else "other"


def _held(allocations, time) -> Memory:
    totals = {}
    for allocation in allocations:
        if allocation.begin <= time < allocation.end:
            totals[allocation.category] = totals.get(allocation.category, 0) + allocation.nbytes
    return Memory(**totals)


def _highest(allocations, begin=0, end=2**63) -> int:
    """When, of this span of time, most bytes were allocated."""
    # (nanoseconds, bytes): at the same moment frees come before allocations.
    changes = sorted([(each.begin, each.nbytes) for each in allocations]
                     + [(each.end, -each.nbytes) for each in allocations])
    total, most, when = 0, _held(allocations, begin).total, begin
    for time, nbytes in changes:
        total += nbytes
        if begin <= time <= end and total > most:
            most, when = total, time
    return when

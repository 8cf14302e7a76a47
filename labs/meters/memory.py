"""What a rank's memory really holds, by category, over the steps of the plain loop.

On a CPU it is exact: torch's profiler reports every allocation, those of C++ included, and every
block is followed from its allocation to its end.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from time import sleep

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile, record_function

from labs.meters.traffic import hook_waits
from labs.training.memory_categories import Memory
from labs.workers import devices

PHASES = ("build", "forward", "backward", "step")
_MARK = "labs::mark "
_MOMENT = 5e-4  # seconds
_COMMUNICATION = ("FSDP::all_gather", "FSDP::post_backward_reduce", "FSDP::reduce_scatter",
                  "fsdp::", "c10d::", "gloo:", "ZeRO::")
_DDP = "DistributedDataParallel.forward"  # all of forward, and new buckets before it


@dataclass(frozen=True)
class Report:
    """Bytes by category at the end of each phase of the last step, and at the moment of the run at
    which the total was highest. peaks: phase -> Memory at its highest moment, of the last step too;
    the whole of building is "build"."""

    phases: dict
    peak: Memory
    peaks: dict = field(default_factory=dict)

    @property
    def step_peak(self) -> Memory:
        """Memory at the highest moment of the last step: building is over, and all that the first
        step makes is there."""
        return max((self.peaks[phase] for phase in PHASES[1:]), key=lambda held: held.total)

    def __repr__(self):
        rows = {**self.phases, "peak": self.peak}
        return "\n".join(f"{name:10s}{memory.total:>14,} bytes  " + ", ".join(
            f"{category} {value:,}" for category, value in memory.by_name().items() if value)
            for name, memory in rows.items())


def leanest(reports: list) -> Report:
    """Phase by phase the least of several reports of the same: a thread of gloo may free a tensor
    unseen, so that it seems to be held, and nothing makes a rank seem to hold less than it does."""
    def least(pick):
        return min(map(pick, reports), key=lambda held: held.total)

    return Report({phase: least(lambda r, p=phase: r.phases[p]) for phase in PHASES},
                  least(lambda r: r.peak),
                  {phase: least(lambda r, p=phase: r.peaks[p]) for phase in PHASES})


@dataclass
class Block:
    """One allocation: its address, its bytes, and when it began and ended (nanoseconds).
    spans: names of what was running when it was made."""

    address: int
    nbytes: int
    begin: int
    spans: tuple
    end: int = 2**63
    category: str = ""


def record(build, batches, held=None) -> Report:
    """On a rank: runs the plain loop over the batches and reports what its device held.

    build() returns (module, optimizer); it is called inside, so that all it allocates is seen.
    Make the batches before. Two steps at least show what lasts from step to step. held(module,
    optimizer) -> category -> tensors, for a library that keeps them in places of its own.
    """
    marks, saved, held = [], set(), held or _held_by_torch

    def keep(tensor):
        saved.add(_address(tensor))
        return tensor

    with _backend_lets_go_first(), profile(activities=[ProfilerActivity.CPU],
                                           profile_memory=True) as recorded:
        module, optimizer = build()
        _mark(marks, "build", held(module, optimizer))
        for batch in batches:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = module(**batch).loss
            _mark(marks, "forward", held(module, optimizer), saved)
            loss.backward()
            del loss
            _mark(marks, "backward", held(module, optimizer))
            optimizer.step()
            _mark(marks, "step", held(module, optimizer))
            optimizer.zero_grad()
            _mark(marks, "boundary", held(module, optimizer))
            saved.clear()
    tree = recorded.profiler.kineto_results.experimental_event_tree()
    return _report(*_read(tree), marks)


def _backend_lets_go_first():
    """Who waits for a collective stays a moment longer, so that gloo's thread, which the profiler
    does not watch, is not the last to let go of its tensors."""
    return hook_waits(after=lambda _: sleep(_MOMENT))


def _held_by_torch(module, optimizer) -> dict:
    parameters = list(module.parameters())
    parameters += [p for group in optimizer.param_groups for p in group["params"]]  # and shards
    return {"parameters": parameters + list(module.buffers()),
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer_state": [value for state in optimizer.state.values()
                                for value in state.values() if isinstance(value, torch.Tensor)]}


def _mark(marks, name, held, saved=()):
    """Notes which addresses hold what at this moment."""
    addresses = {category: {_address(t) for t in tensors} for category, tensors in held.items()}
    with record_function(f"{_MARK}{len(marks)}"):
        marks.append((name, {**addresses, "activations": set(saved)}))


def _address(tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor: this rank's shard
    return local.untyped_storage().data_ptr()


def _read(tree) -> tuple:
    """(blocks, times of the marks) from the profiler's events on this rank's device."""
    kind = devices.device().type
    events, times, todo = [], {}, [(event, ()) for event in tree]
    while todo:
        event, spans = todo.pop()
        if "Allocation" in str(event.tag):
            fields = event.extra_fields
            if fields.device.type == kind:  # with a GPU the host's allocations are reported too
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size, spans))
        elif event.name.startswith(_MARK):
            times[int(event.name.removeprefix(_MARK))] = event.start_time_ns
        todo += [(child, (*spans, event.name)) for child in event.children]
    return _blocks(events), [times[number] for number in sorted(times)]


def _blocks(events) -> list:
    blocks, live = [], {}
    for time, address, nbytes, spans in sorted(events, key=lambda event: event[0]):
        if nbytes > 0:
            if address in live:  # its end was not told
                live[address].end = time
            live[address] = Block(address, nbytes, time, spans)
            blocks.append(live[address])
        elif address in live:
            live.pop(address).end = time
    return blocks


def _end_broadcasts(blocks, times, marks):
    """The flat copies that DDP broadcasts a model's state in: where gloo's thread is the last to
    let go of one, the profiler, which does not watch that thread, never tells its end. Who lays
    tensors flat to keep them (DeepSpeed) is known to hold them at a mark."""
    kept = {address for _, held in marks for addresses in held.values() for address in addresses}
    for block in blocks:
        if "aten::flatten_dense_tensors" in block.spans and block.address not in kept:
            after = bisect_right(times, block.begin)
            block.end = min([block.end, *times[after:after + 1]])


def _report(blocks, times, marks) -> Report:
    _end_broadcasts(blocks, times, marks)
    _categorise(blocks, times, marks)
    names = [name for name, _ in marks]
    last = {name: index for index, name in enumerate(names)}
    begins = {phase: times[last[phase] - 1] if last[phase] else 0 for phase in PHASES}
    return Report({phase: _held(blocks, times[last[phase]]) for phase in PHASES},
                  _held(blocks, _highest(blocks)),
                  {phase: _held(blocks, _highest(blocks, begins[phase], times[last[phase]]))
                   for phase in PHASES})


def _categorise(blocks, times, marks):
    """A block is, for its whole life, what it was found to be at any mark; else what its birth
    and its length of life say."""
    alive = [[b for b in blocks if b.begin <= time < b.end] for time in times]
    for category in ("parameters", "gradients", "optimizer_state", "buffers", "activations"):
        for here, (name, held) in zip(alive, marks, strict=True):
            # parameters that come with forward are gathered ones, which FSDP keeps until backward
            gathered = (name, category) == ("forward", "parameters")
            for block in here:
                if not block.category and block.address in held.get(category, ()):
                    block.category = "buffers" if gathered else category
    boundaries = [time for (name, _), time in zip(marks, times, strict=True) if name == "boundary"]
    for block in blocks:
        block.category = block.category or _by_birth(block, boundaries, times, marks)


def _by_birth(block, boundaries, times, marks) -> str:
    steps = sum(block.begin <= time < block.end for time in boundaries)
    lasts = steps > (0 if _DDP in block.spans else 1)
    if lasts or any(span.startswith(_COMMUNICATION) for span in block.spans):
        return "buffers"
    before = bisect_right(times, block.begin) - 1
    phase = marks[before][0] if before >= 0 else ""
    return "activations" if phase in ("build", "boundary", "forward") else "other"


def _held(blocks, time) -> Memory:
    totals = {}
    for block in blocks:
        if block.begin <= time < block.end:
            totals[block.category] = totals.get(block.category, 0) + block.nbytes
    return Memory(**totals)


def _highest(blocks, begin=0, end=2**63) -> int:
    """When, of this span of time, most bytes were held."""
    changes = sorted([(b.begin, b.nbytes) for b in blocks] + [(b.end, -b.nbytes) for b in blocks])
    total, most, when = 0, _held(blocks, begin).total, begin
    for time, nbytes in changes:
        total += nbytes
        if begin <= time <= end and total > most:
            most, when = total, time
    return when

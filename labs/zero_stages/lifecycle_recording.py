"""What ranks record for the pictures of notebook 03."""

import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.comparison import batches, build
from labs.checks.verdicts import Wrong
from labs.meters.throughput import WARMUP_ON_GPU
from labs.meters.wire import sent_bytes
from labs.training.loop import train
from labs.workers import devices
from labs.workers.collectives import reduce_scatter_single
from labs.zero_stages.collectives import all_gather, reduce_scatter
from labs.zero_stages.flat_parameter import FlatParameter

REDUCED_ELEMENTS = 1 << 21  # 8 MiB in fp32
WARMUP = 2  # steps before those that are recorded
STEPS = 9  # the fastest of them is drawn, because other load only adds time


def elements(ranks: int) -> int:
    """Returns the length of the tensor that is reduced: a multiple of the number of ranks."""
    return REDUCED_ELEMENTS // ranks * ranks


def sent_by_each() -> list[int | None]:
    """On a rank: the bytes that it sends in each of the three ways; None where the system does
    not count them."""
    size = elements(dist.get_world_size())
    shard = torch.empty(size // dist.get_world_size())
    ways = (dist.all_reduce, lambda flat: reduce_scatter_single(shard, flat),
            lambda flat: reduce_scatter(flat).wait())
    found = []
    for way in ways:
        dist.barrier()
        before = sent_bytes()
        way(torch.zeros(size))
        dist.barrier()  # what this rank sends has arrived
        found.append(None if before is None else sent_bytes() - before)
    return found


def record_storage() -> list[dict]:
    """On a rank: by moment, bytes of `full` and of `shard`, and what can be read."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 3).to(devices.device())
    x = torch.ones(1, 2, requires_grad=True, device=devices.device())
    unit = FlatParameter(layer.parameters(), "layer", layer)
    before, output = layer.weight.detach().clone(), layer(x)
    saved = output.grad_fn._saved_mat2  # what backward will read: the transposed weight
    found = []

    def look(title):
        gathered = unit.is_gathered
        found.append({
            "title": title, "full": unit.full.untyped_storage().nbytes(),
            "shard": unit.shard.untyped_storage().nbytes(), "own": unit.is_sharded,
            "parameters": gathered and layer.weight.equal(before),
            "saved": gathered and saved.t().equal(before)})

    look("1  built: FlatParameter(parameters)")
    unit.free()
    look("2  after forward: unit.free()")
    all_gather(unit.allocate(), unit.shard)
    look("3  before backward: unit.allocate(), all_gather(unit.full, unit.shard)")
    return found


def record_lifecycle(strategy, preset) -> dict:
    """On a rank: the fields of labs.pictures.timelines.Lifecycle, of the fastest recorded step."""
    module, optimizer = build(strategy, preset)
    units = getattr(module, "units", None)
    if not units:
        raise Wrong("the strategy's module has no units", "Wrap the model in a lab.ShardedModule.",
                    code="no_units")
    *warmup, batch = batches(
        preset, 1 + (WARMUP_ON_GPU if devices.device().type == "cuda" else WARMUP))
    train(module, optimizer, warmup)
    recorded = []
    for _ in range(STEPS):
        events, times = {unit.name: [] for unit in units}, []
        dist.barrier()
        with _log_events(module, events):
            _timed_step(module, optimizer, batch, times)
        # The number of the step decides between equal times: min cannot compare the dicts.
        recorded.append((times[-1] - times[0], len(recorded), events, times))
    _, _, events, times = min(recorded)
    phases = {name: (times[n] - times[0], times[n + 1] - times[0])
              for n, name in enumerate(("forward", "backward", "optimizer"))}
    waiting = sorted(span for of_unit in events.values() for span in _waits(of_unit, times[0]))
    gathered, gathering = ({name: _intervals(of_unit, times[0], last)
                            for name, of_unit in events.items()} for last in ("free", "ready"))
    return {"phases": phases, "gathered": gathered, "gathering": gathering, "waiting": waiting,
            "sizes": {unit.name: unit.full.numel() * unit.full.element_size() for unit in units},
            "recorded": [seconds for seconds, *_ in recorded]}


def _timed_step(module, optimizer, batch, times):
    times.append(_now())
    loss = module(**batch).loss
    times.append(_now())
    loss.backward()
    times.append(_now())
    optimizer.step()
    optimizer.zero_grad()
    times.append(_now())


def _now() -> float:
    """Seconds, when the device has computed what it was given: a GPU would be behind otherwise, and
    a wait for a gather would cost the CPU no time. Gathers continue meanwhile."""
    devices.finish_computing()
    return time.perf_counter()


def _log_events(module, events) -> contextlib.ExitStack:
    """While it is open, (event, time) is appended for each unit that is allocated, ready for use,
    or freed."""
    def logged(owner, method, event, unit=None):
        original = getattr(owner, method)

        def call(*args):
            # Two events: how long the hook takes is how long the rank waits for the gather.
            if event == "ready":
                events[args[0].name].append(("wanted", _now()))
            result = original(*args)
            events[(unit or args[0]).name].append((event, _now()))
            return result

        return mock.patch.object(owner, method, call)

    stack = contextlib.ExitStack()
    for unit in module.units:
        for method in ("allocate", "free"):
            stack.enter_context(logged(unit, method, method, unit))
    for hook in ("before_forward", "before_backward"):
        stack.enter_context(logged(module, hook, "ready"))
    return stack


def _waits(events, begin) -> list[tuple[float, float]]:
    """(begin, end) of each call in which a unit is made ready: nothing computes meanwhile. A hook
    that calls the other one is one wait."""
    found, depth, since = [], 0, 0.0
    for event, moment in events:
        if event == "wanted":
            # A before_backward that calls before_forward is wanted twice and ready twice.
            since = since if depth else moment - begin
            depth += 1
        elif event == "ready":
            depth -= 1
            if not depth:
                found.append((since, moment - begin))
    return found


def _intervals(events, begin, last) -> list[tuple[float, float]]:
    """(begin, end) from each allocation to the next event that is called `last`."""
    found, since = [], None
    for event, moment in events:
        if event == "allocate":
            since = moment
        elif event == last and since is not None:
            found.append((since - begin, moment - begin))
            since = None
    return found

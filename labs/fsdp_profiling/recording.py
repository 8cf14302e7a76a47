"""Records steps of FSDP2 on real ranks, with or without an injected fault, and keeps the traces.

Seconds are noisy. So a recording is repeated if its seconds contradict its fault: a slow rank that
is hardly slower than the others, for example, or a healthy run in which one rank waits long.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from labs.exercises import comparison
from labs.fsdp_profiling import injected_faults
from labs.meters.trace import Trace, total_seconds
from labs.meters.trace_file import record_trace
from labs.training import models, presets
from labs.training.loop import ModuleAndOptimizer, labelled_step
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.launcher import launch

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "fsdp_profiling"
WARM_UP = 2  # steps before those that are recorded
HEALTHY_RATIO, SLOW_RATIO = 2.0, 5.0  # of the longest to the shortest computing of the ranks
SIMILAR_WAITS, UNEQUAL_WAITS = 0.4, 0.6  # of a step that one rank waits longer than another
SHORT_LOADING, LONG_LOADING = 0.1, 0.5  # of a step that the data loader takes
ROUNDS, FEW_ROUNDS = 8, 4  # of recording: if a check judges the seconds; if they are only shown


class TooNoisy(Exception):
    """Raised where a recording contradicts its fault in every round: the machine is too busy."""


@dataclass(frozen=True)
class RunConfig:
    """What is trained and recorded.

    units: "blocks", "layers" (every module that has parameters of its own) or "model" (one unit).
    fault: "", "item", "data" or "rank" (that is `slow_rank`). configure(units): sets the prefetch
    of the units. before_sharding(model): runs on each rank.
    """

    preset: Preset
    name: str = "healthy"
    units: str = "blocks"
    fault: str = ""
    slow_rank: int = 0
    stacks: bool = False
    configure: Callable | None = None
    before_sharding: Callable | None = None


class RecordedRun(list[Trace]):
    """The traces of one run, one per rank."""

    def __init__(self, traces, config: RunConfig):
        super().__init__(traces)
        self.config = config

    def __repr__(self):
        return "\n".join([*map(repr, self), self.files])

    @property
    def files(self) -> str:
        """One line: where the files are, and what opens them."""
        where = os.path.relpath(self[0].path, FOLDER.parents[1])
        return f"{where} …: open it at ui.perfetto.dev (Open trace file)"


def preset(**changes: int) -> Preset:
    """Returns this machine's preset; on a laptop with a smaller model, because traces are large."""
    chosen = presets.preset()
    if chosen.name == "laptop":
        chosen = replace(chosen, layers=4, batch=4)
    return replace(chosen, **changes)


def record_runs(configs: list[RunConfig]) -> list[RecordedRun]:
    """Records runs of one preset, one after the other on the same ranks, and reads their files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    by_rank = launch(lambda: [_record(config) for config in configs], quiet=True, verify=False,
                     ranks=configs[0].preset.ranks, hang_after=60)
    return [RecordedRun(traces, config) for traces, config in
            zip(zip(*by_rank, strict=True), configs, strict=True)]


def record_clearly(configs: list[RunConfig], rounds: int = ROUNDS) -> list[RecordedRun]:
    """Records the runs, and up to `rounds` times in all those whose seconds contradict their
    fault."""
    runs = record_runs(configs)
    for _ in range(rounds - 1):
        noisy = [number for number, one in enumerate(runs) if contradiction(one)]
        if not noisy:
            break
        again = record_runs([configs[number] for number in noisy])
        for number, one in zip(noisy, again, strict=True):
            runs[number] = one
    return runs


def _record(config) -> Trace:
    """On a rank: the trace of its step, as its file has it."""
    model, optimizer = comparison.build(
        partial(configured_fsdp2, units=config.units, configure=config.configure,
                before_sharding=config.before_sharding), config.preset)
    slow = config.fault == "rank" and dist.get_rank() == config.slow_rank
    slow_rank = injected_faults.SlowRank(model) if slow else None
    if config.fault == "item":
        injected_faults.read_loss(model)
    loading = injected_faults.Loading()
    batches = iter(DataLoader(comparison.batches(config.preset, WARM_UP + 1), batch_size=None,
                              collate_fn=loading))

    def step():
        labelled_step(model, optimizer, next(batches))

    for _ in range(WARM_UP):
        began = time.perf_counter()
        step()
    if config.fault == "data":
        loading.delay = injected_faults.LOADING * _of_rank_0(time.perf_counter() - began)
    if slow_rank:
        slow_rank.active = True
    file = FOLDER / f"{config.name.replace(' ', '_')}_rank{dist.get_rank()}.json.gz"
    return record_trace(step, file, config.stacks)


def _of_rank_0(seconds) -> float:
    found = [seconds]
    dist.broadcast_object_list(found)
    return found[0]


def configured_fsdp2(model, optimizer_class, units: str = "blocks",
                     configure: Callable | None = None, before_sharding: Callable | None = None,
                     all_gather_delay: float = 0.0, **settings) -> ModuleAndOptimizer:
    """The strategy of this notebook: FSDP2. Its arguments are those of `RunConfig`;
    all_gather_delay: seconds by which every all-gather takes longer."""
    if before_sharding:
        before_sharding(model)
    chosen = shard_units(model, units)
    if configure:
        configure(chosen)
    if all_gather_delay:
        injected_faults.delay_all_gathers(model, all_gather_delay)
    return model, optimizer_class(model.parameters(), **settings)


def shard_units(model, units: str = "blocks") -> list[torch.nn.Module]:
    """Applies fully_shard to each unit and to the model. Returns the units, without the model, in
    forward order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(devices.device().type, (dist.get_world_size(),))
    chosen = {"blocks": lambda: list(models.blocks(model)), "model": list,
              "layers": lambda: [m for block in models.blocks(model) for m in block.modules()
                                 if any(True for _ in m.parameters(recurse=False))]}[units]()
    for unit in [*chosen, model]:
        fully_shard(unit, mesh=mesh)
    if devices.device().type == "cpu":
        # A GPU issues all-gathers on a stream of its own, so the rank goes on computing. A CPU has
        # no streams, and FSDP2 would wait at each call: this private method makes it asynchronous.
        model._set_unshard_async_op(True)
    return chosen


def contradiction(run: RecordedRun) -> str:
    """Returns how a recording's seconds contradict its fault, or that it has none; "" if they do
    not."""
    slow_rank, slow_data = run.config.fault == "rank", run.config.fault == "data"
    busy, waits = compute_seconds(run), exposed_shares(run)
    ratio, difference = max(busy) / max(min(busy), 1e-9), max(waits) - min(waits)
    loading = loading_shares(run)
    if slow_rank and (ratio < SLOW_RATIO or busy.index(max(busy)) != run.config.slow_rank):
        return f"its slow rank computed only {ratio:.1f} times as long as another"
    if not slow_rank and ratio > HEALTHY_RATIO:
        return f"one rank computed {ratio:.1f} times as long as another, by chance"
    if difference < UNEQUAL_WAITS if slow_rank else difference > SIMILAR_WAITS:
        return f"one rank waited longer than another by {difference:.2f} of the step"
    if min(loading) < LONG_LOADING if slow_data else max(loading) > SHORT_LOADING:
        return f"its data loader took {max(loading):.2f} of the step"
    return ""


def compute_seconds(run: RecordedRun) -> list[float]:
    """Returns the seconds that each rank computed."""
    return [total_seconds(trace.compute) for trace in run]


def exposed_shares(run: RecordedRun) -> list[float]:
    """Returns the share of the step in which each rank only waits for a collective."""
    return [trace.exposed_seconds / trace.seconds for trace in run]


def loading_shares(run: RecordedRun) -> list[float]:
    """Returns the share of the step that each rank's data loader takes."""
    return [max(label.seconds for label in trace.labelled("enumerate(DataLoader)")) / trace.seconds
            for trace in run]


def with_timing_noise(run: RecordedRun) -> RecordedRun:
    """Returns a copy with as much noise as does not yet contradict the fault: how long the ranks
    compute and the data loaders take is a tenth away from the margins."""
    ratio = 1.1 * SLOW_RATIO if run.config.fault == "rank" else 0.9 * HEALTHY_RATIO
    loading = 1.1 * LONG_LOADING if run.config.fault == "data" else 0.9 * SHORT_LOADING
    busy, slow = compute_seconds(run), run.config.slow_rank
    longest = min(busy[slow], ratio * min(busy[:slow] + busy[slow + 1:]))
    return RecordedRun(
        [_scaled(trace, (longest if rank == slow else longest / ratio) / busy[rank], loading)
         for rank, trace in enumerate(run)], run.config)


def _scaled(trace, factor, loading) -> Trace:
    """The trace with `factor` times its computing, and a data loader that takes `loading` of the
    step."""
    loader = trace.labelled("enumerate(DataLoader)")[0]
    other = replace(loader, end=loader.begin + loading * trace.seconds)
    return replace(
        trace, labels=tuple(other if label == loader else label for label in trace.labels),
        compute=tuple((begin, begin + factor * (end - begin)) for begin, end in trace.compute))

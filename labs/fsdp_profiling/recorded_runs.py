"""Records steps of FSDP2 on real ranks, with or without an injected fault, and keeps the traces.

On a CPU the ranks communicate on a slow link that is chosen in proportion to what this machine
computes, so that what a collective costs is larger than the noise. Seconds are noisy all the same:
a recording is repeated if they contradict its fault, as when a slow rank is hardly slower than the
others.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from labs.checks import comparison
from labs.faults.slow_rank import LOADING, Loading, SlowRank
from labs.fsdp_profiling import injected_faults
from labs.fsdp_profiling.student_recorder import Recorder
from labs.meters import throughput
from labs.meters.metrics import Metric
from labs.meters.trace import Trace, total_seconds
from labs.meters.trace_file import experiments_folder, fastest
from labs.meters.typical_step import is_typical, of_slowest_rank, require_typical, usual_seconds
from labs.training import models, presets
from labs.training.loop import ModuleAndOptimizer, labelled_step
from labs.training.presets import Preset
from labs.training.strategies.asynchronous_fsdp2 import make_asynchronous
from labs.words import counted
from labs.workers import devices
from labs.workers.collectives import has_nccl
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.progress import status
from labs.workers.slow_link import Link, proportional_link, slow_link

FOLDER = "fsdp_profiling"  # of the traces, in `experiments_folder`
LAPTOP_BATCH = 12  # sequences of a rank's step
WARM_UP = 2  # steps before those that are recorded
BYTES, LATENCY = 0.7, 0.008  # of a step's computing: how long all its bytes take, and a latency
# On two cores, what is in flight slows down what hides it; that must not outweigh what it hides.
SLOW_BYTES = 1.5  # BYTES of the slow runs
HEALTHY_RATIO, SLOW_RATIO = 2.0, 5.0  # of the longest to the shortest computing of the ranks
SIMILAR_WAITS, UNEQUAL_WAITS = 0.4, 0.6  # of a step that one rank waits longer than another
SHORT_LOADING, LONG_LOADING = 0.1, 0.5  # of a step that the data loader takes
# Of a run, at most; one is kept, the fastest: another program only makes a step longer.
RECORDINGS, FEW_RECORDINGS = 5, 3
AS_LONG = 1.05  # the second fastest step over the fastest, at most, where neither was disturbed
SLOWER = 1.05  # a faulty run's step, over that of the healthy one, at least
ROUNDS, FEW_ROUNDS = 8, 4  # of recording: if a check judges the seconds; if they are only shown
TIME_BUDGET = 45  # seconds after which no further round begins: so busy a machine will stay busy


class TooNoisy(Exception):
    """Raised where a recording contradicts its fault in every round: the machine is too busy."""


@dataclass(frozen=True)
class RunConfig:
    """What is trained and recorded.

    units: "blocks", "layers" (every module that has parameters of its own) or "model" (one unit).
    fault: "", "item", "data" or "rank" (that is `slow_rank`). configure(units): sets the prefetch
    of the units. before_sharding(model): runs on each rank. record(train_one_step, path,
    **options): the student's function of 5.12; None: the lab's own call.
    """

    preset: Preset
    name: str = "healthy"
    units: str = "blocks"
    fault: str = ""
    slow_rank: int = 0
    stacks: bool = False
    configure: Callable | None = None
    before_sharding: Callable | None = None
    record: Callable | None = None


class RecordedRun(list[Trace]):
    """The traces of one run, one per rank. usual: the median seconds of its steps without the
    profiler, None where none was timed, as with stacks, which make a step far longer. note: why
    the student's function did not record it, or ""."""

    def __init__(self, traces, config: RunConfig, link: Link | None = None,
                 usual: float | None = None, note: str = ""):
        super().__init__(traces)
        self.config, self.link, self.usual, self.note = config, link, usual, note

    def __repr__(self):
        return "\n".join([*map(repr, self), *([] if self.link is None else [
            f"link of a rank: {self.link}"]), self.files, *([] if not self.note else [
                f"recorded by the lab's own call: {self.note}"])])

    def metrics(self) -> list[Metric]:
        """The step, and the share of it in which the ranks only wait for collectives."""
        shares = exposed_shares(self)
        return [Metric(f"{self.config.name}: step", step_seconds(self), "s"),
                Metric(f"{self.config.name}: exposed share", sum(shares) / len(shares), "")]

    @property
    def files(self) -> str:
        """One line: where the files are, and what opens them."""
        where = os.path.relpath(self[0].path, experiments_folder().parent)
        return f"{where} …: open it at ui.perfetto.dev (Open trace file)"


def preset(**changes: int) -> Preset:
    """Returns this machine's preset; on a laptop with fewer layers, because traces are large, and
    more tokens, because then a step is longer than what disturbs it."""
    chosen = presets.preset()
    if chosen.name == "laptop":
        chosen = replace(chosen, layers=4, batch=LAPTOP_BATCH)
    return replace(chosen, **changes)


def record_runs(configs: list[RunConfig], recordings: int = 1, share: float | None = BYTES,
                measure: Callable[[Trace], float] | None = None) -> list[RecordedRun]:
    """Records runs one after the other on the same ranks, and reads their files.

    recordings: of each run's step, at most: two that take as long end it. Returned is the one of
    which `measure`, as the mean over the ranks, is the minimum, or, without it, the fastest. share:
    of a step's computing that its bytes take on the slow link, where the ranks are on a CPU; None:
    no slow link.
    """
    folder = experiments_folder() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    link = proportional(configs[0].preset, share) if share else None
    with status(f"recording {counted(len(configs), 'run')}"):
        by_rank = _launch(
            lambda: [_record(config, link, recordings, measure, folder) for config in configs],
            configs[0].preset.ranks)
    return [RecordedRun([trace for trace, _, _ in found], config, link, *found[0][1:])
            for found, config in zip(zip(*by_rank, strict=True), configs, strict=True)]


def _launch(work, ranks):
    name_load()
    return launch(work, ranks=ranks, quiet=True, verify=False, hang_after=60)


def proportional(preset: Preset, share: float = BYTES) -> Link | None:
    """Returns the slow link for runs of this preset, measured once in a process; None on GPUs,
    where the real link is used. share: as for `record_runs`."""
    return None if devices.gpus() else _proportional(preset, share)


@cache
def _proportional(preset, share) -> Link:
    def measure():
        model, optimizer = comparison.build(configured_fsdp2, preset)
        batch = comparison.batches(preset, 1)[0]
        return proportional_link(partial(labelled_step, model, optimizer, batch), share, LATENCY)

    with status("measuring how fast this machine computes"):
        return _launch(measure, preset.ranks)[0]


def record_clearly(configs: list[RunConfig], rounds: int = ROUNDS, recordings: int = 1,
                   share: float = BYTES, beside_first: bool = False,
                   measure: Callable[[Trace], float] | None = None) -> list[RecordedRun]:
    """Records the runs, and up to `rounds` times in all those whose seconds contradict their fault;
    no round begins later than TIME_BUDGET seconds.

    recordings, share, measure: as for `record_runs`. beside_first: the first run is healthy, and on
    a slow link all others must be slower.
    """
    began = time.monotonic()
    runs = record_runs(configs, recordings, share, measure)
    for turn in range(2, rounds + 1):
        noisy = [number for number, one in enumerate(runs)
                 if contradiction(one) or not is_usual(one)]
        if beside_first and any(map(partial(_is_as_fast, runs[0]), runs[1:])):
            noisy = sorted({0, *noisy, *(number for number, one in enumerate(runs)
                                         if number and _is_as_fast(runs[0], one))})
        if not noisy or time.monotonic() - began > TIME_BUDGET:
            break
        with status(f"this machine was busy: turn {turn} of at most {rounds}"):
            again = record_runs([configs[number] for number in noisy], recordings, share, measure)
        for number, one in zip(noisy, again, strict=True):
            runs[number] = one
    return runs


def is_usual(run: RecordedRun) -> bool:
    """Returns whether the recorded step took about as long as the run's steps usually do."""
    return run.usual is None or is_typical(step_seconds(run), run.usual)


def require_usual(runs: dict[str, RecordedRun]) -> None:
    """Raises NotTypical where a run's step, which is to be drawn, took longer or shorter than
    usual. runs: title -> run."""
    require_typical({title: (step_seconds(run), run.usual) for title, run in runs.items()
                     if run.usual is not None}, "the cell that recorded it")


def _is_as_fast(healthy, faulty) -> bool:
    """Whether a faulty run is hardly slower: one of the two was disturbed."""
    return bool(faulty.link) and step_seconds(faulty) < SLOWER * step_seconds(healthy)


def _record(config, link, recordings, measure, folder) -> tuple[Trace, float | None, str]:
    """On a rank: (the trace of its step, as its file in `folder` has it; the usual seconds; the
    note of `RecordedRun`)."""
    # a loader or a rank that is slow on purpose takes far longer than what disturbs a step
    recordings = 1 if config.fault in ("data", "rank") else recordings
    model, optimizer = comparison.build(
        partial(configured_fsdp2, units=config.units, configure=config.configure,
                before_sharding=config.before_sharding), config.preset)
    slow = config.fault == "rank" and dist.get_rank() == config.slow_rank
    slow_rank = SlowRank(model) if slow else None
    if config.fault == "item":
        injected_faults.check_for_nan(model)
    loading = Loading()
    # batch_size=None: the items are batches already. The profiler labels each of its steps
    # enumerate(DataLoader).
    # 4 more than are needed, for a record_step that trains too often
    batches = iter(DataLoader(comparison.batches(config.preset, WARM_UP + 2 * recordings + 4),
                              batch_size=None, collate_fn=loading))

    def step():
        labelled_step(model, optimizer, next(batches))

    file = folder / f"{config.name.replace(' ', '_')}_rank{dist.get_rank()}.json.gz"
    with (tempfile.TemporaryDirectory() as recordings_folder,
          slow_link(link) if link else contextlib.nullcontext()):
        recorder = Recorder(config.record, step, recordings_folder, config.stacks)
        for _ in range(WARM_UP):
            began = time.perf_counter()
            step()
            devices.synchronize()
        if config.fault == "data":
            # The same delay on all ranks: with delays of their own they would wait for one another.
            took = [time.perf_counter() - began]
            dist.broadcast_object_list(took)
            loading.delay = LOADING * took[0]
        if slow_rank:
            slow_rank.active = True
        recorded, measured = [], []
        for _ in range(recordings):  # in turns, so that what disturbs the machine disturbs both
            if not config.stacks:
                dist.barrier()
                measured.append(throughput.timed(step))
            recorded.append(recorder())
            if _is_undisturbed(recorded):
                break
        usual = None if config.stacks else usual_seconds(
            of_slowest_rank([one.seconds for one in recorded]), of_slowest_rank(measured))
        return _least_disturbed(recorded, file, measure), usual, recorder.note


def _is_undisturbed(recorded) -> bool:
    """On a rank: whether the two fastest steps took as long. All ranks say the same."""
    fast = sorted(of_slowest_rank([one.seconds for one in recorded]))[:2]
    return len(fast) == 2 and fast[1] <= AS_LONG * fast[0]


def _least_disturbed(recorded, file, measure) -> Trace:
    """On a rank: the trace of the step that all ranks choose, in `file`. The others are written
    only if `measure` reads them."""
    if measure is None:
        return recorded[fastest(recorded)].write(file)
    traces = [one.write(file.with_stem(f"{number}_{file.stem}"))
              for number, one in enumerate(recorded)]
    found = torch.tensor([measure(trace) for trace in traces])
    # The sum over the ranks: all choose the same step, or the traces would not belong together.
    dist.all_reduce(found)
    chosen = traces[found.argmin()]
    os.replace(chosen.path, file)
    for trace in traces:
        Path(trace.path).unlink(missing_ok=True)
    return replace(chosen, path=str(file))


def configured_fsdp2(model, optimizer_class, units: str = "blocks",
                     configure: Callable | None = None, before_sharding: Callable | None = None,
                     **settings) -> ModuleAndOptimizer:
    """The strategy of this notebook: FSDP2. Its arguments are those of `RunConfig`."""
    if before_sharding:
        before_sharding(model)
    chosen = shard_units(model, units)
    if configure:
        configure(chosen)
    optimizer = optimizer_class(model.parameters(), **settings)
    if not has_nccl():
        # On gloo FSDP2's all-gathers block where they are issued: without this nothing would
        # overlap.
        make_asynchronous(model, optimizer)
    return model, optimizer


def shard_units(model, units: str = "blocks") -> list[torch.nn.Module]:
    """Applies fully_shard to each unit and to the model. Returns the units, without the model, in
    forward order."""
    mesh = init_device_mesh(devices.device().type, (dist.get_world_size(),))
    chosen = {"blocks": lambda: list(models.blocks(model)), "model": list,
              "layers": lambda: [m for block in models.blocks(model) for m in block.modules()
                                 if any(True for _ in m.parameters(recurse=False))]}[units]()
    for unit in chosen:
        fully_shard(unit, mesh=mesh)
    # FSDP2 keeps the root's parameters after forward; where the root is everything, they are freed
    # as blocks are, so that every run gathers its parameters twice
    fully_shard(model, mesh=mesh, reshard_after_forward=True if units == "model" else None)
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


def step_seconds(run: RecordedRun) -> float:
    """Returns the seconds of the step, of the rank that takes longest."""
    return max(trace.seconds for trace in run)


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

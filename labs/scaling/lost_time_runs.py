"""Records steps of DDP in which one cause of lost time dominates, and the same share of the work on
one rank that is alone on the machine.

Each fault takes a multiple of the seconds of a step alone, so that it has the same part of a step
on a fast machine and on a slow one, and is larger than the noise.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch.utils.data import DataLoader

from labs.checks import comparison
from labs.checks.numbers import require_named, require_positive
from labs.checks.verdicts import shows
from labs.faults.slow_rank import Loading, SlowRank
from labs.meters import throughput
from labs.meters.lost_time import PARTS, lost_seconds, parts_of_step
from labs.meters.metrics import Metric
from labs.meters.trace import Trace
from labs.meters.trace_clock import on_one_axis, without_loading
from labs.meters.trace_file import RecordedStep, experiments_folder, fastest, record_step
from labs.meters.typical_step import is_typical, of_slowest_rank, require_typical, usual_seconds
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.scaling import scaling_runs
from labs.training import models
from labs.training.loop import labelled_step
from labs.training.presets import Preset
from labs.words import counted, listed
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.progress import status
from labs.workers.slow_link import Link, slow_link

STEPS, RECORDINGS, WARM_UP = 2, 2, 2  # steps of a recording; recordings, of which the fastest stays
# of all runs, until each shows its fault; none begins after so many seconds
ROUNDS, TIME_BUDGET = 3, 25
BYTES = 0.3  # of a step alone: how long the bytes of all gradients take on the healthy link
SLOWER_LINK = 10  # times as long on the slow one
LOADING = 3.0  # steps alone that the slow loader takes
EXTRA = 16  # times its blocks' forward that a slow rank computes in addition
FAULTS = {"healthy": None, "slow link": "communication", "slow rank": "waiting",
          "slow data loader": "data loading", "slow computing": "computing"}
"""Run -> the part of the step in which its fault shows."""


class RunsOnRanks(dict[str, list[Trace]]):
    """Run -> the traces of its ranks, on one time axis. alone: a list with the trace of a single
    rank that does as much work as each of theirs. usual: run -> the median seconds of a step
    without the profiler."""

    def __init__(self, runs, alone: list[Trace], link: Link | None,
                 usual: dict[str, float] | None = None):
        super().__init__(runs)
        self.alone, self.link, self.usual = alone, link, usual or {}

    def __repr__(self):
        step = {name: 1e3 * max(trace.seconds / len(trace.steps) for trace in run)
                for name, run in {"one rank alone": self.alone, **self}.items()}
        folder = Path(self.alone[0].path).parent
        files = f"files for ui.perfetto.dev: {folder.parent.name}/{folder.name}"
        return "\n".join([*(f"{name}: a step of {ms:.0f} ms" for name, ms in step.items()),
                          *filter(None, [self.note(), files * bool(self.alone[0].path)])])

    def unclear(self) -> list[str]:
        """The runs in which the part of the fault is not the largest of what a step loses; without
        a fault, those that lose nothing; and those whose step is not like the others."""
        return [name for name in self if not self._shows_fault(name)
                or name in self.usual and not is_typical(*self.step_and_usual(name))]

    def step_and_usual(self, name: str) -> tuple[float, float]:
        """Seconds of the recorded step, and of those without the profiler."""
        return max(trace.seconds / len(trace.steps) for trace in self[name]), self.usual[name]

    def _shows_fault(self, name) -> bool:
        lost, part = lost_seconds(self[name], self.alone), FAULTS.get(name)
        return sum(lost.values()) > 0 if part is None else max(lost, key=lost.get) == part

    def note(self) -> str:
        """What to say of a recording that a busy machine disturbed; "" of a clear one."""
        names = self.unclear()
        return (f"this machine is busy with something else: {listed(names)} would look different "
                "on a quiet one") if names else ""


@dataclass
class _Job:
    """What a rank trains: a step, and what slows it down."""

    step: Callable[[], None]
    loading: Loading = field(default_factory=Loading)
    slow: SlowRank | None = None


@shows("Recorded steps")
def record_lost_time(preset: Preset | None = None, names: tuple[str, ...] = tuple(FAULTS)
                     ) -> RunsOnRanks:
    """Records a few steps of one rank alone and of each of these runs; all again where a run does
    not show its fault, because then the machine was busy. Returns the recording that shows most."""
    chosen, recorded = preset or small_preset(), []
    began = time.monotonic()
    for turn in range(1, ROUNDS + 1):
        with status(f"recording {counted(len(names) + 1, 'run')}, turn {turn} of at most {ROUNDS}"):
            recorded.append(record_once(chosen, names, experiments_folder() / "scaling"))
        if not recorded[-1].unclear() or time.monotonic() - began > TIME_BUDGET:
            break
    return min(recorded, key=lambda found: len(found.unclear()))


def small_preset() -> Preset:
    """Returns this machine's preset; on a laptop one whose step takes some 30 ms, because the
    faults take multiples of it."""
    chosen = scaling_runs.small_preset()
    return replace(chosen, layers=2) if chosen.name == "laptop" else chosen


def preset_for_checks() -> Preset:
    """Returns a smaller preset on a laptop: a check reads seconds, whatever they are."""
    chosen = small_preset()
    return replace(chosen, batch=2) if chosen.name == "laptop" else chosen


def record_once(preset: Preset, names: tuple[str, ...] = tuple(FAULTS),
                folder: Path | None = None) -> RunsOnRanks:
    """Records each run once. folder: for the files of the traces; None means that none are kept."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    name_load()
    by_rank = launch(_record_all, preset, names, folder, ranks=preset.ranks, quiet=True,
                     verify=False, hang_after=60, timeout=None)
    runs = {name: [without_loading(trace) for trace in
                   on_one_axis([found[name] for found, *_ in by_rank])] for name in names}
    found, link, usual = by_rank[0]
    return RunsOnRanks(runs, [without_loading(found["alone"])], link, usual)


def _record_all(preset, names, folder
                ) -> tuple[dict[str, Trace], Link | None, dict[str, float]]:
    """On a rank: run -> trace, "alone" on rank 0 only; the link; run -> usual seconds of a step."""
    scaling_runs.one_thread()
    # The step alone comes first: the link, the loader and the slow rank are multiples of its
    # seconds.
    alone = _job(preset, group=None)
    link = scaling_runs.link_for(preset, alone.step, BYTES)
    if dist.get_rank() == 0:
        _warm_up(alone)
    baseline, found, usual = [_alone(alone)], {}, {}
    seconds = _of_rank_0(baseline[0].seconds / STEPS)
    for name in names:
        often = _times_on_gpus(preset, seconds) if name == "slow link" and link is None else 1
        job = _job(preset, dist.group.WORLD, _is_slow(name), often)
        slower = SLOWER_LINK if name == "slow link" else 1
        with _on(link, slower):
            _warm_up(job)
            job.loading.delay = LOADING * seconds * (name == "slow data loader")
            if job.slow:
                job.slow.active = True
            file = f"{name.replace(' ', '_')}_rank{dist.get_rank()}.json.gz"
            recorded, measured = [], []
            for _ in range(RECORDINGS):  # in turns, so that what disturbs one disturbs the other
                dist.barrier()
                measured.append(throughput.timed(job.step))
                recorded.append(record_step(job.step, steps=STEPS))
            usual[name] = usual_seconds(of_slowest_rank([one.seconds / STEPS for one in recorded]),
                                        of_slowest_rank(measured))
            found[name] = recorded[fastest(recorded)].write(folder and folder / file)
        # between the runs, so that what disturbs the machine for a while does not decide
        baseline.append(_alone(alone))
    if dist.get_rank() == 0:
        # the median: the fastest of many would be faster than the runs, of which there are few
        baseline.sort(key=lambda one: one.seconds)
        found["alone"] = baseline[(len(baseline) - 1) // 2].write(
            folder and folder / "alone.json.gz")
    return found, link, usual


def _alone(job) -> RecordedStep:
    """On a rank: steps of rank 0, while the others wait, and what they record is nothing."""
    recorded = record_step(job.step if dist.get_rank() == 0 else _nothing, steps=STEPS)
    dist.barrier()
    return recorded


def _nothing() -> None:
    pass


def _is_slow(name) -> bool:
    last = dist.get_rank() == dist.get_world_size() - 1
    return name == "slow computing" or name == "slow rank" and last


def _job(preset, group, slow: bool = False, often: int = 1) -> _Job:
    def strategy(model, optimizer_class, **settings):
        job.slow = SlowRank(model, EXTRA) if slow else None
        return scaling_runs.ddp_in(group, preset.cap_bytes, model, optimizer_class, **settings)

    # Made first: the strategy below puts the slow rank into it while the model is built.
    job = _Job(lambda: None)
    module, optimizer = comparison.build(strategy, preset)
    if often > 1:
        module.register_comm_hook(often, _sent_often)
    # one batch for each step, all made before: only `Loading` takes time
    # A DataLoader, because torch's profiler gives its __next__ the label that the exercise looks
    # for.
    [batch] = comparison.batches(preset, 1)
    batches = iter(DataLoader([batch] * 1000, batch_size=None, collate_fn=job.loading))
    job.step = lambda: labelled_step(module, optimizer, next(batches))
    return job


def _warm_up(job) -> None:
    for _ in range(WARM_UP):
        job.step()
    devices.synchronize()


@contextlib.contextmanager
def _on(link: Link | None, slower: float):
    if link is None:
        yield
        return
    with slow_link(replace(link, bytes_per_second=link.bytes_per_second / slower)):
        yield


def _of_rank_0(seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64, device=devices.device())
    dist.broadcast(found, 0)
    return found.item()


def _times_on_gpus(preset, seconds) -> int:
    """How often each bucket must be sent on GPUs, whose link cannot be slowed down, so that all of
    them take as long as on the slow link of a CPU. seconds: of a step alone."""
    with torch.device("meta"):
        elements = models.count_trainable(comparison.model_of(preset))
    gradients = torch.zeros(elements, device=devices.device())
    taken = []
    for _ in range(4):  # the first ones connect the ranks
        devices.synchronize()
        taken.append(scaling_runs.timed(lambda: (dist.all_reduce(gradients),
                                                 devices.synchronize())))
    return math.ceil(_of_rank_0(BYTES * SLOWER_LINK * seconds / min(taken)))


def _sent_often(times: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP: averages a bucket, after sending as much in vain."""
    buffer = bucket.buffer()
    for _ in range(times - 1):
        dist.all_reduce(torch.empty_like(buffer), async_op=True)
    work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


_NAMES = {"communication": "exposed communication", "waiting": "waiting for the slowest",
          "data loading": "data loading", "computing": "computing"}


@shows("6.4")
def show_lost_time(runs: RunsOnRanks, attribute_overhead: Callable) -> Picture:
    """Draws a waterfall for each run: from N times the throughput of one rank, down by what each
    part loses, to the throughput of the run. In percent of N times: a step of T seconds of which a
    part loses t has lost t/T of what N ranks could do."""
    require_typical({name: runs.step_and_usual(name) for name in runs.usual},
                    "the cell that recorded them")
    note = runs.note()
    figure, axes = canvas(WIDTH, 3.5 + marks.HEADLINE + marks.NOTE_LINE * bool(note),
                          ncols=len(runs), sharey=True, squeeze=False)
    figure.get_layout_engine().set(wspace=0.04)
    words, metrics = [], []
    [alone] = [sum(parts_of_step(runs.alone, 0).values())]
    gains, most = False, {}
    for ax, (name, run) in zip(axes[0], runs.items(), strict=True):
        lost = require_named(attribute_overhead(list(run), list(runs.alone)), PARTS,
                             f"{name}: attribute_overhead")
        step = require_positive(alone + sum(lost.values()), f"{name}: a step")
        _draw_waterfall(ax, {part: 100 * lost[part] / step for part in PARTS}, 100 * alone / step)
        most.setdefault(max(lost, key=lost.get), []).append(name)
        gains = gains or min(lost.values()) < -0.005 * step  # shown as more than 0 %
        ax.set_title(f"{name}\n{1e3 * step:,.0f} ms a step", fontsize=9.5, loc="left")
        metrics += [Metric(f"{name}: {_NAMES[part]}", lost[part], "s") for part in PARTS]
        metrics.append(Metric(f"{name}: efficiency", alone / step, ""))
        words.append(f"{name}: a step of {1e3 * step:.1f} ms, efficiency {alone / step:.0%}; " +
                     ", ".join(f"{_NAMES[part]} {1e3 * lost[part]:+.1f} ms" for part in PARTS))
    lesson = "Most is lost to " + "; ".join(
        f"{part} ({listed(names)})" for part, names in most.items())
    marks.headline(figure, lesson)
    ranks = len(next(iter(runs.values())))
    marks.name_rows(axes[0][0], [f"{ranks} × one rank alone", *(_NAMES[part] for part in PARTS),
                                 "efficiency of the run"], size=9.5)
    marks.note_below(figure, f"percent of {ranks} times the throughput of one rank, which takes "
                     f"{1e3 * alone:,.0f} ms for a step" + "; outlined: a gain" * gains
                     + f"\n{note}" * bool(note))
    return Picture(figure, "\n".join([
        lesson, f"one rank alone: a step of {1e3 * alone:.1f} ms", *words,
        *filter(None, [note])]), data=runs, metrics=metrics)


def _draw_waterfall(ax: Axes, lost: Mapping[str, float], efficiency: float) -> None:
    """lost: part -> percent, together 100 less the efficiency; below 0 it is gained."""
    left, right = 100.0, 100.0
    ax.barh(0, 100, height=marks.BAR, color=palette.BORDER)
    for row, (part, percent) in enumerate(lost.items(), 1):
        ax.vlines(left, row - 1, row, color=palette.MUTED, linewidth=0.8)
        ax.barh(row, -percent, left=left, height=marks.BAR, edgecolor=palette.LOST[part],
                facecolor=palette.PAPER if percent < 0 else palette.LOST[part])
        left -= percent
        right = max(right, left)
        text = marks.with_minus(f"{-percent:+z.0f} %")
        ends = sorted((left, left + percent))
        _write(ax, row, *ends, "0 %" if text[1:] == "0 %" else text,
               palette.PAPER if percent < 0 else palette.LOST[part])
    ax.vlines(left, len(lost), len(lost) + 1, color=palette.MUTED, linewidth=0.8)
    ax.barh(len(lost) + 1, efficiency, height=marks.BAR, color=palette.PLAIN)
    _write(ax, len(lost) + 1, 0, efficiency, f"{efficiency:.0f} %", palette.PLAIN)
    ax.set_xlim(0, right)
    ax.set_xticks([0, 50, 100])
    for label, side in zip(ax.get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set_horizontalalignment(side)  # or the ends of two panels would touch


def _write(ax, row, begin, end, text, colour) -> None:
    """In a bar that is long enough, else right of it, or left of it where there is no room."""
    if end - begin > 42:
        ax.text((begin + end) / 2, row, text, ha="center", va="center", fontsize=9,
                color=palette.text_on(colour))
        return
    right = end < 60
    ax.annotate(text, (end if right else begin, row), ha="left" if right else "right",
                va="center", xytext=(4 if right else -4, 0), textcoords="offset points",
                fontsize=9, color=palette.INK, **marks.ON_PAPER)

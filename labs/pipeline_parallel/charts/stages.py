"""The pictures of stages on ranks: measured under simulated, uneven stages, several runtimes."""

from collections.abc import Callable, Sequence
from statistics import median

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Wrong, shows
from labs.meters.metrics import Metric
from labs.meters.typical_step import require_typical
from labs.pictures.picture import Picture
from labs.pictures.schedules import DrawnSchedule, timelines
from labs.pictures.tables import Table
from labs.pipeline_parallel.charts.schedules import KIND_OF
from labs.pipeline_parallel.execution.experiments import (
    MeasuredStep,
    losses_by_runtime,
    measured_step,
    train_on_ranks,
)
from labs.pipeline_parallel.execution.stages import even_layers
from labs.predictions.pipelines import IllegalSchedule, Schedule, require_legal
from labs.predictions.pipelines.simulate import simulate

MB = 1e6


@shows("7.18")
def show_training(run_actions: Callable, schedule: Callable, ranks: int = 4,
                  micro_batches: int = 6) -> Table:
    """Trains a small Llama by the student's run_actions: what each rank has and sends, and the
    losses beside those of one process."""
    done, alone = train_on_ranks(run_actions, _schedule(schedule, ranks, micro_batches))
    rows = [(f"rank {rank}", each.layers, f"{each.parameters / 1e6:.2f} million", each.messages,
             f"{each.bytes / MB:.2f} MB") for rank, each in enumerate(done)]
    losses = next((each.losses for each in done if each.losses), [])
    off = max((abs(a - b) for a, b in zip(losses, alone, strict=True)), default=float("nan"))
    return Table(f"{ranks} ranks, {micro_batches} micro-batches",
                 ("", "layers", "parameters", "messages sent a step", "bytes sent a step"), rows,
                 note=f"Loss {losses[0]:.4f} before the first step, {losses[-1]:.4f} before the "
                      f"last of {len(losses)}; one process differs by {off:.0e} at most."
                      + _guessed("7.18", "the mean loss of 10 targets at 4 and 90 at 2",
                                 (10 * 4 + 90 * 2) / (10 + 90)))


def _guessed(key, what, is_right) -> str:
    """A sentence for a note below a table, or nothing where there is no guess."""
    guess = guessed(key)
    return "" if guess is None else f" Your guess of {what}: {guess:g}; it is {is_right:.3g}."


@shows("A schedule on ranks")
def show_measured(schedule: Callable, ranks: int = 4, micro_batches: int = 6,
                  chunks: int = 1) -> Picture:
    """Runs what a function of 7.14 to 7.17 returns on real ranks, and draws the measured timeline
    below the one that is simulated from the measured times of its actions and messages."""
    chosen = _schedule(schedule, ranks, micro_batches, chunks)
    kind = KIND_OF.get(schedule.__name__)
    bubble = kind and kind.bubble(ranks, micro_batches, chunks)
    return draw_measured(measured_step(chosen), schedule.__name__, bubble)


def _schedule(function, ranks, micro_batches, chunks=1) -> Schedule:
    """Of the student's function. Raises Wrong, before a rank is started, where it is illegal."""
    sizes = (ranks, micro_batches, chunks) if chunks > 1 else (ranks, micro_batches)
    try:
        lists = function(*sizes)
        return require_legal(lists if isinstance(lists, Schedule) else
                             Schedule.from_lists(lists, micro_batches, chunks))
    except IllegalSchedule as error:
        raise Wrong(f"{function.__name__}{sizes}: {error}", "Nothing was sent: a schedule is "
                    "judged before it runs.", code="illegal_schedule") from None


def draw_measured(step: MeasuredStep, name: str, bubble: float | None = None) -> Picture:
    """Draws a measured step below its simulation. bubble: the share that the formula gives. Raises
    NotTypical where the step is far from the median of those measured."""
    if step.lengths:
        require_typical({name: (min(step.lengths), median(step.lengths))}, "this cell")
    simulated = simulate(step.schedule, step.times)
    expected = [held / MB for held in simulated.peak_bytes(step.activation_bytes, step.kept)]
    peaks = [peak / MB for peak in step.peaks]
    return timelines([
        DrawnSchedule(f"{name}, simulated", simulated, unit="seconds", bubble=bubble,
                      held=expected, held_unit="MB"),
        DrawnSchedule(f"{name}, on {len(step.schedule.ranks)} ranks", step.timeline,
                      unit="seconds", bubble=bubble, held=peaks, peaks=expected, held_unit="MB")],
        [Metric(f"{name}: bubble", step.timeline.bubble(), "", bubble),
         *(Metric(f"{name}: activations in flight on rank {rank}", peak, "MB", predicted)
           for rank, (peak, predicted) in enumerate(zip(peaks, expected, strict=True)))])


@shows("7.19")
def show_split(split_layers: Callable, costs: Sequence[float], ranks: int) -> Table:
    """A table of the stages by numbers of parts and by the student's split."""
    split = list(split_layers(list(costs), ranks))
    return Table(f"{len(costs)} parts on {ranks} ranks",
                 ("split", "parts of each stage", "cost of each stage", "slowest", "idle"),
                 [_row("as many parts each", even_layers(len(costs), ranks), costs),
                  _row("your split", split, costs)], left=2,
                 note="idle: the share of all ranks' time that is spent waiting for the slowest "
                      "stage, the bubble not counted."
                      + _guessed("7.19", "the slowest stage", max(_stages(split, costs))))


def _stages(counts, costs) -> list[float]:
    """What each stage costs."""
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return [sum(costs[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def _row(name, counts, costs) -> tuple:
    stages = _stages(counts, costs)
    slowest = max(stages)
    return (name, ", ".join(map(str, counts)), ", ".join(f"{cost:.3g}" for cost in stages),
            f"{slowest:.3g}", f"{1 - sum(stages) / len(stages) / slowest:.0%}")


@shows("Several runtimes")
def show_runtimes(*functions: Callable, micro_batches: int = 4) -> Table:
    """Trains the same small Llama on 2 ranks by what these functions return, in our runner and in
    torch's runtime, and by torch's own schedules."""
    schedules = {function.__name__: _schedule(function, 2, micro_batches) for function in functions}
    losses = losses_by_runtime(schedules, ranks=2, micro_batches=micro_batches)
    first = next(iter(losses.values()))
    rows = [(name, *(f"{loss:.6f}" for loss in found),
             f"{max(abs(a - b) for a, b in zip(found, first, strict=True)):.0e}")
            for name, found in losses.items()]
    return Table("Losses of the same Llama on 2 ranks",
                 ("schedule and runtime", *(f"step {number + 1}" for number in range(len(first))),
                  "difference"), rows)

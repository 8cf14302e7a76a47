"""What hides all-to-alls: the shared expert, and a second micro-batch (DualPipe, DeepSeek-V3,
arXiv 2412.19437, section 3.2.1). Simulated on one rank that computes one thing at a time and sends
one thing at a time."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.pipelines.schedule import Action
from labs.predictions.pipelines.simulate import Span, Timeline

COMPUTES, SENDS = "computes", "all-to-alls"
LAYERS, MICRO_BATCHES = 2, 2
ALONE = "nothing overlaps"
ATTENTION, EXPERTS, SHARED, ALL_TO_ALL = "A", "E", "S", "rows"
# In any one unit. A backward takes twice as long; an all-to-all carries as many rows in it.
FORWARD = {ATTENTION: 1.0, EXPERTS: 1.0, SHARED: 0.5, ALL_TO_ALL: 0.5}


@dataclass(frozen=True)
class Task:
    """name: one of FORWARD. phase: "F" or "B". after: tasks, by their place in the list, that must
    have ended."""

    name: str
    phase: str
    micro_batch: int
    layer: int
    after: tuple[int, ...]

    @property
    def resource(self) -> str:
        return SENDS if self.name == ALL_TO_ALL else COMPUTES

    @property
    def duration(self) -> float:
        twice = self.phase == "B" and self.resource == COMPUTES
        return FORWARD[self.name] * (1 + twice)


@dataclass(frozen=True)
class Run:
    """spans: (task, begin, end), in order of begin."""

    spans: tuple[tuple[Task, float, float], ...]

    def timeline(self, resource: str = COMPUTES) -> Timeline:
        """When the rank does this, as the timeline of one rank."""
        return Timeline((tuple(Span(Action(task.phase, task.micro_batch, task.layer), begin, end)
                               for task, begin, end in self.spans if task.resource == resource),))

    @property
    def makespan(self) -> float:
        return max(end for _, _, end in self.spans)

    @property
    def idle(self) -> float:
        """The share of the time in which the rank computes nothing."""
        return self.timeline().bubble()


def tasks(shared_meanwhile: bool, together: bool) -> list[Task]:
    """Forward and backward of two micro-batches. shared_meanwhile: the shared expert may compute
    while rows are sent; else it comes after them. together: the second micro-batch need not wait
    for the end of the first."""
    found: list[Task] = []
    for micro_batch in range(MICRO_BATCHES):
        last = (len(found) - 1,) if found and not together else ()
        for phase in "FB":
            for layer in range(LAYERS) if phase == "F" else reversed(range(LAYERS)):
                last = _layer(found, shared_meanwhile, phase, micro_batch, layer, last)
    return found


def _layer(found, shared_meanwhile, phase, micro_batch, layer, last) -> tuple[int, ...]:
    """Adds one layer's tasks; what the next layer waits for."""
    def add(name, after):
        found.append(Task(name, phase, micro_batch, layer, after))
        return (len(found) - 1,)

    if phase == "F":
        last = add(ATTENTION, last)
    begins = last  # what the shared expert needs
    for name in (ALL_TO_ALL, EXPERTS, ALL_TO_ALL):
        last = add(name, last)
    shared = add(SHARED, begins if shared_meanwhile else last)
    last = (*last, *shared) if shared_meanwhile else shared
    return add(ATTENTION, last) if phase == "B" else last


def simulate(todo: list[Task]) -> Run:
    """What can begin first, begins; of several, one of the micro-batch that has done less, so that
    neither has to end alone."""
    ends: dict[int, float] = {}
    done = [0.0] * MICRO_BATCHES  # of each micro-batch
    free = {COMPUTES: 0.0, SENDS: 0.0}
    spans = []
    while len(ends) < len(todo):
        ready = [(max([free[task.resource], *(ends[one] for one in task.after)]),
                  done[task.micro_batch], number) for number, task in enumerate(todo)
                 if number not in ends and all(one in ends for one in task.after)]
        begin, _, number = min(ready)
        task = todo[number]
        ends[number] = free[task.resource] = begin + task.duration
        done[task.micro_batch] += task.duration
        spans.append((task, begin, ends[number]))
    return Run(tuple(sorted(spans, key=lambda span: span[1])))


def runs() -> dict[str, Run]:
    """Title -> run."""
    return {ALONE: simulate(tasks(False, False)),
            "the shared expert computes meanwhile": simulate(tasks(True, False)),
            "two micro-batches take turns": simulate(tasks(True, True))}


@shows("Overlapping all-to-alls")
def show_dual_pipe() -> Picture:
    """Draws one rank's forward and backward of two micro-batches, with its all-to-alls exposed, and
    with what hides them."""
    found, guess = runs(), guessed("9.8")
    lines = 2 + (guess is not None)
    figure, axes = canvas(WIDTH, 0.75 + marks.HEADLINE + lines * marks.NOTE_LINE + len(found),
                          nrows=len(found), sharex=True)
    longest = max(run.makespan for run in found.values())
    said = [f"{title}: {marks.format_number(run.makespan)} units, {_percent(run.idle)} idle"
            for title, run in found.items()]
    for ax, words, run in zip(axes, said, found.values(), strict=True):
        _draw(ax, run, longest)
        ax.set_title(words, loc="left", fontsize=9.5, color=palette.INK, pad=4)
    axes[-1].set_xlabel("units of time", fontsize=9)
    lesson = "The rank computes nothing in " + ", ".join(
        _percent(run.idle) for run in found.values()) + " of the time"
    marks.headline(figure, lesson)
    note = ("A: attention, 1 unit. E: experts, 1. S: shared expert, 0.5. Rows of an all-to-all: "
            f"0.5.\nBackward computes twice as long. {LAYERS} layers; the number is the "
            "micro-batch.")
    answer = marks.answered(guess, 100 * found[ALONE].idle, "% of the time")
    marks.note_below(figure, "\n".join(filter(None, [answer, note])))
    marks.legend_above(figure, [
        Patch(color=palette.PHASES["forward"], label="forward"),
        Patch(color=palette.PHASES["backward"], label="backward"),
        Patch(color=palette.COLLECTIVES["all_to_all"], label="all-to-all"),
        Patch(color=palette.IDLE, label="idle")])
    return Picture(figure, "\n".join([lesson, *said, *filter(None, [answer]), *note.splitlines()]),
                   data=found)


def _percent(share) -> str:
    return f"{share:.0%}".replace("%", " %")


_LETTER = 0.078  # inches of a character in a box


def _draw(ax: Axes, run: Run, longest: float):
    inch = longest / (WIDTH - 1.2)
    rows = (COMPUTES, SENDS)
    for row in range(len(rows)):
        ax.add_patch(Rectangle((0, row - 0.42), run.makespan, 0.84, linewidth=0,
                               facecolor=palette.IDLE if row == 0 else palette.GRID))
    for task, begin, end in run.spans:
        row = rows.index(task.resource)
        colour = (palette.COLLECTIVES["all_to_all"] if row else
                  palette.PHASES["forward" if task.phase == "F" else "backward"])
        ax.add_patch(Rectangle((begin, row - 0.42), end - begin, 0.84, facecolor=colour,
                               linewidth=0.5, edgecolor=palette.PAPER))
        texts = [f"{task.micro_batch}"] if row else [f"{task.name}{task.micro_batch}", task.name]
        text = next((one for one in texts if end - begin > _LETTER * len(one) * inch), "")
        ax.text((begin + end) / 2, row, text, ha="center", va="center_baseline", fontsize=7.5,
                color=palette.text_on(colour))
    marks.name_rows(ax, list(rows), size=9)
    ax.set_xlim(0, longest)
    ax.tick_params(axis="x", labelsize=8)

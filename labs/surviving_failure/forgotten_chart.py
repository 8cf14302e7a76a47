"""Draws which losses are wrong after a job has forgotten a part of its state, the first picture of
notebook 08."""

from matplotlib.patches import Patch, Rectangle

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.surviving_failure.forgotten import (
    LEFT_OUT,
    REST,
    STEPS_AFTER_RESUME,
    distances_forgetting_each,
)
from labs.workers.launcher import launch

RANKS = 2
_WRONG = palette.PHASES["exposed"]


@shows("what a job forgets")
def show_forgotten() -> Picture:
    """Draws how far each loss is from that of the uninterrupted job, a row for each copy of a job
    that lacks one part. Its data: part -> distances of the losses, the largest of the ranks'."""
    by_rank = launch(distances_forgetting_each, ranks=RANKS, quiet=True)
    apart = {what: [max(steps) for steps in zip(*(found[what] for found in by_rank), strict=True)]
             for what in LEFT_OUT}
    parts = [distances for what, distances in apart.items() if what != "nothing"]
    wrong, later = sum(map(any, parts)), sum(not distances[0] for distances in parts)
    lesson = (f"Without {wrong} of {len(parts)} parts a loss is wrong; without {later} of them the "
              "first one is still equal")
    right = next((step for step, off in enumerate(apart["the schedule"], 1) if off), 0)
    answer = marks.answered(guessed("8.1"), right)
    figure, ax = canvas(WIDTH, 0.95 + marks.HEADLINE + 0.36 * len(apart)
                        + marks.NOTE_LINE * bool(answer))
    for row, distances in enumerate(apart.values()):
        for step, off in enumerate(distances):
            _draw_loss(ax, step, row, off)
    whole = {"nothing": "with all parts", REST: "with the model alone"}
    marks.name_rows(ax, [whole.get(what, f"without {what}") for what in apart], above=0.5)
    ax.set_xlim(-0.5, STEPS_AFTER_RESUME - 0.5)
    ax.set_xticks(range(STEPS_AFTER_RESUME),
                  [f"loss {step}" for step in range(1, STEPS_AFTER_RESUME + 1)])
    ax.tick_params(axis="x", length=0)
    ax.spines["bottom"].set_visible(False)
    marks.headline(figure, lesson)
    marks.legend_above(figure, [
        Patch(facecolor=palette.SURFACE, edgecolor=palette.BORDER,
              label="equal to the uninterrupted job's"),
        Patch(color=_WRONG, label="wrong, by so many nats")])
    marks.note_below(figure, answer)
    return Picture(figure, "\n".join([
        lesson, f"How far each loss is from that of the uninterrupted job (DDP, {RANKS} ranks)",
        *(f"{what}: {', '.join(map(distance, distances))}" for what, distances in apart.items()),
        *filter(None, [answer])]), data=apart)


def distance(off: float) -> str:
    """A difference of losses in words."""
    return f"{off:.1g}" if off else "equal"


def _draw_loss(ax, step, row, off):
    ax.add_patch(Rectangle((step - 0.47, row - 0.42), 0.94, 0.84,
                           facecolor=_WRONG if off else palette.SURFACE,
                           edgecolor="none" if off else palette.BORDER, linewidth=0.8))
    ax.text(step, row, distance(off), ha="center", va="center", fontsize=9.5,
            color=palette.text_on(_WRONG) if off else palette.MUTED)

"""The table of exercise 6.10 that asks whether overlap explains published steps: errors by the
share of the step in which computing could hide communication."""

from collections.abc import Callable
from statistics import fmean

from labs.exercises.verdicts import shows
from labs.pictures.tables import Table
from labs.predictions.step_time import load_published_runs, step_time
from labs.predictions.step_time.fit import held_out
from labs.scaling.charts.limits import Prediction, predictions

BANDS = {"over 20 %": (20, 100), "10 to 20 %": (10, 20), "5 to 10 %": (5, 10),
         "under 5 %": (0, 5)}  # of the published step
# What a model without a student's function takes for `interference`; its other six constants are
# fitted for it, or the comparison would be with constants that were fitted to another model.
EXTREMES = {"nothing hidden": 1.0, "all hidden for nothing": 0.0}


@shows("6.10")
def show_overlap(step_seconds: Callable) -> Table:
    """Returns a table of mean errors, in percent, by the share of the published step in which
    computing could hide communication: by the student's function, and by models in which nothing
    is hidden, or all that can be without a cost, each with constants fitted for it."""
    found = predictions(step_seconds)
    errors = {name: _errors(interference) for name, interference in EXTREMES.items()}
    rows = []
    for name, (low, high) in BANDS.items():
        ids = [one.row.id for one in found if low <= one.could_hide < high]
        rows.append((name, len(ids), *(f"{fmean(each[row] for row in ids):.1f}"
                                       for each in (*errors.values(), _yours(found)))))
    values = sorted(constants.unhidden for constants in held_out().values())
    return Table("mean error of predicted step times, in percent", (
        "computing could hide", "runs", *EXTREMES, "yours"), rows,
        note="Each model with constants fitted for it, without the run that it predicts. Yours: "
             f"interference {values[0]:.2f} to {values[-1]:.2f}, by which runs were left out.")


def _errors(interference) -> dict[str, float]:
    """Id -> error in percent of the step with this interference."""
    constants = held_out(interference)
    return {row.id: 100 * abs(step_time(row.run, constants[row.id]).total / row.seconds - 1)
            for row in load_published_runs() if row.run}


def _yours(found: list[Prediction]) -> dict[str, float]:
    return {one.row.id: abs(one.yours) for one in found}

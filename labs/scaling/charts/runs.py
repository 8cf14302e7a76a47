"""The pictures of notebook 06, part 1: the loss of a run, and what uneven answers do."""

import json
from collections.abc import Callable
from pathlib import Path

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Verdict, shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.scaling.checks.ragged_step import ANSWERS, errors_of_means
from labs.scaling.runs.commands import CommandResult
from labs.workers.launcher import launch


@shows("What the ranks wrote")
def show_metrics(run: CommandResult, metrics: str = "metrics.json") -> Table | Verdict:
    """Returns a table of some of the steps in the JSON file that a run of train.py has written."""
    return _table("6.1", metrics, {
        "mean loss": lambda step: f"{step['loss']:.3f}",
        "learning rate": lambda step: f"{step['learning_rate']:.1e}",
        "tokens": lambda step: f"{step['tokens']:g}",
        "ms": lambda step: f"{1e3 * step['seconds']:.1f}",
        "tokens/s": lambda step: f"{step['tokens'] / step['seconds']:,.0f}"})


@shows("What the job wrote")
def show_job(run: CommandResult, metrics: str = "job.json") -> Table | Verdict:
    """Returns a table of some of the steps in the JSON file that a run of job.py has written."""
    return _table("6.15", metrics, {
        "mean loss": lambda step: f"{step['loss']:.3f}",
        "answer tokens": lambda step: f"{step['tokens']:g}",
        "norm before clipping": lambda step: f"{step['norm']:.2f}"})


def _table(exercise, metrics, columns) -> Table | Verdict:
    """columns: title -> cell(step)."""
    if not Path(metrics).is_file():
        return Verdict(exercise, None, f"there is no {metrics}: the run wrote none")
    found = json.loads(Path(metrics).read_text(encoding="utf-8"))
    steps = found["steps"]
    chosen = sorted({round(place * (len(steps) - 1) / 7) for place in range(8)})
    rows = [(number, *(cell(steps[number]) for cell in columns.values())) for number in chosen]
    return Table(f"{len(steps)} steps on {found['ranks']} ranks", ("step", *columns), rows, left=1)


@shows("6.2")
def show_ragged(ragged_step: Callable) -> Picture:
    """Draws how far the mean of two ranks' means leads from the right gradient, for answers of more
    and more uneven lengths; the student's `ragged_step` beside it."""
    errors = launch(errors_of_means, ragged_step, ranks=2, quiet=True)[0]
    rows = [Bar(f"mean of means, answers of {first} and {second} tokens", round(100 * wrong, 3),
                guessed=guessed("6.2") if (first, second) == ANSWERS[-1] else None)
            for (first, second), (wrong, _) in zip(ANSWERS, errors, strict=True)]
    rows.append(Bar("yours, the worst of these", round(100 * max(own for _, own in errors), 3),
                    colour=palette.PHASES["forward"]))
    return bars(rows, "%", "of the right gradient's norm, error of the gradient")

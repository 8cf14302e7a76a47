"""The pictures of notebook 06, part 1: the loss of a run, and what uneven answers do."""

from collections.abc import Callable

from labs.exercises.guesses import guessed
from labs.exercises.scripts.commands import CommandResult
from labs.exercises.scripts.files import read_metrics
from labs.exercises.student_code import message_of
from labs.exercises.verdicts import Wrong, shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.scaling.checks.ragged_step import ANSWERS, errors_of_means
from labs.workers.launcher import launch


@shows("What the ranks wrote")
def show_metrics(run: CommandResult, metrics: str = "metrics.json") -> Table:
    """Returns a table of some of the steps in the JSON file that this run of train.py has written.
    Raises Wrong where it failed or has not written it."""
    return _table(run, metrics, {
        "mean loss": lambda step: f"{step['loss']:.3f}",
        "learning rate": lambda step: f"{step['learning_rate']:.1e}",
        "tokens": lambda step: f"{step['tokens']:g}",
        "ms": lambda step: f"{1e3 * step['seconds']:.1f}",
        "tokens/s": lambda step: f"{step['tokens'] / step['seconds']:,.0f}"})


@shows("What the job wrote")
def show_job(run: CommandResult, metrics: str = "job.json") -> Table:
    """Returns a table of some of the steps in the JSON file that this run of job.py has written.
    Raises Wrong where it failed or has not written it."""
    return _table(run, metrics, {
        "mean loss": lambda step: f"{step['loss']:.3f}",
        "answer tokens": lambda step: f"{step['tokens']:g}",
        "norm before clipping": lambda step: f"{step['norm']:.2f}"})


def _table(run, metrics, columns) -> Table:
    """columns: title -> cell(step)."""
    found = read_metrics(run, metrics, {"ranks": int, "steps": list})
    steps = found["steps"]
    chosen = sorted({round(place * (len(steps) - 1) / 7) for place in range(8)}) if steps else []
    rows = []
    for number in chosen:
        try:
            rows.append((number, *(cell(steps[number]) for cell in columns.values())))
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise Wrong(f"step {number} in {metrics} lacks a number that is shown here: "
                        f"{message_of(error)}", code="missing_keys") from None
    return Table(f"{len(steps)} steps on {found['ranks']} ranks", ("step", *columns), rows, left=1)


@shows("6.2")
def show_ragged(ragged_step: Callable) -> Picture:
    """Draws how far the mean of two ranks' means is from the right gradient, for answers of more
    and more uneven lengths; the student's `ragged_step` beside it."""
    errors = launch(errors_of_means, ragged_step, ranks=2, quiet=True)[0]
    rows = [Bar(f"mean of means, answers of {first} and {second} tokens", round(100 * wrong, 3),
                guessed=guessed("6.2") if (first, second) == ANSWERS[-1] else None)
            for (first, second), (wrong, _) in zip(ANSWERS, errors, strict=True)]
    rows.append(Bar("yours, the worst of these", round(100 * max(own for _, own in errors), 3),
                    colour=palette.PHASES["forward"]))
    return bars(rows, "%", "difference from the right gradient, relative to its norm")

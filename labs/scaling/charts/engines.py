"""Tables of part 5: what started scripts really were, and what the engines cost."""

from collections.abc import Callable, Mapping

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_named, require_number, require_several
from labs.exercises.verdicts import Wrong, kind_of, shows
from labs.meters.evidence import PARTS
from labs.pictures.tables import Table
from labs.scaling.runs.engines import Engines
from labs.scaling.runs.jobs import KINDS, Job


@shows("6.11")
def show_jobs(jobs: Mapping[str, Job], what_ran: Callable) -> Table:
    """Returns a table of what the library calls each job, the name that the student's function
    gives it, and the student's numbers: the copies that all ranks hold together, and what they
    reduce."""
    rows, alone = [], []
    for how, job in jobs.items():
        name, numbers = _ran(what_ran, job.ranks, how)
        said = job.ranks[0].library.removeprefix("DistributedType.")
        rows.append((how, said, name, str(len(job.ranks)),
                     *(f"{numbers[each]:.3g}" for each in (*PARTS, "reduced"))))
        if len(job.ranks) == 1 and numbers["reduced"]:
            alone.append(how)
    notes = ["As many copies as ranks: each holds all of it. One copy: it is sharded. Nothing "
             "reduced: each rank trains a model of its own."]
    notes += [f"{' and '.join(alone)}: DDP calls its all-reduce with one rank too, which then "
              "sends nothing."] * bool(alone)
    if (guess := guessed("6.11")) is not None and "--cpu" in jobs:
        notes.append(f"Your guess for parameters with --cpu: {guess:g}.")
    return Table("copies that all ranks hold together, and × gradients reduced", (
        "started", "the library says", "what ran", "ranks",
        *(part.replace("_", " ") for part in PARTS), "reduced"), rows, left=2,
        note=" ".join(notes))


def _ran(what_ran, ranks, how) -> tuple[str, dict[str, float]]:
    """The student's name and numbers for the ranks of a job."""
    name, numbers = require_several(what_ran(ranks), ("the name", "the numbers"),
                                    f"{how}: it returned")
    if not isinstance(name, str):
        raise Wrong(f"{how}: what_ran returned {kind_of(name)} as the name, not a string",
                    f"One of {', '.join(KINDS)}.", code="wrong_type")
    return name, require_named(numbers, (*PARTS, "reduced"), f"{how}: what_ran")


@shows("6.11")
def show_engines(engines: Engines, what_ran: Callable, efficiency: Callable) -> Table:
    """A table of the engines: what the student's functions say of them, what they cost, and what
    has to be changed in a script of one device for each."""
    alone, rows = engines.alone.tokens_per_second, []
    for name, engine in {"one device": engines.alone, **engines.engines}.items():
        ran, _ = _ran(what_ran, engine.ranks, name)
        share = require_number(efficiency(len(engine.ranks), engine.tokens_per_second, alone),
                               f"the efficiency of {name}")
        rows.append((name, ran, engine.change, f"{engine.peak / 1e6:.1f}",
                     f"{engine.bytes_per_step / 1e6:.1f}", f"{engine.tokens_per_second:,.0f}",
                     f"{share:.0%}"))
    head = ("engine", "what ran", "change in the script", "MB at peak", "MB sent", "tokens/s",
            "efficiency")
    ranks = max(len(engine.ranks) for engine in engines.engines.values())
    return Table(f"A step of a Qwen2 with {engines.parameters:,} parameters, {ranks} ranks, fp32",
                 head, rows, left=2,
                 note="MB are of one rank; it sends (N-1)/N of those sent, in which an all-reduce "
                      "counts twice. Each rank's batch is as large as the one device's.")

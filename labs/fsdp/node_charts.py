"""The table and the chart of the billion-parameter lab: predicted beside measured."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from labs.checks.gpu_notes import below
from labs.checks.verdicts import shows
from labs.fsdp.node_jobs import Node, planned
from labs.fsdp.node_run import NodeRun, Row
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.plans.intervals import HELD, Factors, seconds_factors
from labs.predictions.step_time.published_runs import error_percent
from labs.training.memory_categories import GB
from labs.words import counted

SOURCES = {
    "measured": "Measured on {ranks}.",
    "alone": "Measured on one GPU, as rank 0 of each job in a fake process group: its tensors are "
             "real, and so is their memory. Nothing is sent between GPUs, so there is no loss and "
             "no speed to report.",
    "predicted": "Predicted only: this machine has no GPU.",
    "paced": "Measured on {ranks} of a CPU: memory, calls and bytes are real, each block takes the "
             "node's stated seconds, and collectives and copies pass a slow link."}
BUSY = 0.25  # of the prediction: by how much a step at a stated pace is longer at most
PARTS = ("computing", "exposed", "optimizer", "host")  # as StepSeconds.by_name has them


@shows("Training a billion parameters")
def show_node_table(run: NodeRun) -> Table:
    """Returns every row: its model, and a rank's peak, predicted and, where ranks ran, measured."""
    unit, size, many = _unit(run)
    head = ("", f"{many} parameters", f"{run.rank}s", "tokens of each", f"{unit}, predicted",
            f"{unit}, measured")
    rows = [(row.job.name, f"{row.job.parameters / size:.2f}", str(row.job.size.ranks),
             f"{row.job.size.batch} × {row.job.size.context:,}", f"{row.peak.total / size:.1f}",
             _peak(row, size)) for row in run.rows]
    where = "A rank" if run.source == "paced" else f"On {run.card.name}"
    return _table(run, f"{where} with {run.card.usable / size:.1f} {unit}: {_model(run)}", head,
                  rows, _source(run))


@shows("Training a billion parameters")
def show_node_steps(run: NodeRun) -> Table:
    """Returns a step's milliseconds of every row, in parts, predicted and, where ranks ran,
    measured; and the efficiency of the rows that scale."""
    head = ("", *PARTS, "sum", "measured", "efficiency, lost to")
    return _table(run, "A step, in ms", head, [_step_cells(run, row) for row in run.rows],
                  " ".join([_offload(run), _assumed(run)]))


def _table(run, title, head, rows, note) -> Table:
    """Without the columns of what is measured where nothing is."""
    shown = [place for place, name in enumerate(head)
             if run.source != "predicted" or not name.endswith("measured")]
    return Table(title, tuple(head[place] for place in shown),
                 [tuple(row[place] for place in shown) for row in rows], note=note)


def _unit(run) -> tuple[str, float, str]:
    """(unit of memory, its bytes, as many parameters)."""
    return ("GB", GB, "billion") if run.card.usable >= GB else ("MB", 1e6, "million")


def _model(run) -> str:
    larger = next(row.job for row in run.rows if row.job.name.startswith("larger"))
    unit, size, many = _unit(run)
    return (f"a GPT-2 with {run.rows[0].job.parameters / size:.2f} {many} parameters, and one with "
            f"{larger.parameters / size:.2f}, whose states alone take "
            f"{16 * larger.parameters / size:.0f} {unit} under DDP")


def _step_cells(run, row) -> tuple[str, ...]:
    between = "" if run.source != "predicted" else " ({:,.0f}–{:,.0f})".format(
        *(1e3 * end for end in _factors(run, row).of(row.seconds)))
    share, predicted = efficiency(run, row), _predicted_efficiency(run, row)
    lost = lost_to(run, row)  # by the prediction, whose error a measured loss has, too
    if predicted is not None and lost:
        lost = f" (predicted {predicted:.0%}{lost})"
    return (row.job.name, *(f"{1e3 * seconds:,.0f}" for seconds in row.step.by_name().values()),
            f"{1e3 * row.seconds:,.0f}{between}", _measured_ms(row),
            "" if share is None else f"{share:.0%}{lost}")


def _factors(run, row) -> Factors:
    """How far measured seconds were from such a prediction, by the planner."""
    return seconds_factors(*planned(row.job, Node(run.card)))


def _median(row) -> float | None:
    """Seconds of a step; None where none was timed."""
    seconds = row.measured.seconds if row.measured else []
    return statistics.median(seconds) if seconds else None


def _measured_ms(row) -> str:
    """The median, and the prediction's error."""
    timed = _median(row)
    return "–" if timed is None else (f"{1e3 * timed:,.0f} "
                                      f"({error_percent(row.seconds, timed):+z.0f} %)")


def _peak(row, size) -> str:
    if row.measured is None:
        return "–"
    return row.measured.failure or f"{row.measured.peak / size:.1f}"


def measured_rate(row: Row) -> float | None:
    """Tokens per second of all ranks together: the median step; None where none was timed."""
    timed = _median(row)
    return None if timed is None else row.job.size.tokens / timed


def _rate(run, row) -> float | None:
    """Tokens per second: measured, or predicted where nothing runs here."""
    return (row.job.size.tokens / row.seconds if run.source == "predicted"
            else measured_rate(row))


def efficiency(run: NodeRun, row: Row) -> float | None:
    """Throughput on N GPUs over N times that on the fewest that ran the job, per GPU: measured,
    or predicted where nothing runs here."""
    ran = [one for one in run.scaling if _rate(run, one)]
    if row not in run.scaling or not ran or not _rate(run, row):
        return None
    return _rate(run, row) / row.job.size.ranks / (_rate(run, ran[0]) / ran[0].job.size.ranks)


def _predicted_efficiency(run, row) -> float | None:
    """By the prediction, where it was measured too."""
    if run.source == "predicted" or efficiency(run, row) is None:
        return None
    base = next(one for one in run.scaling if one.job.size.ranks == base_of(run))
    return base.seconds / row.seconds  # each rank has as many tokens in both


def lost_to(run: NodeRun, row: Row) -> str:
    """The part of the predicted step that grew most from the fewest GPUs to this row's, after a
    comma: what its efficiency is limited by. Each GPU has as many tokens in both."""
    if row not in run.scaling:
        return ""
    base = next(one for one in run.scaling if one.job.size.ranks == base_of(run))
    more = {name: seconds - base.step.by_name()[name]
            for name, seconds in row.step.by_name().items()}
    most = max(more, key=more.get)
    return f", {most} {1e3 * more[most]:,.0f} ms" if more[most] > 0 else ""


def base_of(run: NodeRun) -> int:
    """Returns the fewest GPUs whose speed is known for the job of the scaling rows."""
    return next((row.job.size.ranks for row in run.scaling if _rate(run, row)), 1)


def _source(run) -> str:
    return SOURCES[run.source].format(ranks=counted(run.ranks, run.rank))


def _offload(run) -> str:
    """The price of CPU offload: pinned memory, bytes over PCIe, and time."""
    without, row = _offloaded(run)
    unit, size, _ = _unit(run)
    words = (f"CPU offload copies {row.step.copied / size:.1f} {unit} over PCIe in each step and "
             "rank")
    found = row.measured
    if found and found.copied:
        words += (f" by formula, {found.copied / size:.1f} measured, with "
                  f"{found.pinned / size:.1f} {unit} of pinned memory")
    rates = [_rate(run, one) for one in (row, without)]
    if all(rates):
        words += f", and reaches {rates[0] / rates[1]:.0%} of the tokens/s of the row above"
    return f"{words}."


def _offloaded(run) -> tuple[Row, Row]:
    place = next(place for place, row in enumerate(run.rows) if row.job.offload)
    return run.rows[place - 1], run.rows[place]


def _assumed(run) -> str:
    base = base_of(run)
    model = ("The parts are by the same model, with the slowed node's rates. "
             if run.source == "paced" else
             "The parts are predicted (notebook 06 says how); products of fp32 are in TF32. ")
    known = _factors(run, run.rows[0])
    whisker = ("In brackets: the prediction's error. " if run.source != "predicted" else
               f"In brackets: between these, {HELD:.0%} of {known.rows:,} measured runs lie "
               f"({known.kind}); none of them offloads. ")
    return (f"{model}Exposed: communication that computing does not hide, and by how much it is "
            f"slowed down. {whisker}Efficiency: tokens/s on N {run.rank}s over "
            f"N{f'/{base}' * (base > 1)} times those on {counted(base, run.rank)}."
            + _busy(run))


def _busy(run) -> str:
    """A warning where ranks could not keep the stated pace."""
    off = [_median(row) / row.seconds - 1 for row in run.rows if _median(row)]
    return (" This machine was busy with something else while it measured: run the cell again."
            if run.source == "paced" and max(off, default=0.0) > BUSY else "")


@shows("Training a billion parameters")
def show_node_chart(run: NodeRun) -> Picture:
    """Draws each row's peak against the card, the parts of its step, and the efficiency of those
    that scale."""
    rows, (unit, size, _) = run.rows, _unit(run)
    failed = tuple(place for place, row in enumerate(rows) if _out_of_memory(run, row))
    measured = [row.measured and row.measured.peak for row in rows]
    pale = tuple(place for place, peak in enumerate(measured) if not peak)
    peak = Panel("peak of a rank", unit, [peak or row.peak for peak, row in
                                          zip(measured, rows, strict=True)], size,
                 [None if place in pale else row.peak.total for place, row in enumerate(rows)],
                 limit=run.card.usable, out_of_memory=failed, pale=pale)
    shares = [efficiency(run, row) for row in rows]
    step = (step_panel(rows, 1e-9, "ms per token and 10⁶ Ψ") if run.source == "paced" else
            step_panel(rows, 1e-15, "ms per 1,000 tokens and 10⁹ Ψ",
                       [_factors(run, row) for row in rows]))
    panels = [peak, step,
              Panel("efficiency", f"% of N × {counted(base_of(run), run.rank)}", shares, 0.01,
                    [_predicted_efficiency(run, row) for row in rows], missing="",
                    pale=tuple(range(len(rows))) * (run.source == "predicted"))]
    return side_by_side([row.job.name for row in rows], panels,
                        below(f"{_model(run)}. {_source(run)}".replace("a GPT", "A GPT", 1)),
                        _lesson(run, failed, shares))


def _lesson(run, failed, shares) -> str:
    """Which rows do not fit, and how efficient the largest of those that scale is."""
    short = [run.rows[place].job.name for place in failed]
    words = [f"Out of memory: {', '.join(short)}"] if short else ["All rows fit"]
    scaled = [(row, share) for row, share in zip(run.rows, shares, strict=True) if share]
    if scaled:
        row, share = scaled[-1]
        words.append(f"{counted(row.job.size.ranks, run.rank)} are {share:.0%} efficient")
    return "; ".join(words)


def step_panel(rows: list[Row], size: float, unit: str, factors: Sequence[Factors] = ()) -> Panel:
    """The seconds of a step over its rank's tokens and its model's parameters: measured with the
    prediction as a tick, or the prediction's parts where none was timed; either with the
    prediction's interval. size: of one unit. factors: of each row's interval, if it has one."""
    work = [row.job.size.batch * row.job.size.context * row.job.parameters for row in rows]
    timed = [_median(row) for row in rows]
    pale = tuple(place for place, seconds in enumerate(timed) if seconds is None)
    panel = Panel("a step", unit, [
        {name: part / n for name, part in row.step.by_name().items()} if seconds is None
        else seconds / n for seconds, row, n in zip(timed, rows, work, strict=True)], size,
        [None if seconds is None else row.seconds / n
         for seconds, row, n in zip(timed, rows, work, strict=True)], pale=pale)
    return replace(panel, whiskers=[
        tuple(end / n for end in factor.of(row.seconds))
        for factor, row, n in zip(factors, rows, work, strict=True)] if factors else [])


def _out_of_memory(run, row) -> bool:
    if row.measured:
        return row.measured.failure == "out of memory"
    return row.peak.total > run.card.usable

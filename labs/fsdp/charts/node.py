"""The table and the chart of the billion-parameter lab: predicted beside measured."""

import statistics
from dataclasses import replace

from labs.exercises.gpu_notes import below
from labs.exercises.verdicts import shows
from labs.fsdp.node.running import NodeRun, Row
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.step_time.constants import HELD_OUT_ERROR
from labs.training.memory_categories import GB
from labs.words import counted

SOURCES = {
    "measured": "Measured on {ranks}.",
    "alone": "Measured on one GPU, as rank 0 of each job in a fake process group: its tensors are "
             "real, and so is their memory. Nothing travels between GPUs, so there is no loss and "
             "no speed to report.",
    "predicted": "Predicted only: this machine has no GPU."}
PARTS = {"computing": "computing", "exposed": "exposed communication", "optimizer": "optimizer",
         "host": "host"}


@shows("A billion parameters")
def node_table(run: NodeRun) -> Table:
    """Returns every row: its model, its peak, and a step's milliseconds in parts, each predicted
    and, on GPUs, measured."""
    head = ("", "billion", "GPUs", "tokens each", "GB, predicted", "GB, measured",
            *PARTS.values(), "ms, predicted", "ms, measured", "efficiency", "lost to")
    rows = [_cells(run, row) for row in run.rows]
    shown = [place for place, name in enumerate(head)
             if run.source != "predicted" or not name.endswith("measured")]
    return Table(f"On {run.card.name} with {run.card.usable / GB:.1f} GB: {_model(run)}",
                 tuple(head[place] for place in shown),
                 [tuple(row[place] for place in shown) for row in rows],
                 note=" ".join([_source(run), _offload(run), _assumed(run)]))


def _model(run) -> str:
    larger = next(row.job for row in run.rows if row.job.name.startswith("larger"))
    return (f"a GPT-2 with {run.rows[0].job.parameters / 1e9:.2f} billion parameters, and one with "
            f"{larger.parameters / 1e9:.2f}, whose states alone take "
            f"{16 * larger.parameters / GB:.0f} GB under DDP")


def _cells(run, row) -> tuple[str, ...]:
    size, share = row.job.size, efficiency(run, row)
    return (row.job.name, f"{row.job.parameters / 1e9:.2f}", str(size.ranks),
            f"{size.batch} × {size.context:,}", f"{row.peak.total / GB:.1f}", _peak(row),
            *(f"{1e3 * row.step.by_name()[name]:,.0f}" for name in PARTS),
            f"{1e3 * row.seconds:,.0f} ± {1e3 * HELD_OUT_ERROR * row.seconds:,.0f}",
            _measured_ms(row), f"{share:.0%}" if share is not None else "–", lost_to(run, row))


def _measured_ms(row) -> str:
    seconds = row.measured.seconds if row.measured else []
    return (f"{1e3 * statistics.median(seconds):,.0f} ({1e3 * min(seconds):,.0f} to "
            f"{1e3 * max(seconds):,.0f})" if seconds else "–")


def _peak(row) -> str:
    if row.measured is None:
        return "–"
    return row.measured.failure or f"{row.measured.peak / GB:.1f}"


def measured_rate(row: Row) -> float | None:
    """Tokens per second of all ranks together: the median step; None where none was timed."""
    if row.measured is None or not row.measured.seconds:
        return None
    return row.job.size.tokens / statistics.median(row.measured.seconds)


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


def lost_to(run: NodeRun, row: Row) -> str:
    """The part of the predicted step that grew most from the fewest GPUs to this row's: what its
    efficiency is limited by. Each GPU has as many tokens in both."""
    if row not in run.scaling:
        return ""
    base = next(one for one in run.scaling if one.job.size.ranks == base_of(run))
    more = {name: seconds - base.step.by_name()[name]
            for name, seconds in row.step.by_name().items()}
    most = max(more, key=more.get)
    return f"{PARTS[most]}, {1e3 * more[most]:,.0f} ms" if more[most] > 0 else "–"


def base_of(run: NodeRun) -> int:
    """Returns the fewest GPUs whose speed is known for the job of the scaling rows."""
    return next((row.job.size.ranks for row in run.scaling if _rate(run, row)), 1)


def _source(run) -> str:
    return SOURCES[run.source].format(ranks=counted(run.ranks, "GPU"))


def _offload(run) -> str:
    """The price of CPU offload: pinned memory, bytes over PCIe, and time."""
    without, row = _offloaded(run)
    words = (f"CPU offload copies {row.step.copied / GB:.1f} GB over PCIe in each step and rank")
    found = row.measured
    if found and found.peak:
        words += (f" by formula, {found.copied / GB:.1f} measured, with {found.pinned / GB:.1f} GB "
                  "of pinned memory")
    rates = [_rate(run, one) for one in (row, without)]
    if all(rates):
        words += f", and reaches {rates[0] / rates[1]:.0%} of the tokens/s of the row above"
    return f"{words}."


def _offloaded(run) -> tuple[Row, Row]:
    place = next(place for place, row in enumerate(run.rows) if row.job.offload)
    return run.rows[place - 1], run.rows[place]


def _assumed(run) -> str:
    base = base_of(run)
    return ("The four parts are milliseconds of a step, by 06's model of step time; products of "
            "fp32 are in TF32. Exposed: what computing does not hide of communication, and by how "
            "much it is slowed down. ±: nine of ten published runs lie within "
            f"{HELD_OUT_ERROR:.0%} of what that model says without knowing them; none of them "
            "offloads. Efficiency: tokens/s on N GPUs over "
            f"N{f'/{base}' * (base > 1)} times those on {counted(base, 'GPU')}.")


@shows("A billion parameters")
def node_chart(run: NodeRun) -> Picture:
    """Draws each row's peak against the card, the parts of its step, and the efficiency of those
    that scale."""
    rows = run.rows
    failed = tuple(place for place, row in enumerate(rows) if _out_of_memory(run, row))
    measured = [row.measured and row.measured.peak for row in rows]
    pale = tuple(place for place, peak in enumerate(measured) if not peak)
    peak = Panel("peak of a rank", "GB", [peak or row.peak for peak, row in
                                          zip(measured, rows, strict=True)], GB,
                 [None if place in pale else row.peak.total for place, row in enumerate(rows)],
                 limit=run.card.usable, out_of_memory=failed, pale=pale)
    shares = [efficiency(run, row) for row in rows]
    panels = [peak, step_panel(rows, 1e-15, "ms per 1,000 tokens and 10⁹ Ψ"),
              Panel("efficiency", f"% of N × {counted(base_of(run), 'GPU')}", shares, 0.01,
                    missing="",
                    pale=tuple(range(len(rows))) * (run.source == "predicted"))]
    return side_by_side([row.job.name for row in rows], panels,
                        below(f"{_model(run)}. {_source(run)}".replace("a GPT", "A GPT", 1)))


def step_panel(rows: list[Row], size: float, unit: str) -> Panel:
    """The seconds of a step over its rank's tokens and its model's parameters: measured with the
    prediction as a tick, or the prediction's parts where none was timed; either with the
    prediction's uncertainty. size: of one unit."""
    work = [row.job.size.batch * row.job.size.context * row.job.parameters for row in rows]
    timed = [statistics.median(row.measured.seconds) if row.measured and row.measured.seconds
             else None for row in rows]
    pale = tuple(place for place, seconds in enumerate(timed) if seconds is None)
    panel = Panel("a step", unit, [
        {name: part / n for name, part in row.step.by_name().items()} if seconds is None
        else seconds / n for seconds, row, n in zip(timed, rows, work, strict=True)], size,
        [None if seconds is None else row.seconds / n
         for seconds, row, n in zip(timed, rows, work, strict=True)], pale=pale)
    return replace(panel, whiskers=[
        tuple(row.seconds * (1 + sign * HELD_OUT_ERROR) / n for sign in (-1, 1))
        for row, n in zip(rows, work, strict=True)])


def _out_of_memory(run, row) -> bool:
    if row.measured:
        return row.measured.failure == "out of memory"
    return row.peak.total > run.card.usable

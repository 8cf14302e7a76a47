"""The table and the chart of the billion-parameter lab: predicted beside measured."""

import statistics
from dataclasses import replace

from labs.exercises.gpu_notes import below
from labs.exercises.verdicts import shows
from labs.fsdp.node.jobs import UTILISATION, copied
from labs.fsdp.node.running import NodeRun, Row
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.training.memory_categories import GB
from labs.words import counted

SOURCES = {
    "measured": "Measured on {ranks}.",
    "alone": "Measured on one GPU, as rank 0 of each job in a fake process group: its tensors are "
             "real, and so is their memory. Nothing travels between GPUs, so there is no loss and "
             "no speed to report.",
    "predicted": "Predicted only: this machine has no GPU."}


@shows("A billion parameters")
def node_table(run: NodeRun) -> Table:
    """Returns every row: its model, peak and throughput, each predicted and measured."""
    head = ("", "billion", "GPUs", "tokens each", "GB, predicted", "GB, measured",
            "tokens/s, predicted", "tokens/s, measured", "spread", "efficiency")
    return Table(f"On {run.card.name} with {run.card.usable / GB:.1f} GB: {_model(run)}", head,
                 [_cells(run, row) for row in run.rows],
                 note=" ".join(filter(None, [_source(run), _offload(run), _assumed(run)])))


def _model(run) -> str:
    larger = next(row.job for row in run.rows if row.job.name.startswith("larger"))
    return (f"a GPT-2 with {run.rows[0].job.parameters / 1e9:.2f} billion parameters, and one with "
            f"{larger.parameters / 1e9:.2f}, whose states alone take "
            f"{16 * larger.parameters / GB:.0f} GB under DDP")


def _cells(run, row) -> tuple[str, ...]:
    size, seconds = row.job.size, row.measured.seconds if row.measured else []
    spread = (f"{1e3 * min(seconds):,.0f} to {1e3 * max(seconds):,.0f} ms" if seconds else "–")
    share = efficiency(run, row)
    return (row.job.name, f"{row.job.parameters / 1e9:.2f}", str(size.ranks),
            f"{size.batch} × {size.context:,}", f"{row.peak.total / GB:.1f}", _peak(row),
            f"{size.tokens / row.seconds:,.0f}",
            f"{measured_rate(row):,.0f}" if seconds else "–", spread,
            f"{share:.0%}" if share is not None else "–")


def _peak(row) -> str:
    if row.measured is None:
        return "–"
    return row.measured.failure or f"{row.measured.peak / GB:.1f}"


def measured_rate(row: Row) -> float | None:
    """Tokens per second of all ranks together: the median step; None where none was timed."""
    if row.measured is None or not row.measured.seconds:
        return None
    return row.job.size.tokens / statistics.median(row.measured.seconds)


def efficiency(run: NodeRun, row: Row) -> float | None:
    """Throughput on N GPUs over N times that on the fewest that ran the job, per GPU: measured,
    or predicted where nothing runs here."""
    def rate(one):
        return (one.job.size.tokens / one.seconds if run.source == "predicted"
                else measured_rate(one))

    ran = [one for one in run.scaling if rate(one)]
    if row not in run.scaling or not ran or not rate(row):
        return None
    return rate(row) / row.job.size.ranks / (rate(ran[0]) / ran[0].job.size.ranks)


def base_of(run: NodeRun) -> int:
    """Returns the fewest GPUs that ran the job of the scaling rows; 1 where nothing was timed."""
    return next((row.job.size.ranks for row in run.scaling if measured_rate(row)), 1)


def _source(run) -> str:
    return SOURCES[run.source].format(ranks=counted(run.ranks, "GPU"))


def _offload(run) -> str:
    """The price of CPU offload: pinned memory, bytes over PCIe, and tokens per second."""
    without, row = _offloaded(run)
    words = f"CPU offload copies {copied(row.job) / GB:.1f} GB over PCIe in each step and rank"
    found = row.measured
    if found and found.peak:
        words += (f" by formula, {found.copied / GB:.1f} measured, with {found.pinned / GB:.1f} GB "
                  "of pinned memory")
    rates = [measured_rate(one) for one in (row, without)]
    if all(rates):
        words += f", and reaches {rates[0] / rates[1]:.0%} of the tokens/s of the row above"
    return f"{words}."


def _offloaded(run) -> tuple[Row, Row]:
    place = next(place for place, row in enumerate(run.rows) if row.job.offload)
    return run.rows[place - 1], run.rows[place]


def _assumed(run) -> str:
    base = base_of(run)
    return (f"Predicted speed: {UTILISATION:.0%} of the card's peak, TF32 or bf16, or what its "
            "links carry; the optimizer's time is left out. Efficiency: tokens/s on N GPUs over "
            f"N{f'/{base}' * (base > 1)} times those on {counted(base, 'GPU')}.")


@shows("A billion parameters")
def node_chart(run: NodeRun) -> Picture:
    """Draws each row's peak against the card, its speed, and the efficiency of those that scale."""
    rows = run.rows
    failed = tuple(place for place, row in enumerate(rows) if _out_of_memory(run, row))
    measured = [row.measured and row.measured.peak for row in rows]
    pale = tuple(place for place, peak in enumerate(measured) if not peak)
    rates = [measured_rate(row) for row in rows]
    predicted = [row.job.size.tokens / row.seconds / row.job.size.ranks for row in rows]
    speed = Panel("speed", "thousand tokens/s, each GPU",
                  [rate and rate / row.job.size.ranks
                   for rate, row in zip(rates, rows, strict=True)], 1e3, predicted)
    shares = [efficiency(run, row) for row in rows]
    panels = [
        Panel("peak of a rank", "GB", [peak or row.peak for peak, row in
                                       zip(measured, rows, strict=True)], GB,
              [None if place in pale else row.peak.total for place, row in enumerate(rows)],
              limit=run.card.usable, out_of_memory=failed, pale=pale),
        speed if any(rates) else replace(speed, values=predicted, predicted=(),
                                         pale=tuple(range(len(rows)))),
        Panel("efficiency", f"% of N × {counted(base_of(run), 'GPU')}", shares, 0.01,
              pale=tuple(range(len(rows))) * (run.source == "predicted"))]
    return side_by_side([row.job.name for row in rows], panels,
                        below(f"{_model(run)}. {_source(run)}".replace("a GPT", "A GPT", 1)))


def _out_of_memory(run, row) -> bool:
    if row.measured:
        return row.measured.failure == "out of memory"
    return row.peak.total > run.card.usable

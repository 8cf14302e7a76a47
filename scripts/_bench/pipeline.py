"""The pipeline simulation, and the textbook's formulas, against published bubble rates."""

from labs.predictions.pipelines.formulas import INTERLEAVED, KINDS
from labs.predictions.pipelines.published_bubbles import (
    PublishedBubble,
    RowsError,
    load_published_bubbles,
)
from labs.predictions.pipelines.schedule import Action
from labs.predictions.pipelines.simulate import CLUSTER, PAPERS_CLOCK, simulate

CLOCK = (f"{PAPERS_CLOCK}: the longest span of one rank, from its own first begin to its own last "
         "end, as in the Zero Bubble paper (arXiv 2401.10241)")
PAPERS_RULE = ("1F1B-I with the wait that the paper's authors evaluated: of p micro-batches, only "
               "the first waits for the transfer from a rank's chunk to its next one")


def run(arguments) -> dict:
    """clock: which one the rates are of; rows: predicted, published and error of each, and what the
    textbook's formula says; summary: errors by schedule."""
    try:
        rows = list(map(_row, load_published_bubbles(*filter(None, [arguments.rows]))))
    except RowsError as error:
        raise SystemExit(f"scripts/bench pipeline: {error}") from None
    return {"clock": CLOCK, "papers_rule": PAPERS_RULE, "rows": rows, "summary": _summary(rows)}


def _row(row: PublishedBubble) -> dict:
    sizes = row.ranks, row.micro_batches, row.chunks
    schedule, times = row.kind.build(*sizes), row.times.chunked(row.chunks)
    timeline = simulate(schedule, times)
    predicted = {"predicted": timeline.bubble(PAPERS_CLOCK),
                 "textbook": row.kind.bubble(*sizes, row.times)}
    if row.kind is INTERLEAVED:
        by_rule = simulate(schedule, times, waits=lambda action: _waits_in_paper(schedule, action))
        predicted["papers_rule"] = by_rule.bubble(PAPERS_CLOCK)
    errors = {} if row.bubble is None else {
        "error" if name == "predicted" else f"{name}_error": share - row.bubble
        for name, share in predicted.items()}
    return {"id": row.id, "schedule": row.kind.name, "p": row.ranks, "m": row.micro_batches,
            "virtual_stages": row.chunks, "T_F": row.times.F, "T_B": row.times.B,
            "T_W": row.times.W, "T_comm": row.times.transfer, "published": row.bubble, **predicted,
            **errors, "predicted_cluster_clock": timeline.bubble(CLUSTER),
            "peak_in_flight": timeline.peaks()}


def _waits_in_paper(schedule, action: Action) -> bool:
    """Whether the paper's evaluation lets the action wait for what it receives: on the way from the
    last rank's chunk to rank 0's next one, and back, only the first of p micro-batches does (the
    script of its repository, sail-sg/zero-bubble-pipeline-parallelism, that computes 1F1B-I)."""
    ranks = len(schedule.ranks)
    entry = {"F": 0, "B": ranks - 1}.get(action.kind)
    return schedule.rank_of(action.stage) != entry or action.micro_batch % ranks == 0


def _summary(rows) -> dict[str, dict]:
    """Schedule -> how many rates are published, and the largest errors, without sign."""
    found = {}
    for name in KINDS:
        own = [row for row in rows if row["schedule"] == name and row["published"] is not None]
        if own:
            found[name] = {"rows": len(own)} | {
                f"worst_{key}": max(abs(row[key]) for row in own)
                for key in ("error", "textbook_error", "papers_rule_error") if key in own[0]}
    return found


def table(result) -> str:
    """The result for a terminal."""
    lines = [f"bubble as a share of the step; clock {result['clock']}", "",
             f"{'row':10s} {'schedule':8s} {'p':>3} {'m':>4} {'v':>2} {'predicted':>10} "
             f"{'published':>10} {'error':>8} {'textbook':>9} {'error':>8}"]
    lines += [f"{row['id']:10.10s} {row['schedule']:8s} {row['p']:>3} {row['m']:>4} "
              f"{row['virtual_stages']:>2} {row['predicted']:>10.4f} {_share(row['published'])} "
              f"{_error(row, 'error')} {row['textbook']:>9.4f} {_error(row, 'textbook_error')}"
              for row in result["rows"]]
    lines += ["", "largest error, without sign"]
    lines += [f"{name:10s} {found['rows']:>3} rates: {found['worst_error']:.4f}; the textbook's "
              f"formula {found['worst_textbook_error']:.4f}"
              + (f"; by the paper's rule {found['worst_papers_rule_error']:.4f}"
                 if "worst_papers_rule_error" in found else "")
              for name, found in result["summary"].items()]
    if "1F1B-I" in result["summary"]:
        lines += ["", f"the paper's rule: {result['papers_rule']}"]
    return "\n".join(lines)


def _share(published) -> str:
    return f"{'-':>10}" if published is None else f"{published:>10.4f}"


def _error(row, name) -> str:
    return f"{row[name]:>+8.4f}" if name in row else f"{'-':>8}"

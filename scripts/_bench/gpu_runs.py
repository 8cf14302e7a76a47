"""The planner against public runs on real GPUs: seconds, memory, what fits, what is chosen."""

from _bench import gpu_runs_peers
from labs.predictions.gpu_runs.folder import ROWS, FolderError, load
from labs.predictions.gpu_runs.scoreboard import (
    CALIBRATED,
    HELD_OUT,
    OURS,
    Scoreboard,
    compare,
)


def run(arguments) -> dict:
    """groups: scores by kind of row; rows: each one's prediction; fit, choices and refused;
    estimators: how many rows each answers; not_installed: module -> how to install it."""
    folder = arguments.rows or ROWS
    try:
        board = compare(load(folder), extra=gpu_runs_peers.installed(),
                        with_held_out=arguments.held_out)
    except FolderError as error:
        raise SystemExit(f"scripts/bench gpu-runs: {error}") from None
    return result(board) | {"folder": str(folder), "not_installed": gpu_runs_peers.missing()}


def result(board: Scoreboard) -> dict:
    """The scoreboard as JSON has it."""
    return {
        "groups": [{"quantity": quantity, "group": group,
                    "scores": {name: vars(score)
                               for name, score in board.scores(quantity, group).items()}}
                   for quantity, group in board.groups()],
        "fit": board.fit, "refused": board.refused,
        "choices": [{"model": model, "gpus": gpus, "of_best": share}
                    for (model, gpus), share in board.choices.items()],
        "estimators": [_answers(board, estimator) for estimator in board.estimators],
        "rows": [{"id": row.run.id, "source": row.run.source, "quantity": row.quantity,
                  "group": row.group, "measured": row.measured, "predicted": row.predicted[OURS],
                  "calibrated": row.predicted.get(CALIBRATED),
                  "held_out": row.predicted.get(HELD_OUT), "low": row.low, "high": row.high}
                 for row in board.rows]}


def _answers(board, estimator) -> dict:
    answered, refused = board.answered(estimator)
    return {"quantity": estimator.quantity, "name": estimator.name, "answered": answered,
            "refused": refused, "refuses": estimator.refuses}


def table(result) -> str:
    """The result for a terminal."""
    lines = []
    for quantity in ("seconds", "memory"):
        lines += [f"{quantity + ', rows of':38s} {'estimator':26s} {'rows':>5} {'median':>7} "
                  f"{'bias':>7} {'90 %':>6} {'worst':>7} {'refused':>8} {'held by 80 %':>13}"]
        for group in result["groups"]:
            if group["quantity"] == quantity:
                lines += _lines(group)
        lines.append("")
    lines += ["runs that each estimator answers, and those that it does not claim to know:"]
    lines += [f"  {one['quantity']:8s} {one['name']:28s} {one['answered']:>6,} answered "
              f"{one['refused']:>6,} refused" + f": {one['refuses']}" * bool(one["refused"])
              for one in result["estimators"]]
    lines += [f"  {module} is not installed here: {command}"
              for module, command in result.get("not_installed", {}).items()]
    fit = result["fit"]
    total = sum(fit.values()) or 1
    right = fit["ran, said to fit"] + fit["failed, said not to fit"]
    lines += [f"does it fit: right for {right / total:.1%} of {total:,} rows; of those that ran "
              f"{_share(fit, 'ran', 'said to fit')} are said to, of those that failed "
              f"{_share(fit, 'failed', 'said not to fit')} are said not to"]
    for title, low, high in (("up to 64", 0, 64), ("more", 65, 10**9)):
        shares = [one["of_best"] for one in result["choices"] if low <= one["gpus"] <= high]
        if shares:
            lines.append(f"the plan that is chosen, of those measured, on {title} GPUs: "
                         f"{sum(shares) / len(shares):.0%} of the fastest's speed (mean of "
                         f"{len(shares)}; least {min(shares):.0%})")
    refused = sum(result["refused"].values())
    lines.append(f"{refused:,} rows cannot be asked:")
    lines += [f"  {count:5d}  {reason}" for reason, count in sorted(
        result["refused"].items(), key=lambda one: -one[1])]
    return "\n".join(lines)


def _lines(group) -> list[str]:
    found, name = [], group["group"]
    for estimator, score in group["scores"].items():
        held = "" if score["held"] is None else f"{score['held']:.0%}"
        found.append(f"{name:38.38s} {estimator:26s} {score['rows']:>5} {score['median']:>6.1f}% "
                     f"{score['bias']:>+6.1f}% {score['nine_of_ten']:>5.0f}% "
                     f"{score['worst']:>+6.0f}% {score['refused']:>8} {held:>13}")
        name = ""
    return found


def _share(fit, what, said) -> str:
    of = [count for key, count in fit.items() if key.startswith(what)]
    return f"{fit[f'{what}, {said}'] / sum(of):.1%}" if sum(of) else "–"

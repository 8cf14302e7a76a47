"""Exercise 7.23: one Llama on 2 × 2 × 2 ranks, equal to one process."""

from collections.abc import Callable
from statistics import fmean

from labs.checks.guesses import guessed
from labs.checks.on_ranks import largest_difference
from labs.checks.tolerances import LOSS, SUMS
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pipeline_parallel.mesh import COLOURS
from labs.pipeline_parallel.three_dimensional_training import (
    NAMES,
    SIZES,
    STEPS,
    RankRun,
    group_of,
    small_llama,
    train_alone,
    train_in_three_dimensions,
)
from labs.predictions.communication.traffic import passes
from labs.words import counted

# What each dimension does in a step, and what is missing where it does not.
_DONE_BY = {
    "tensor": (("all_reduce", "reduce_scatter"), "adds up the parts of a layer's output"),
    "pipeline": (("send",), "hands hidden states and gradients on"),
    "data": (("reduce_scatter",), "averages the gradients of the replicas")}
_ORDER = "parallelize_module comes first, fully_shard after it."


@check("7.23", hints={
    "Tensor parallel and FSDP2": _ORDER, "Please use fully_shard": _ORDER,
    "Cannot distribute a DTensor": _ORDER,
    "Sharding propagation failed": "After a column-parallel module each rank has a part of the "
    "output only; o_proj and down_proj take such a part, so they are row-parallel.",
    "expects a 1D or 2D DeviceMesh": "Give each call its dimension: mesh[\"tensor\"] or "
    "mesh[\"data\"]."})
def check_three_dimensions(parallelize: Callable):
    """parallelize(stage, mesh) -> the stage, its layers cut over mesh["tensor"], all of its
    parameters sharded over mesh["data"]."""
    runs = train_in_three_dimensions(parallelize)
    for rank, run in enumerate(runs):
        _judge_groups(rank, run)
    losses, parameters = train_alone()
    _judge_losses(runs, losses)
    difference = _judge_parameters(runs, parameters)
    whole = sum(p.numel() for p in parameters.values())
    return (f"8 ranks as 2 × 2 × 2 train as one process does over {STEPS} steps (to "
            f"{difference:.0e}), and a rank keeps {max(run.held for run in runs) / whole:.1%} of "
            "the parameters")


def _judge_groups(rank, run: RankRun):
    used = {name: {call.kind for call in run.calls if group_of(call) == name} for name in NAMES}
    for name, (kinds, what) in _DONE_BY.items():
        if not used[name] & set(kinds):
            raise Wrong(f"rank {rank}: no {' or '.join(kinds).replace('_', '-')} in its {name} "
                        f"group, which {what}; it has "
                        f"{', '.join(sorted(used[name])).replace('_', '-') or 'no collective'}",
                        code="missing_collective")
    # The invariant: every collective is within a group of one dimension. One over all 8 ranks would
    # average the gradients of different layers or of different shards.
    others = [call for call in run.calls if not group_of(call)]
    if others:
        raise Wrong(f"rank {rank}: {others[0].kind.replace('_', '-')} of {others[0].bytes:,} bytes "
                    f"over ranks {list(others[0].members)}, which are no group of one dimension",
                    "Give each call its dimension: mesh[\"tensor\"] or mesh[\"data\"].",
                    code="wrong_group")


def _judge_losses(runs, losses):
    last = [run for run in runs if run.coordinates[1] == 1]
    for step, want in enumerate(losses):
        # The ranks of a tensor-parallel group compute one loss together. Replicas have different
        # samples, so the mean over them is the reference's.
        for replica in (0, 1):
            ones = [run.losses[step] for run in last if run.coordinates[0] == replica]
            # The last stage of a replica is on two ranks, its tensor-parallel group.
            if abs(ones[0] - ones[1]) > SUMS * want:
                raise Wrong(f"step {step}: the two tensor-parallel ranks of replica {replica} have "
                            f"losses {ones[0]:.6g} and {ones[1]:.6g}, but they compute one",
                            "Is the plan's mesh mesh[\"tensor\"]?", code="losses_differ")
        got = fmean(run.losses[step] for run in last)
        if abs(got - want) > LOSS * want:
            # Step 0 is computed with the initial parameters, so it shows no wrong update.
            hint = ("The parameters are still the initial ones, so forward is wrong." if not step
                    else "The update is wrong, or forward does not see it. Are the gradients "
                    "averaged over mesh[\"data\"]? Parameters that stay gathered after backward "
                    "are stale after optimizer.step(): reshard() each unit before it, or let FSDP "
                    "reshard.")
            raise Wrong(f"step {step}: the mean loss of the replicas is {got:.6g}, the reference's "
                        f"{want:.6g}", hint, code="wrong_loss")


def _judge_parameters(runs, reference) -> float:
    # The invariant: data and tensor parallelism divide sums and batches, the pipeline divides
    # layers; the parameters after the last step are those of one process.
    found = {name: tensor for run in runs for name, tensor in run.parameters.items()}
    if missing := sorted(set(reference) - set(found)):
        raise Wrong(f"no rank has {missing[0]}", code="missing_parameter")
    worst = 0.0
    for name, want in reference.items():
        if found[name].shape != want.shape:
            raise Wrong(f"parameter {name!r} has shape {list(found[name].shape)} when it is "
                        f"gathered, the reference's has {list(want.shape)}",
                        "parallelize_module and fully_shard keep each parameter's full shape.",
                        code="wrong_shape")
        difference = largest_difference(found[name], want)
        if difference > SUMS:
            raise Wrong(f"parameter {name!r} after step {STEPS - 1}: off by up to "
                        f"{difference:.2g} from the reference's", code="differs_from_reference")
        worst = max(worst, difference)
    return worst


@shows("7.23")
def show_three_dimensions(parallelize: Callable) -> Picture:
    """Trains two steps on eight ranks and draws the bytes that a rank sends in each dimension in
    the second, and the share of the parameters that it keeps: one row for all ranks, because they
    are alike; where they are not, the longest bar and the range."""
    runs = train_in_three_dimensions(parallelize, steps=2)
    whole = sum(p.numel() for p in small_llama().parameters())
    guess = guessed("7.23")
    figure, (sent, held) = canvas(
        WIDTH, 2.6 + marks.HEADLINE + marks.NOTE_LINE * (guess is not None), ncols=2,
        gridspec_kw={"width_ratios": [1.6, 1]})
    names = list(reversed(NAMES))
    for row, name in enumerate(names):
        sizes = [sent_bytes(run, name) / 1e6 for run in runs]
        sent.barh(row, max(sizes), marks.BAR, color=COLOURS[name])
        sent.text(max(sizes), row, f" {_range(sizes, '.2f')} MB in {calls_in(runs[0], name)}",
                  va="center", fontsize=9)
    shares = [100 * run.held / whole for run in runs]
    held.barh(0, max(shares), marks.BAR, color=palette.MEMORY["parameters"])
    # On paper: a guess that is slightly too high would be a line through the label.
    held.text(max(shares), 0, f" {_range(shares, '.1f')} %", va="center", fontsize=9,
              **marks.ON_PAPER)
    lines = [held.axvline(100 / len(runs), color=palette.PREDICTED, linewidth=1,
                          label="one eighth")]
    if guess is not None:
        lines.append(held.axvline(guess, color=palette.GUESSED, linestyle=(0, (3, 2)),
                                  label="your guess"))
    marks.name_rows(sent, names)
    marks.name_rows(held, [f"each of {len(runs)} ranks"])
    sent.set_xlabel(f"MB that each of {len(runs)} ranks sends in a step")
    held.set_xlabel("% of the parameters that it keeps")
    most = max(NAMES, key=lambda name: max(sent_bytes(run, name) for run in runs))
    lesson = f"Most is sent in the {most} group; a rank keeps {_range(shares, '.1f')} % of the " \
             "parameters"
    answer = marks.answered(guess, max(shares), "%")
    marks.headline(figure, lesson)
    marks.note_below(figure, answer)
    sent.margins(x=0.5)
    held.margins(x=0.3)
    marks.legend_above(figure, lines)
    words = [f"rank {rank} {run.coordinates}: sends " + ", ".join(
        f"{sent_bytes(run, name) / 1e6:.2f} MB in its {name} group" for name in names)
        + f"; keeps {share:.1f} % of the parameters"
        for rank, (run, share) in enumerate(zip(runs, shares, strict=True))]
    metrics = [Metric("rank 0: share of the parameters", runs[0].held / whole, ""),
               *(Metric(f"rank 0: sent in its {name} group", sent_bytes(runs[0], name) / 1e6, "MB")
                 for name in NAMES)]
    return Picture(figure, "\n".join([lesson, *words, *filter(None, [answer])]),
                   data=(runs, guess), metrics=metrics)


def _range(values, form) -> str:
    """One number, or the smallest and the largest where they differ as printed."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def sent_bytes(run: RankRun, name: str) -> float:
    """Bytes that a rank sends in the groups of a dimension, by ring algorithms."""
    size = SIZES[NAMES.index(name)]
    calls = [call for call in run.calls if group_of(call) == name and call.kind != "recv"]
    return sum(call.bytes if call.kind == "send" else
               passes(call.kind) * (size - 1) / size * call.bytes for call in calls)


def calls_in(run: RankRun, name: str) -> str:
    """How many collectives a rank issued in a dimension, or messages it sent, in words."""
    # Received messages are left out, as they are of the bytes.
    calls = [call for call in run.calls if group_of(call) == name and call.kind != "recv"]
    return counted(len(calls), "message" if name == "pipeline" else "collective")

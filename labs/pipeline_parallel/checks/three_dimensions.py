"""Exercise 7.23: one Llama on 2 × 2 × 2 ranks, equal to one process."""

from collections.abc import Callable
from statistics import fmean

from labs.exercises.on_ranks import TOLERANCE, largest_difference
from labs.exercises.verdicts import Wrong, check
from labs.pipeline_parallel.dimensions.training import (
    NAMES,
    STEPS,
    RankRun,
    group_of,
    train_alone,
    train_in_three_dimensions,
)

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
            if abs(ones[0] - ones[1]) > TOLERANCE * want:
                raise Wrong(f"step {step}: the two tensor-parallel ranks of replica {replica} have "
                            f"losses {ones[0]:.6g} and {ones[1]:.6g}, but they compute one",
                            "Is the plan's mesh mesh[\"tensor\"]?", code="losses_differ")
        got = fmean(run.losses[step] for run in last)
        if abs(got - want) > 10 * TOLERANCE * want:
            raise Wrong(f"step {step}: the mean loss of the replicas is {got:.6g}, the reference's "
                        f"{want:.6g}", "Before the first step, forward is wrong. After it, the "
                        "gradients are: are they averaged over mesh[\"data\"]?" if not step else
                        "Are the gradients averaged over mesh[\"data\"]?", code="wrong_loss")


def _judge_parameters(runs, reference) -> float:
    found = {name: tensor for run in runs for name, tensor in run.parameters.items()}
    if missing := sorted(set(reference) - set(found)):
        raise Wrong(f"no rank has {missing[0]}", code="missing_parameter")
    worst = 0.0
    for name, want in reference.items():
        if found[name].shape != want.shape:
            raise Wrong(f"parameter {name!r} has shape {list(found[name].shape)} when it is "
                        f"gathered, the reference's has {list(want.shape)}",
                        "parallelize_module and fully_shard keep each parameter's whole shape.",
                        code="wrong_shape")
        difference = largest_difference(found[name], want)
        if difference > TOLERANCE:
            raise Wrong(f"parameter {name!r} after step {STEPS - 1}: off by up to "
                        f"{difference:.2g} from the reference's", code="differs_from_reference")
        worst = max(worst, difference)
    return worst

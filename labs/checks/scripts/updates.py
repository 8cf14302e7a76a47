"""Gradients, losses, learning rates and parameters of a script against the reference's."""

import math
from functools import partial

import torch

from labs.checks.scripts.expected_training import CONTEXT, train_on
from labs.checks.scripts.forked import Run
from labs.checks.verdicts import Wrong
from labs.training import models
from labs.words import format_distinct
from labs.workers.launcher import launch

LOSS = 2e-4  # relative: float32 sums in another order, over some steps of AdamW
GRADIENT = 1e-3  # of a gradient's norm
# Of the way from the first to the last parameters. AdamW divides by a gradient's own size, so that
# rounding moves parameters whose true gradient is zero.
WAY = 0.05
UNIT = 1.1  # of a unit's bytes: its shards are padded to equal sizes
_EVERY_STEP = "The gradients of every step are averaged, and set to zero after it."
_NOT_SCALED = "The optimizer steps with what backward has left: nothing clips or scales it before."


Drawn = list[list[torch.Tensor]]  # [step][rank]: tokens, (samples, CONTEXT)


def drawn_by(run: Run) -> Drawn:
    """What the ranks have drawn for each step."""
    return [[torch.cat([batch.rows for batch in record.steps[step].batches])
             for record in run.records] for step in range(len(run.records[0].steps))]


def judge(run: Run, when: str, numbers: dict[str, int], strategy: str = "ddp",
          falling: bool = True, before: Drawn | None = None) -> None:
    """Raises Wrong unless the ranks have trained as one process does on all they drew. numbers:
    "layers", "hidden" and "seed" of the model. falling: whether the learning rate falls to 0.
    before: what a run drew with whose parameters and moments this one continued."""
    make_model = partial(models.gpt2, numbers["layers"], numbers["hidden"], context=CONTEXT,
                         seed=numbers["seed"])
    before = before or []
    [expected] = launch(train_on, before + drawn_by(run), make_model, falling, len(before),
                        ranks=1, quiet=True)
    # In the order in which a mistake shows: another model differs before the first step, a wrong
    # gradient in it, a wrong schedule or a missing zero_grad after it, a missing last update at the
    # end.
    _judge_start(run, when, expected)
    _judge_gradients(run, when, expected)
    _judge_rates(run, when, expected)
    _judge_losses(run, when, expected)
    _judge_parameters(run, when, expected)
    if strategy == "fsdp":
        _judge_units(run, when, expected)


def _judge_units(run, when, expected):
    """With FSDP a rank holds shards, and gathers one unit at a time: a block, or the rest."""
    wrap = ("options.strategy says which wrapper: fully_shard(block) for each of "
            "models.blocks(model), then fully_shard(model).")
    if not all(record.sharded for record in run.records):
        raise Wrong(f"{when}: each rank holds all parameters whole", wrap, code="not_sharded")
    for rank, record in enumerate(run.records):
        # Invariant: a rank gathers one block at a time. Catches fully_shard of the model alone,
        # which gathers everything at once and saves no memory at the peak.
        largest = max((nbytes for nbytes, _ in record.gathered), default=0)
        if largest > UNIT * expected.largest_unit:
            raise Wrong(f"{when}: rank {rank} gathers {largest:,} bytes of parameters at once; a "
                        "block, or what is in no block, has at most "
                        f"{expected.largest_unit:,}", wrap, code="one_unit")


def losses(record, step) -> float | None:
    """The mean loss of what a rank trained on in a step, None where the model computed none."""
    batches = record.steps[step].batches
    if any(batch.loss is None for batch in batches):
        return None
    return sum(batch.loss * len(batch.rows) for batch in batches) / sum(
        len(batch.rows) for batch in batches)


def mean_loss(run: Run, step: int) -> tuple[float, int]:
    """(mean loss over all ranks' sequences, their number) of a step; NaN without losses."""
    sizes = [sum(len(batch.rows) for batch in record.steps[step].batches)
             for record in run.records]
    found = [losses(record, step) for record in run.records]
    if None in found:
        return math.nan, sum(sizes)
    return sum(loss * size for loss, size in zip(found, sizes, strict=True)) / sum(sizes), sum(
        sizes)


def far(got, want, tolerance=LOSS) -> bool:
    return not abs(got - want) <= tolerance * max(1.0, abs(want))


def _judge_start(run, when, expected):
    """The model is drawn from the same seed on all ranks; DDP would send rank 0's otherwise."""
    for rank, record in enumerate(run.records):
        # Invariant: one seed draws the same model on every rank. DDP broadcasts rank 0's parameters
        # and would hide it; FSDP2 shards what each rank has.
        found = losses(record, 0)
        if found is not None and far(found, expected.losses[0][rank]):
            is_, should_be = format_distinct(found, expected.losses[0][rank], digits=5)
            raise Wrong(f"{when}: rank {rank} begins with a loss of {is_}, the reference, on the "
                        f"same samples, with {should_be}: the model is another one",
                        "options.seed draws the model, on each rank the same one.",
                        code="other_model")


def _judge_gradients(run, when, expected):
    for rank in range(run.ranks):
        want = expected.gradients[0]
        found = _whole([each.steps[0].gradients for each in run.records], rank, want)
        if found is None or not _differs(found, want):
            continue
        who = f"{when}: rank {rank}, first step: the gradients are"
        # Invariant: the gradient is the mean over the samples of all ranks. While the reference
        # trains on all of them, each rank has only its own batch. The mistakes come first, so that
        # one is named.
        if not _differs(found, expected.alone[rank]):
            raise Wrong(f"{who} those of the rank's own samples alone",
                        "The loss of the wrapped module must be differentiated: DDP and FSDP "
                        "average where backward passes through them.", code="gradient_of_one_rank")
        if not _differs({name: g / run.ranks for name, g in found.items()}, want):
            raise Wrong(f"{who} the sum over the {run.ranks} ranks, not the mean",
                        "DDP and FSDP divide by the number of ranks already.", code="sum_not_mean")
        if not _differs({name: g * run.ranks for name, g in found.items()}, want):
            raise Wrong(f"{who} the reference's divided by {run.ranks}: averaged twice",
                        "DDP and FSDP divide by the number of ranks already.", code="mean_twice")
        if scaled := _scaled(found, want):
            raise Wrong(f"{who} {scaled}", _NOT_SCALED, code="loss_scaled")
        raise Wrong(f"{who} not the reference's on all ranks' samples together",
                    "backward of the mean loss of this rank's samples, once a step; zero_grad "
                    "after each step.", code="wrong_gradient")


def _whole(of_ranks, rank, like):
    """The tensors of a rank; where ranks hold shards along the first dimension, put together. None
    where they cannot be: under FSDP1 they have other names."""
    own = of_ranks[rank]
    if own.keys() != like.keys():
        return None
    if all(own[name].shape == like[name].shape for name in like):
        return own
    joined = {name: torch.cat([shards[name] for shards in of_ranks]) for name in like
              if all(name in shards and shards[name].dim() for shards in of_ranks)}
    fits = joined.keys() == like.keys() and all(
        joined[name].shape == like[name].shape for name in like)
    return joined if fits else None


def _differs(found, want) -> bool:
    away = _norm({name: found[name] - want[name] for name in want})
    return not away <= GRADIENT * _norm(want)


def _norm(tensors) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors.values()))


def _scaled(found, want) -> str:
    """Says that gradients are others times a number, as those that were clipped; else empty."""
    along = sum((found[name] * want[name]).sum().item() for name in want)
    factor = along / _norm(want) ** 2
    if _differs(found, {name: factor * g for name, g in want.items()}):
        return ""
    return (f"the reference's times {factor:.3g}, as if clipped to a norm of {_norm(found):.3g} "
            "or scaled")


def _why(run, rank, expected, steps) -> tuple[str, str]:
    """(what the optimizer got in the first of so many steps in which it was not the reference's
    gradients, a hint)."""
    before = None
    for step in range(steps):
        want = expected.gradients[step]
        found = _whole([each.steps[step].gradients for each in run.records], rank, want)
        if found is None:
            break
        if _differs(found, want):
            got = f"; in step {step} the optimizer got "
            if before and not _differs(found, {name: want[name] + before[name] for name in want}):
                return (f"{got}the gradients of this step and of the one before together",
                        "optimizer.zero_grad() after each step, or before each backward.")
            scaled = _scaled(found, want)
            return (got + scaled, _NOT_SCALED) if scaled else ("", _EVERY_STEP)
        before = found
    return "", _EVERY_STEP


def _judge_rates(run, when, expected):
    for rank, record in enumerate(run.records):
        found = [step.learning_rate for step in record.steps]
        for step, (rate, want) in enumerate(zip(found, expected.rates, strict=True)):
            if far(rate / expected.rates[0], want / expected.rates[0]):
                # How many times as fast the rate falls as it should: 2 where each of two ranks'
                # steps is counted.
                usual = expected.rates[0] - expected.rates[1]
                times = (found[0] - found[1]) / usual if usual else 0
                often = (": it has not fallen" if usual and rate == found[0] else
                         f": it falls {times:.3g}x as fast" if usual and step == 1 else "")
                is_, should_be = format_distinct(rate, want)
                raise Wrong(f"{when}: rank {rank}, step {step}: the learning rate is {is_}, not "
                            f"{should_be}{often}", "scheduler.step() once in each step, after "
                            "optimizer.step(): not once an epoch, and not once for each rank.",
                            code="wrong_learning_rate")


def _judge_losses(run, when, expected):
    for step, of_ranks in enumerate(expected.losses):
        for rank, want in enumerate(of_ranks):
            found = losses(run.records[rank], step)
            if found is not None and far(found, want):
                is_, should_be = format_distinct(found, want, digits=5)
                why, hint = _why(run, rank, expected, step)
                raise Wrong(f"{when}: rank {rank}, step {step}: the loss of its samples is {is_}, "
                            f"the reference's {should_be}: its parameters are others{why}", hint,
                            code="wrong_loss")


def _judge_parameters(run, when, expected):
    """The last update shows in no loss."""
    for rank in range(run.ranks):
        found = _whole([record.parameters for record in run.records], rank, expected.parameters)
        if found is None:
            continue
        away, way = (_norm({name: tensors[name] - expected.parameters[name] for name in tensors})
                     for tensors in (found, expected.initial))
        if not away <= WAY * way:
            why, hint = _why(run, rank, expected, len(expected.gradients))
            raise Wrong(f"{when}: rank {rank}: the parameters at the end are {away / way:.0%} of "
                        f"the way that training took away from the reference's{why}", hint,
                        code="differs_from_reference")

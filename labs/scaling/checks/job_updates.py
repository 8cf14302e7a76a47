"""Exercise 6.15: what the optimizer got and what rank 0 reported, against the reference's."""

import math
from collections.abc import Callable, Iterator

from labs.exercises.numbers import Cause, judge_number
from labs.exercises.scripts.forked import Run
from labs.exercises.scripts.probe import RankRecord
from labs.exercises.verdicts import Wrong
from labs.scaling.runs.expected import Tensors
from labs.scaling.runs.expected_job import ExpectedJob, ExpectedStep, clipped, norm_of

GRADIENT = 1e-3  # of the norm: float32 sums in another order, over some steps of AdamW
REPORTED = 1e-4  # relative
_TOKENS = ("Add up the answer tokens of all micro-batches, reduce the sum over the ranks, and "
           "divide each loss by it. FSDP divides by the number of ranks once more.")
_CLIP = ("The norm is of all gradients of all ranks: clip_grad_norm_ of the sharded module's "
         "parameters, after the last backward and before the optimizer's step.")


def judge(run: Run, when: str, expected: ExpectedJob, clip: float) -> None:
    """Raises Wrong unless in every step the optimizer got the reference's gradients, clipped by the
    norm of all of them together."""
    for number, step in enumerate(expected.steps):
        want = clipped(step.gradients, clip)
        for rank, record in enumerate(run.records):
            where = f"{when}: rank {rank}, step {number}"
            missing = [name for name in want if name not in record.steps[number].gradients]
            if missing:
                raise Wrong(f"{where}: {missing[0]!r} has no gradient when the optimizer steps",
                            "A shard gets its gradient in a backward that synchronizes.",
                            code="gradient_missing")
            if (off := _off(record, number, want)) > GRADIENT:
                why, hint = _cause(run, number, expected, clip)
                raise Wrong(f"{where}: the gradients that the optimizer gets are "
                            + (why or f"off by {off:.0%} of the reference's norm"), hint,
                            code="wrong_gradient")


def own_pieces(record: RankRecord, tensors: Tensors) -> Tensors:
    """What a rank holds of whole tensors, by the shards that it held of the parameters."""
    found = {}
    for name, tensor in tensors.items():
        dim, piece, pieces = record.shards.get(name, (0, 0, 1))
        chunks = tensor.chunk(pieces, dim)
        # torch cuts off fewer pieces where a dimension is shorter than their number
        found[name] = chunks[piece] if piece < len(chunks) else tensor.narrow(dim, 0, 0)
    return found


def _off(record, number, tensors) -> float:
    """How far a rank's gradients are from its pieces of these, relative to the norm of all."""
    found, want = record.steps[number].gradients, own_pieces(record, tensors)
    if any(found[name].shape != want[name].shape for name in want):
        return math.inf
    away = norm_of({name: found[name] - want[name] for name in want})
    return away / norm_of(tensors) if math.isfinite(away) else math.inf


def _cause(run, number, expected, clip) -> tuple[str, str]:
    """The mistake that explains every rank's gradients, and what to do; empty without one."""
    for what, hint, of_rank in _mistakes(expected, number, clip):
        if all(_off(record, number, of_rank(record)) <= GRADIENT for record in run.records):
            return what, hint
    return "", _TOKENS


def _mistakes(expected, number, clip) -> Iterator[tuple[str, str, Callable[[RankRecord], Tensors]]]:
    """(what it is, a hint, the rank's record -> whole gradients) of common mistakes."""
    raw = expected.steps[number].gradients
    most = norm_of(raw)
    yield "the reference's before clipping", _CLIP, lambda record: raw
    yield ("clipped by each rank's own norm, of its shards alone", _CLIP,
           lambda record: clipped(raw, clip, norm_of(own_pieces(record, raw))))
    yield (f"scaled to a norm of {clip:g}, and theirs was only {most:.3g}", _CLIP,
           lambda record: {name: gradient * (clip / most) for name, gradient in raw.items()})
    if number:
        before = clipped(expected.steps[number - 1].gradients, clip)
        added = clipped({name: raw[name] + before[name] for name in raw}, clip)
        yield ("those of this step and of the step before together", "optimizer.zero_grad() after "
               "each step.", lambda record: added)
        return
    for what, step in expected.mistakes.items():
        wrong = clipped(step.gradients, clip)
        yield f"those of {what}, clipped", _TOKENS, lambda record, wrong=wrong: wrong


def judge_metrics(run: Run, when: str, expected: ExpectedJob, numbers: dict[str, float]) -> None:
    """Raises Wrong unless loss, tokens and norm of every step are what they were."""
    for number, (step, want) in enumerate(zip(run.metrics["steps"], expected.steps, strict=True)):
        mistakes = expected.mistakes if number == 0 else {}
        where = f"{when}, step {number}, in the file of --metrics"
        judge_number(step["tokens"], sum(want.tokens),
                     [Cause("rank_0_own", want.tokens[0], "rank 0's own", "")], f"{where}: tokens",
                     hint="Count the labels that are not -100, over all micro-batches and ranks.")
        judge_number(step["loss"], want.loss,
                     [Cause("wrong_weights", each.loss, what) for what, each in mistakes.items()],
                     f"{where}: loss", hint="Sum each micro-batch's share, then over the ranks.",
                     source="the mean over all answer tokens is", rel_tol=REPORTED)
        judge_number(step["norm"], want.norm, list(_norms(run, want, mistakes, numbers)),
                     f"{where}: norm", hint=_CLIP, rel_tol=REPORTED,
                     source="before clipping, of all gradients, it is")


def _norms(run, want: ExpectedStep, mistakes, numbers) -> Iterator[Cause]:
    own = norm_of(own_pieces(run.records[0], want.gradients))
    yield Cause("norm_of_one_rank", own, "that of rank 0's shards alone",
                "Of a DTensor, .full_tensor() is the number of all.")
    yield Cause("norm_after_clipping", numbers["clip"], "the norm after clipping",
                "clip_grad_norm_ returns the one before.")
    yield Cause("mean_twice", want.norm / run.ranks, f"the right one divided by {run.ranks}",
                _TOKENS)
    if numbers["replicas"] > 1:
        yield Cause("all_ranks_shards", want.norm * math.sqrt(numbers["replicas"]),
                    "that of all ranks' shards, and each "
                    f"stands in {numbers['replicas']} replicas",
                    "Sum the squares over one replica.")
    for what, step in mistakes.items():
        yield Cause("wrong_weights", step.norm, f"that of {what}", _TOKENS)

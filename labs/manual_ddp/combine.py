"""Exercise 2.1: the full batch's gradient from the gradients of its shards."""

from collections.abc import Callable

import torch

from labs.checks.on_ranks import largest_difference
from labs.checks.tolerances import SUMS
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import agreement
from labs.pictures.picture import Picture
from labs.training import data
from labs.training.models import EdgeCaseModel

# code, sentence, hint, and the gradient that the mistake gives
_MISTAKES = (
    ("sum_not_mean", "the result is the sum of the gradients",
     "Each mean must count by its share of the batch.", sum),
    ("unweighted_mean", "the result is the plain mean of the gradients",
     "A shard of 8 counts eight times a shard of 1.", lambda parts: sum(parts) / len(parts)),
)


@check("2.1")
def check_combine(combine):
    """combine(gradients, sizes) returns the full batch's gradient, in the gradients' dtype, and
    leaves both lists and the tensors in them as they are."""
    # unequal shards first: with two equal ones several mistakes give the same gradient
    for sizes in ([3, 1, 8], [1, 2, 4, 6], [5, 5], [7]):
        want, parts = gradients_of_shards(sizes)
        given, given_sizes = [part.clone() for part in parts], list(sizes)
        got = as_gradient(combine(given, given_sizes), want)
        shards = f"shards of {sizes} examples"
        _judge_inputs(given, parts, given_sizes, sizes, shards)
        _judge(got, want, parts, shards)
    return "the shards' gradients give the full batch's, for equal and unequal shards"


def _judge_inputs(given, parts, given_sizes, sizes, shards):
    # a reader of the shards' gradients would find other numbers than backward left
    if given_sizes != sizes or len(given) != len(parts):
        raise Wrong(f"{shards}: combine changed the list it was given",
                    "Leave the inputs as they are.", code="changes_input")
    for number, (now, before) in enumerate(zip(given, parts, strict=True)):
        if not torch.equal(now, before):
            raise Wrong(f"{shards}: combine wrote into gradient {number}, which is an input",
                        "gradient * weight makes a new tensor; *= and += write into the old one.",
                        code="changes_input")


def gradients_of_shards(sizes: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient of a batch, and those of its shards of these sizes, of one small weight."""
    model = EdgeCaseModel()
    [batch] = data.xy_batches(1, sum(sizes))

    def gradient(part):
        model.zero_grad()
        model(**part).loss.backward()
        # (13, 5)
        return model.first.weight.grad.clone()

    return gradient(batch), [gradient(part) for part in split(batch, sizes)]


def split(batch: data.Batch, sizes: list[int]) -> list[data.Batch]:
    """The batch in parts of these sizes."""
    return [dict(zip(batch, part, strict=True))
            for part in zip(*(value.split(sizes) for value in batch.values()), strict=True)]


def as_gradient(got, want) -> torch.Tensor:
    """Returns `got` if it is a tensor of the shape of `want`. Raises Wrong."""
    if isinstance(got, torch.Tensor) and got.shape == want.shape:
        # an optimizer refuses a gradient of another dtype than its parameter
        if got.dtype != want.dtype:
            raise Wrong(f"combine returned {got.dtype} for gradients of {want.dtype}",
                        "Keep the gradients' dtype.", code="wrong_dtype")
        return got
    kind = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else (
        kind_of(got))
    raise Wrong(f"combine returned {kind}, not a gradient of shape {tuple(want.shape)}",
                "Return one tensor: the weighted sum of the gradients.",
                code="wrong_shape" if isinstance(got, torch.Tensor) else "wrong_type")


def _close(got, want) -> bool:
    # relative to this gradient, whose numbers are small: else weights off by 1 % would pass
    return largest_difference(got, want) <= SUMS * want.abs().max().item()


def _judge(got, want, parts, shards):
    # the weighted mean of the shards' gradients is the full batch's, whatever the sizes; equal
    # sizes alone would let the plain mean pass
    if _close(got, want):
        return
    if not got.any():
        raise Wrong(f"{shards}: the result is zero", "size // total is 0; divide with / .",
                    code="zero_gradient")
    for code, sentence, hint, gives in _MISTAKES:
        if _close(got, gives(parts)):
            raise Wrong(f"{shards}: {sentence}", hint, code=code)
    ratio = (got.norm() / want.norm()).item()
    if _close(got, want * ratio):
        raise Wrong(f"{shards}: the direction is right, the length is {ratio:.4g}x",
                    "The weights must add up to 1.", code="wrong_scale")
    raise Wrong(f"{shards}: the result differs from the full batch's gradient by "
                f"{largest_difference(got, want):.2g}",
                "Weight each gradient by size / total size.", code="wrong_gradient")


@shows("2.1")
def show_combine(combine: Callable) -> Picture:
    """Draws the gradient of a batch in shards of 1, 1 and 10: of the full batch,
    combined, plainly averaged."""
    whole, parts = gradients_of_shards([1, 1, 10])
    combined = as_gradient(combine([part.clone() for part in parts], [1, 1, 10]), whole)
    return agreement.gradient_strips({"the whole batch": whole, "your combine": combined,
                                      "plain mean": sum(parts) / len(parts)})

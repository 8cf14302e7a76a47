"""Check of exercise 2.1: the full batch's gradient from the gradients of its shards."""

import torch

from labs.exercises.on_ranks import close, largest_difference
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.training import data
from labs.training.models import EdgeCaseModel

# sentence, hint, and the gradient that the mistake gives
_MISTAKES = (
    ("the result is the sum of the gradients",
     "Each mean must count by its share of the batch.", sum),
    ("the result is the plain mean of the gradients",
     "A shard of 8 counts eight times a shard of 1.", lambda parts: sum(parts) / len(parts)),
)


@check("2.1")
def check_combine(combine):
    """combine(gradients, sizes) returns the full batch's gradient."""
    for sizes in ([6, 6], [3, 1, 8], [1, 2, 4, 5], [12]):
        want, parts = gradients_of_shards(sizes)
        got = combine([part.clone() for part in parts], list(sizes))
        _judge(as_gradient(got, want), want, parts, f"shards of {sizes} examples")
    return "the shards' gradients give the full batch's, for equal and unequal shards"


def gradients_of_shards(sizes: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient of a batch, and those of its shards of these sizes, of one small weight."""
    model = EdgeCaseModel()
    [batch] = data.xy_batches(1, sum(sizes))

    def gradient(part):
        model.zero_grad()
        model(**part).loss.backward()
        return model.first.weight.grad.clone()

    return gradient(batch), [gradient(part) for part in split(batch, sizes)]


def split(batch: data.Batch, sizes: list[int]) -> list[data.Batch]:
    """The batch in parts of these sizes."""
    return [dict(zip(batch, part, strict=True))
            for part in zip(*(value.split(sizes) for value in batch.values()), strict=True)]


def as_gradient(got, want) -> torch.Tensor:
    """Returns `got` if it is a tensor of the shape of `want`. Raises Wrong."""
    if isinstance(got, torch.Tensor) and got.shape == want.shape:
        return got
    kind = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else (
        kind_of(got))
    raise Wrong(f"combine returned {kind}, not a gradient of shape {tuple(want.shape)}",
                "Return one tensor: the weighted sum of the gradients.")


def _judge(got, want, parts, shards):
    # the weighted mean of the shards' gradients is the full batch's, whatever the sizes; equal
    # sizes alone would let the plain mean pass
    if close(got, want):
        return
    for sentence, hint, gives in _MISTAKES:
        if close(got, gives(parts)):
            raise Wrong(f"{shards}: {sentence}", hint)
    ratio = (got.norm() / want.norm()).item()
    if close(got, want * ratio):
        raise Wrong(f"{shards}: the direction is right, the length is {ratio:.3g}x",
                    "The weights must add up to 1.")
    raise Wrong(f"{shards}: the result differs from the full batch's gradient by "
                f"{largest_difference(got, want):.2g}",
                "Weight each gradient by size / total size.")

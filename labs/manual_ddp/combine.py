"""Exercise 2.1: the full batch's gradient from the gradients of its shards."""

from collections.abc import Callable

import torch

from labs.checks.generator import new_generator
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


@check("2.1", hints={"NoneType": "A gradient that is None stands for zeros."})
def check_combine(combine):
    """combine(gradients, sizes) returns the full batch's gradient, in the gradients' dtype, and
    leaves both lists and the tensors in them as they are. A gradient may be None."""
    rng = new_generator()
    # unequal shards first: with two equal ones several mistakes give the same gradient
    for sizes, unused in (([3, 1, 8], None), ([1, 2, 4, 6], None), ([5, 5], None), ([7], None),
                          ([4, 6, 2], 1), ([5, 1], 0), (rng.sample(range(1, 10), 4), 2)):
        # of another model and batch each time: a table of gradients fits none
        want, parts = gradients_of_shards(sizes, unused, rng.getrandbits(30))
        given, given_sizes = [part if part is None else part.clone() for part in parts], list(sizes)
        got = as_gradient(combine(given, given_sizes), want)
        shards = f"shards of {sizes} examples"
        if unused is not None:
            shards += f", of which shard {unused} has None"
        _judge_inputs(given, parts, given_sizes, sizes, shards)
        _judge_absent(got, want, parts, sizes, shards)
        _judge(got, want, [part for part in parts if part is not None], shards)
    return ("the shards' gradients give the full batch's, for equal and unequal shards, and where "
            "one has None")


def _judge_inputs(given, parts, given_sizes, sizes, shards):
    # a reader of the shards' gradients would find other numbers than backward left
    if given_sizes != sizes or len(given) != len(parts):
        raise Wrong(f"{shards}: combine changed the list it was given",
                    "Leave the inputs as they are.", code="changes_input")
    for number, (now, before) in enumerate(zip(given, parts, strict=True)):
        if (now is None) != (before is None) or now is not None and not torch.equal(now, before):
            raise Wrong(f"{shards}: combine wrote into gradient {number}, which is an input",
                        "gradient * weight makes a new tensor; *= and += write into the old one.",
                        code="changes_input")


def gradients_of_shards(sizes: list[int], unused: int | None = None, seed: int = 0
                        ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The gradient of a batch, and those of its shards of these sizes, of one small weight. unused:
    the shard that does not use the weight, and therefore has None. seed: of the model and batch."""
    model = EdgeCaseModel(seed)
    [batch] = data.xy_batches(1, sum(sizes), seed=seed)
    # (13, 5); (13, 13) is the layer that runs only with use_all
    weight = model.first.weight if unused is None else model.sometimes_unused.weight

    def loss(number, part):
        return model(**part, use_all=unused is not None and number != unused).loss

    def gradient(mean_loss):
        model.zero_grad()
        mean_loss.backward()
        return weight.grad if weight.grad is None else weight.grad.clone()

    shards = split(batch, sizes)
    parts = [gradient(loss(number, part)) for number, part in enumerate(shards)]
    if unused is None:
        return gradient(model(**batch).loss), parts
    # No single forward takes examples with and without the layer: this is the mean over all.
    losses = sum(loss(number, part) * size
                 for number, (part, size) in enumerate(zip(shards, sizes, strict=True)))
    return gradient(losses / sum(sizes)), parts


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


def _judge_absent(got, want, parts, sizes, shards):
    # the examples of a shard that does not use the weight are examples of the batch: without them
    # the weights would be too large
    if _close(got, want):
        return
    used = [(part, size) for part, size in zip(parts, sizes, strict=True) if part is not None]
    if len(used) < len(parts) and _close(got, sum(part * size for part, size in used)
                                         / sum(size for _, size in used)):
        raise Wrong(f"{shards}: the weights count only the examples of the other shards",
                    "The shard's gradient is zero, but its examples belong to the batch.",
                    code="absent_shard_left_out")


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
    plain = sum(parts) / len(parts)
    yours, theirs = (agreement.percent(agreement.relative_error(one, whole))
                     for one in (combined, plain))
    return agreement.gradient_strips(
        {"the full batch": whole, "your combine": combined, "plain mean": plain},
        f"Shards of 1, 1 and 10: the plain mean is {theirs} off, your combine {yours}")

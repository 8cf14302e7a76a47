"""What a student's function gave back or did on its ranks, told with a hint: the same words for a
check and for a picture."""

import math

import torch

from labs.exercises.verdicts import Wrong
from labs.workers.failures import RankFailed


def kind(value) -> str:
    """`nothing (None)`, `a str`, `an int`."""
    if value is None:
        return "nothing (None)"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def must_be_tensor(rank: int, ranks: int, result) -> None:
    """Raises Wrong unless `result`, what rank `rank` returned, is a tensor."""
    if result is None:
        raise Wrong(f"rank {rank} of {ranks} returned nothing (None), not a tensor",
                    "Does it end with `return`? A collective itself returns None; return the "
                    "tensor that it wrote into.")
    if not isinstance(result, torch.Tensor):
        raise Wrong(f"rank {rank} of {ranks} returned {kind(result)}, not a tensor",
                    "Return the tensor itself.")


def must_be_bytes(said) -> None:
    """Raises Wrong unless `said`, what a formula returned, is a number."""
    hint = "Return the number; do not print it."
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise Wrong(f"it returned {kind(said)}, not a number of bytes", hint)
    if not math.isfinite(said):
        raise Wrong(f"it returned {said}, not a number of bytes", hint)


def must_be_ranks(ranks) -> None:
    """Raises Wrong unless so many ranks fit a picture."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 2 <= ranks <= 8:
        raise Wrong(f"ranks={ranks!r}: give a whole number from 2 to 8")


def must_fit(name: str, output: int, given: int, ranks: int) -> None:
    """Raises Wrong unless `name`, a reduce-scatter or an all-gather of tensors, can put `given`
    numbers into `output` numbers. gloo says this with a C++ file and two numbers."""
    shrinks = name.startswith("reduce_scatter")
    needed = given / ranks if shrinks else given * ranks
    if output != needed:
        raise Wrong(f"{name}(output, input): the input has {_count(given)}, so on {ranks} ranks "
                    f"the output needs {needed:g}; yours has {output}.",
                    "The output comes first. It is the "
                    + (f"shorter one: 1/{ranks} of" if shrinks else f"longer one: {ranks}x")
                    + " the input.")


def explained(error: RankFailed) -> Wrong:
    """The Wrong that was raised on a rank, with the student's line that led to it."""
    wrong = Wrong("\n".join([error.cause.sentence, *error.outcomes[error.rank].call_chain()]),
                  error.cause.hint)
    wrong.rank, wrong.output = error.rank, error.output  # as `exercises` finds them on a failure
    return wrong


def _count(numbers) -> str:
    return f"{numbers} number{'s' * (numbers != 1)}"

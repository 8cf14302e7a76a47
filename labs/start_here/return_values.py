"""What a student's function must return, and the sentence and hint where it does not: the same in
a check and in a chart."""

import torch

from labs.checks.verdicts import Wrong, kind_of
from labs.words import counted
from labs.workers.failures import RankFailed

KEEP_TYPE = "The tensors that you make need the dtype of `mine`: mine.new_empty(...) has it."


def require_tensor(rank: int, ranks: int, result) -> None:
    """Raises Wrong unless `result`, what rank `rank` returned, is a tensor."""
    if isinstance(result, torch.Tensor):
        return
    hint = ("Return the tensor itself." if result is not None else "Does it end with `return`? A "
            "collective itself returns None; return the tensor that it wrote into.")
    raise Wrong(f"rank {rank} of {ranks} returned {kind_of(result)}, not a tensor", hint,
                code="nothing_returned" if result is None else "wrong_type")


def require_world_size(ranks) -> None:
    """Raises Wrong unless a picture has room for so many ranks."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 2 <= ranks <= 8:
        raise Wrong(f"ranks={ranks!r}: give a whole number from 2 to 8", code="ranks_out_of_range")


def require_fitting_output(name: str, output: torch.Tensor, given: torch.Tensor,
                           ranks: int) -> None:
    """Raises Wrong unless `name`, a reduce-scatter or an all-gather of tensors, can put the numbers
    of `given` into `output`. gloo's own error names a C++ file and two numbers."""
    # A reduce-scatter's output is 1/N of its input, an all-gather's is N times its input.
    shrinks = name.startswith("reduce_scatter")
    needed = given.numel() / ranks if shrinks else given.numel() * ranks
    if output.numel() != needed:
        which = f"shorter one: 1/{ranks} of" if shrinks else f"longer one: {ranks}x"
        raise Wrong(f"{name}(output, input): the input has {counted(given.numel(), 'number')}, so "
                    f"on {ranks} ranks the output needs {needed:g}; yours has {output.numel()}.",
                    f"The output comes first. It is the {which} the input.",
                    code="wrong_output_size")
    if output.dtype != given.dtype:
        raise Wrong(f"{name}(output, input): the output is {output.dtype}, the input {given.dtype}",
                    KEEP_TYPE, code="wrong_dtype")


def wrong_on_rank(error: RankFailed) -> Wrong:
    """The Wrong that was raised on a rank, with the student's line that led to it."""
    chain = error.outcomes[error.rank].call_chain()
    wrong = Wrong("\n".join([error.cause.sentence, *chain]), error.cause.hint,
                  code=error.cause.code)
    wrong.rank, wrong.output = error.rank, error.output  # where verdicts look for what was printed
    return wrong

"""What every exercise keeps: inputs stay as they are, unless it says "in place", and a result has
its inputs' dtype.

The caller continues using what it passed in. A result of another dtype takes other memory, and the
next operation with it fails or is silently promoted.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from labs.checks.verdicts import Wrong


class UnchangedInputs:
    """Remembers the inputs of a student's function, to judge afterwards that it left them alone.

    On ranks: `kept = UnchangedInputs("combine", gradients=gradients)`, call the student's function,
    then `raise_on_all_ranks(kept.judge)`. inputs: name -> tensors, arrays, numbers, modules (their
    parameters, buffers and gradients), or lists and dicts of these.
    """

    def __init__(self, function: str, **inputs: Any):
        self._function, self._inputs = function, inputs
        self._before = {name: _contents(value) for name, value in inputs.items()}

    def judge(self) -> None:
        """Raises Wrong with the first input that is not as it was."""
        # an in-place operation on an input (div_, all_reduce, pop, sort) gives a right result, and
        # the caller's next line reads something else than it passed in
        for name, value in self._inputs.items():
            before, now = self._before[name], _contents(value)
            # Invariant: as many leaves before the call as after it. Catches pop, append and a new
            # .grad.
            if before.keys() != now.keys():
                raise Wrong(f"{self._function} changed its input `{name}`: it had {len(before)} "
                            f"parts before the call and has {len(now)} after it", _HINT,
                            code="changes_input")
            for part, old in before.items():
                # Invariant: every leaf has its value, shape and dtype. Catches div_, all_reduce
                # into the input, sort of a list.
                if not _same(old, now[part]):
                    raise Wrong(f"{self._function} changed its input `{name}{part}`: the caller "
                                "continues using it", _HINT, code="changes_input")


_HINT = "Work on a copy (clone, list): what writes in place ends in `_`, and so does all_reduce."


def require_dtype(result: torch.Tensor, like: torch.Tensor, what: str) -> None:
    """Raises Wrong unless the result has the dtype of the input that it was computed from."""
    # dividing whole numbers, or a scalar of NumPy, promotes to another dtype
    if result.dtype != like.dtype:
        got, want = (str(tensor.dtype).removeprefix("torch.") for tensor in (result, like))
        raise Wrong(f"{what} is {got}, its input is {want}",
                    f"Keep the dtype: compute in it, or convert back with .to({want}).",
                    code="wrong_dtype")


def require_dense(result: torch.Tensor, what: str) -> None:
    """Raises Wrong for a sparse tensor, and for one without values, on the meta device: comparing
    them raises."""
    if result.layout != torch.strided or result.is_meta:
        found = "on the meta device" if result.is_meta else "sparse"
        raise Wrong(f"{what} is {found}, not a dense tensor with values",
                    "Return an ordinary tensor.", code="not_dense")


def _contents(value, path="") -> dict[str, Any]:
    """Path -> a copy of each leaf of nested containers."""
    if isinstance(value, nn.Module):
        state = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        found = {}
        for name, tensor in state.items():
            found |= _contents(tensor, f"{path}.{name}")
        return found
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{number}]", each) for number, each in enumerate(value)]
    elif isinstance(value, torch.Tensor):
        found = {path: value.detach().clone()}
        return found if value.grad is None else {**found, f"{path}.grad": value.grad.clone()}
    else:
        return {path: copy.deepcopy(value)}
    found = {}
    for key, each in items:
        found |= _contents(each, path + key)
    return found


def _same(old, new) -> bool:
    if isinstance(old, torch.Tensor):
        return (isinstance(new, torch.Tensor) and old.dtype == new.dtype and old.shape == new.shape
                # NaN is unequal to itself: an input that holds one would look changed.
                and torch.equal(old.nan_to_num(), new.nan_to_num()))
    if hasattr(old, "dtype"):
        return old.dtype == new.dtype and old.shape == new.shape and bool((old == new).all())
    return type(old) is type(new) and old == new

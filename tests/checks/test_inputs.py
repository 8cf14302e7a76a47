"""Inputs that a student's function changed, and results of another dtype, are named."""

import numpy as np
import pytest
import torch
from torch import nn

from labs.checks.inputs import UnchangedInputs, require_dtype
from labs.checks.verdicts import Wrong


def inputs():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    return {"tensor": torch.ones(3), "several": [torch.zeros(2), torch.ones(1)], "model": model,
            "array": np.ones(2), "sizes": {"a": 1}, "number": 3,
            "not_finite": torch.tensor([float("nan")])}


CHANGES = {
    "`tensor`": lambda i: i["tensor"].div_(2), "`several[1]`": lambda i: i["several"][1].add_(1),
    "`several`: it had 2 parts before the call and has 1": lambda i: i["several"].pop(),
    "`model.weight`": lambda i: i["model"].weight.data.zero_(),
    "`model.weight.grad`": lambda i: i["model"].weight.grad.zero_(),
    "`model`": lambda i: i["model"].zero_grad(), "`array`": lambda i: i["array"].sort() or
    i["array"].__setitem__(0, 2), "`sizes['a']`": lambda i: i["sizes"].update(a=2),
    "`sizes`": lambda i: i["sizes"].clear(),
    "`tensor` ": lambda i: i["tensor"].resize_(2)}


def test_what_is_only_read_is_unchanged():
    given = inputs()
    kept = UnchangedInputs("f", **given)
    given["tensor"] * 2, sum(given["several"][1]), given["model"](torch.ones(2))
    kept.judge()


@pytest.mark.parametrize("words", CHANGES)
def test_what_is_changed_is_named(words):
    given = inputs()
    kept = UnchangedInputs("f", **given)
    CHANGES[words](given)
    with pytest.raises(Wrong) as caught:
        kept.judge()
    assert f"f changed its input {words.strip()}" in str(caught.value) and caught.value.hint


def test_a_result_has_the_dtype_of_its_input():
    require_dtype(torch.ones(1), torch.ones(2), "the mean")
    with pytest.raises(Wrong, match="the mean is float64, its input is float32"):
        require_dtype(torch.ones(1).double(), torch.ones(2), "the mean")

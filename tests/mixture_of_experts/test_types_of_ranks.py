"""Notebook 09's types of tensors on ranks: what spmd-types infers, refuses and lets pass."""

import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions

from labs.checks.verdicts import Verdict
from labs.mixture_of_experts import types_of_ranks
from labs.mixture_of_experts.types_of_ranks import has_spmd_types, show_types
from labs.workers.launcher import launch

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = "replicate", "expert"
needs_types = pytest.mark.skipif(not has_spmd_types(),
                                 reason="spmd-types is not installed (the extra `types`)")


@cache
def solution():
    return definitions("09_mixture_of_experts")


def rows(table):
    return {row[0]: row[1:] for row in table.rows}


@needs_types
def test_the_second_matrix_leaves_a_partial_sum():
    found = rows(show_types(solution().column_then_row, ("data", "tensor"), True))
    assert found["hidden"] == ("V", "V", "V", "V") and found["partial"] == ("V", "P", "V", "R")
    assert found["x"] == ("V", "I", "V", "I") and found["copied"] == ("V", "R", "V", "P")
    assert found["output"][:2] == ("V", "I")


@needs_types
def test_without_the_all_reduce_types_refuse_and_torch_does_not():
    found = rows(show_types(solution().column_then_row, ("data", "tensor"), False))
    assert found["with types"][0].startswith("refused: Partial type on axis tensor cannot")
    assert found["without them"][0].startswith("no error; x (4, 8)")


@needs_types
def test_gradients_say_what_is_summed_over_which_ranks():
    found = rows(show_types(solution().expert_layer, EXPERTS, shards=False))
    assert found["router"][2:] == ("P", "P") and found["expert"][2:] == ("P", "V")


@needs_types
def test_a_sum_over_different_experts_is_refused_and_a_wrong_divisor_is_not():
    summed = solution().summed_gradient
    found = rows(show_types(summed, EXPERTS, ["replicate", "expert"], shards=False))
    assert found["with types"] == (
        "refused: all_reduce: expected input type P on axis expert, got V",)
    found = rows(show_types(summed, EXPERTS, ["replicate"], shards=False))
    assert found["gradient"][:2] == ("R", "V")


def sent_to_each():
    """On a rank: what it gets from each, if rank r sends 10 r + i to rank i."""
    inputs = [torch.tensor([10.0 * dist.get_rank() + i]) for i in range(2)]
    outputs = [torch.zeros(1), torch.zeros(1)]
    types_of_ranks._all_to_all(outputs, inputs)
    return [output.item() for output in outputs]


def test_all_to_all_of_lists_on_torch_2_11():
    assert launch(sent_to_each, ranks=2, quiet=True) == [[0, 10], [1, 11]]


def test_without_spmd_types_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(types_of_ranks, "has_spmd_types", lambda: False)
    said = show_types(lambda mesh: {}, EXPERTS)
    assert isinstance(said, Verdict) and said.passed is None
    assert f"%pip install spmd-types=={types_of_ranks.VERSION}" in str(said)


def test_the_version_is_that_of_the_extra_and_of_the_lock():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = f"spmd-types=={types_of_ranks.VERSION}"
    assert project["optional-dependencies"]["types"] == [wanted]
    pins = (ROOT / "requirements.lock").read_text().replace("_", "-")
    assert f'\n{wanted} ; extra == "types"' in pins

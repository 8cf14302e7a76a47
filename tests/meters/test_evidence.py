"""What is recorded of a step to judge a job by."""

import json

import pytest
import torch

from labs import launch
from labs.meters.evidence import PARTS, StepEvidence, held_bytes, read_ranks, whole_bytes
from labs.training import data, strategies
from labs.training.models import DeepMLP, EdgeCaseModel, count_trainable


def test_a_tied_parameter_counts_once_and_a_frozen_one_has_no_gradient():
    model = EdgeCaseModel()
    trainable = 4 * count_trainable(model)
    assert whole_bytes(model) == {"parameters": trainable + 4 * 5, "gradients": trainable,
                                  "optimizer_state": 2 * trainable}


def test_a_model_of_one_process_holds_a_whole_copy_of_all(tmp_path):
    model = DeepMLP(layers=2)
    evidence, optimizer = StepEvidence(model), torch.optim.AdamW(model.parameters())
    for batch in data.xy_batches(2, 4):
        with evidence:
            model(**batch).loss.backward()
            evidence.note(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert held_bytes(model, optimizer)["gradients"] == 0
    evidence.write(tmp_path / "metrics.json", "none", losses=[1.0])
    written = json.loads((tmp_path / "metrics.json").read_text())
    [rank] = read_ranks(written["ranks"])
    assert rank == evidence.of_this_rank("none") and written["losses"] == [1.0]
    assert rank.held["parameters"] == rank.whole["parameters"]
    assert rank.held["gradients"] == rank.whole["gradients"]
    assert rank.resident["gradients"] == 1 and rank.reduced == 0
    # and a count of steps for each of 8 tensors
    assert rank.held["optimizer_state"] == rank.whole["optimizer_state"] + 4 * 8
    assert "DeepMLP, none" in repr(rank) and "no collective" in repr(rank)


def _recorded():
    model = DeepMLP(layers=3)
    evidence = StepEvidence(model)
    module, optimizer = strategies.ddp(model, torch.optim.AdamW)
    for batch in data.xy_batches(3, 4):
        with evidence:
            module(**batch).loss.backward()
            evidence.note(module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return evidence.of_all_ranks()


def test_each_rank_gets_the_evidence_of_all():
    first, second = launch(_recorded, ranks=2, device="cpu", quiet=True)
    assert first == second and len(first) == 2
    for rank in first:
        assert [call.kind for call in rank.calls] == ["all_reduce"]
        assert rank.calls[0].bytes == rank.whole["gradients"] and rank.reduced == 1
        assert all(rank.held[part] >= rank.whole[part] for part in PARTS)
        assert rank.held["parameters"] == pytest.approx(rank.whole["parameters"])

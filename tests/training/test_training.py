"""What every lab trains: the models, the data, the loop and the presets."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from labs import launch
from labs.training import data, models, strategies
from labs.training.loop import train
from labs.training.presets import preset
from labs.workers import cuda


def test_the_data_is_this_pythons_own_source():
    text = bytes(data.text(50_000).tolist())
    assert len(text) == 50_000 and b"import" in text and b"def " in text


def test_shards_are_the_batch():
    [batch] = data.xy_batches(1, 12)
    parts = [data.shard({**batch, "flag": True}, rank, 3) for rank in range(3)]
    assert all(part["flag"] is True for part in parts)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(batch["x"][:, 1:], batch["y"][:, :-1])


def test_the_edge_case_model_has_its_edge_cases():
    model = models.EdgeCaseModel()
    assert model.head.weight is model.embedding.weight
    assert not model.scale.requires_grad and dict(model.named_buffers())
    assert models.count_trainable(model) == 256 * 5 + 5 * 13 + 13 + 13 * 13 + 13 * 5 + 5 == 1597
    assert all(1597 % n for n in range(2, 1597))
    model(**data.xy_batches(1, 2)[0]).loss.backward()
    assert model.sometimes_unused.weight.grad is None and model.first.weight.grad is not None


def _equal_gradients(make, options) -> dict[str, bool]:
    """On a rank: whether the gradient of each parameter under FSDP2 is that of one process."""
    batches = [data.xy_batches(1, 4, seed=rank)[0] | options for rank in range(2)]
    alone, (module, _) = make(), strategies.fsdp2(make(), torch.optim.SGD, lr=0.1)
    (sum(alone(**batch).loss for batch in batches) / 2).backward()
    module(**batches[dist.get_rank()]).loss.backward()
    return {name: torch.allclose(found.grad.full_tensor(), want.grad, atol=1e-6)
            for (name, want), found in zip(alone.named_parameters(), module.parameters(),
                                           strict=True) if want.grad is not None}


@pytest.mark.parametrize("make, options", [(models.EdgeCaseModel, {"use_all": True}),
                                           (partial(models.DeepMLP, layers=2), {})])
def test_fsdp2_averages_all_gradients_those_of_the_root_too(make, options):
    """fully_shard must find the tensors that a model returns."""
    for equal in launch(_equal_gradients, make, options, ranks=2, device="cpu", quiet=True):
        assert len(equal) >= 6 and all(equal.values())


@pytest.mark.slow
def test_a_gpt2_learns_under_the_plain_loop():
    model = models.gpt2(layers=1, hidden=32, heads=2, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = train(model, optimizer, data.lm_batches(12, 8, 32))
    assert losses[-1] < 0.8 * losses[0]


def test_the_same_seed_gives_the_same_model():
    pairs = zip(models.gpt2(1, 32, 2).parameters(), models.gpt2(1, 32, 2).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_presets_follow_the_machine(monkeypatch):
    for gpus, name, ranks in ((0, "laptop", 2), (1, "one-gpu", 2), (4, "node", 4)):
        monkeypatch.setattr(cuda, "count", lambda gpus=gpus: gpus)
        assert (preset().name, preset().ranks) == (name, ranks)
    assert preset("laptop", ranks=3).tokens == 3 * 8 * 64
    with pytest.raises(ValueError, match="no preset 'tiny': choose laptop, one-gpu, node"):
        preset("tiny")
    with pytest.raises(ValueError, match="no 'width'; it has ranks, layers, hidden"):
        preset(width=100)
    with pytest.raises(ValueError, match="ranks=0: give a whole number of at least 1"):
        preset(ranks=0)

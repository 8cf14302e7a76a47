"""Every library under the plain loop: the same losses, the traffic it is known for, and bytes that
are attributed to what they are; the solution's three stages among them."""

import functools
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import ROOT, definitions

from labs import launch
from labs.meters import memory
from labs.meters.traffic import Traffic
from labs.predictions.communication import traffic as predicted
from labs.training import data, models, strategies
from labs.training.loop import train
from labs.training.strategies import third_party

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
RANKS, STEPS = 2, 10
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}
TORCHS = ("ddp", "zero_redundancy", "fsdp1", "fsdp2", "fsdp2_no_reshard")
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3")
OURS = ("zero1", "zero2", "zero3", "zero3_prefetch")
needs_deepspeed = pytest.mark.skipif(not strategies.has_deepspeed(),
                                     reason="DeepSpeed is not installed (the extra `third-party`)")
needs_solution = pytest.mark.skipif(not (ROOT / "solutions" / "03_zero_stages.py").exists(),
                                    reason="notebook 03 is not in the repository yet")
EVERYONE = [*TORCHS, *(pytest.param(name, marks=needs_deepspeed) for name in DEEPSPEED),
            *(pytest.param(name, marks=needs_solution) for name in OURS)]


def chosen() -> dict:
    """name -> strategy, of all that can run here."""
    found = {name: getattr(strategies, name) for name in TORCHS}
    if strategies.has_deepspeed():
        found |= {name: getattr(strategies, name) for name in DEEPSPEED}
    if not needs_solution.args[0]:
        solution = definitions("03_zero_stages")
        found |= {name: getattr(solution, name) for name in OURS}
    return found


def model():
    return models.gpt2(layers=3, hidden=64)


def batches(steps) -> list:
    """This rank's share of batches that do not depend on the number of ranks."""
    return [data.shard(batch, dist.get_rank(), dist.get_world_size())
            for batch in data.lm_batches(steps, 8, 32)]


@functools.cache
def trained() -> dict:
    """name -> (losses of all ranks together, calls of the last step)."""
    found = chosen()

    def work():
        torch.set_num_threads(1)
        return {name: _train(strategy) for name, strategy in found.items()}

    results = launch(work, ranks=RANKS, quiet=True, verify=False, device="cpu", hang_after=60)
    return {name: ([sum(losses) / RANKS for losses in zip(*(r[name][0] for r in results),
                                                          strict=True)], results[0][name][1])
            for name in found}


def _train(strategy):
    module, optimizer = strategy(model(), torch.optim.AdamW, **SETTINGS)
    losses = train(module, optimizer, batches(STEPS)[:-1])
    with Traffic() as traffic:
        losses += train(module, optimizer, batches(STEPS)[-1:])
    return losses, traffic.calls


@functools.cache
def alone() -> list:
    """Losses of one process on the whole batches."""
    def work():
        whole, optimizer = strategies.plain(model(), torch.optim.AdamW, **SETTINGS)
        return train(whole, optimizer, batches(STEPS))

    return launch(work, ranks=1, quiet=True, device="cpu")[0]


@pytest.mark.parametrize("name", EVERYONE)
def test_the_same_losses_as_one_process_over_ten_steps(name):
    losses, _ = trained()[name]
    assert losses == pytest.approx(alone(), rel=2e-6)
    assert losses[-1] < losses[0] - 0.3


def passes(calls) -> dict:
    """kind -> how many times all parameters travel in these calls; an all-reduce counts twice."""
    found = {}
    for call in calls:
        weight = predicted.all_reduce(1, 2) / predicted.all_gather(1, 2) if (
            call.kind == "all_reduce") else 1
        found[call.kind] = found.get(call.kind, 0) + weight * call.elements
    return {kind: elements / models.count_trainable(model()) for kind, elements in found.items()}


@pytest.mark.parametrize(("name", "expected"), [
    ("ddp", {"all_reduce": 2}),
    ("zero_redundancy", {"all_reduce": 2, "broadcast": 1}),
    ("fsdp2", {"all_gather": 2, "reduce_scatter": 1}),
    ("fsdp2_no_reshard", {"all_gather": 1, "reduce_scatter": 1}),
    pytest.param("deepspeed1", {"all_reduce": 2, "all_gather": 1}, marks=needs_deepspeed),
    pytest.param("deepspeed2", {"all_reduce": 2, "all_gather": 1}, marks=needs_deepspeed),
])
def test_the_traffic_that_each_library_is_known_for(name, expected):
    assert passes(trained()[name][1]) == pytest.approx(expected, abs=1e-3)


@needs_deepspeed
def test_deepspeeds_third_stage_scatters_once_and_gathers_at_most_twice():
    found = passes(trained()["deepspeed3"][1])
    assert found["reduce_scatter"] == pytest.approx(1, abs=1e-3)
    assert 1 < found["all_gather"] <= 2 and found.get("all_reduce", 0) < 1e-3


@functools.cache
def reports() -> dict:
    """name -> a memory report of every rank, of the libraries."""
    found = {name: strategy for name, strategy in chosen().items() if name not in OURS}

    def work():
        torch.set_num_threads(1)
        return {name: _record(strategy) for name, strategy in found.items()}

    results = launch(work, ranks=RANKS, quiet=True, verify=False, device="cpu", hang_after=60)
    return {name: [result[name] for result in results] for name in found}


def _record(strategy):
    def build():
        return strategy(model(), torch.optim.AdamW, **SETTINGS)

    return memory.record(build, batches(2), held=strategies.resident_tensors)


@pytest.mark.parametrize(("name", "parameters", "gradients", "state"), [
    ("ddp", 1, 1, 2),
    ("zero_redundancy", 1, 1, 1),
    ("fsdp2", 1 / 2, 1 / 2, 1),
    ("fsdp2_no_reshard", 1 / 2, 1 / 2, 1),
    # besides the moments, a rank's copy of the weights that it updates
    pytest.param("deepspeed1", 1, 1 / 2, 3 / 2, marks=needs_deepspeed),
    pytest.param("deepspeed2", 1, 1 / 2, 3 / 2, marks=needs_deepspeed),
    pytest.param("deepspeed3", 1 / 2, 1 / 2, 3 / 2, marks=needs_deepspeed),
])
def test_bytes_are_found_wherever_a_library_keeps_them(name, parameters, gradients, state):
    size = 4 * models.count_trainable(model())
    held = [report.phases["backward"] for report in reports()[name]]
    # whole parameters are divided among the ranks: only their mean is even
    for want, got in ((parameters, "parameters"), (gradients, "gradients"),
                      (state, "optimizer_state")):
        mean = sum(getattr(memory, got) for memory in held) / RANKS
        assert mean == pytest.approx(want * size, rel=0.05), got


def test_a_peer_that_is_not_installed_is_one_clear_sentence(monkeypatch):
    monkeypatch.setattr(third_party, "has_deepspeed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match="DeepSpeed is not installed.*scripts/test"):
        strategies.deepspeed2(model(), torch.optim.AdamW)

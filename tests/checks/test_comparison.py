"""One comparison for all notebooks: what strategies hold and send on real ranks, and how fast."""

import pytest

from labs.checks.comparison import Measured, NotShown, compare, recorded_until
from labs.training import strategies
from labs.training.presets import preset

SMALL = preset("laptop", layers=2, hidden=32, heads=2, context=16, batch=2)


def kind_and_rank(module, optimizer, batch):
    import torch.distributed as dist

    return type(module).__name__, dist.get_rank(), len(batch["input_ids"])


@pytest.fixture(scope="module")
def found():
    return compare({"DDP": strategies.ddp, "FSDP2": strategies.fsdp2}, SMALL, losses=3, rounds=3,
                   repeat=2, observe=kind_and_rank)


def test_memory_of_one_rank_by_category(found):
    ddp, fsdp = (found.results[name].report.phases["backward"] for name in ("DDP", "FSDP2"))
    assert ddp.parameters >= 4 * found.parameters and ddp.optimizer_state >= 8 * found.parameters
    assert fsdp.parameters < 0.6 * ddp.parameters
    assert fsdp.optimizer_state < 0.6 * ddp.optimizer_state


def test_what_travels_in_a_step(found):
    assert found.results["DDP"].kinds.keys() == {"all_reduce"}
    assert found.results["DDP"].bytes["all_reduce"] == 4 * found.parameters
    assert found.communication_volume("DDP") == 2
    assert found.results["FSDP2"].kinds == {"all_gather": 6, "reduce_scatter": 3}


def test_the_losses_are_those_of_the_same_training(found):
    ddp, fsdp = (found.results[name].losses for name in ("DDP", "FSDP2"))
    assert len(ddp) == 3 and ddp == pytest.approx(fsdp, rel=1e-5)


def test_times_by_rank_and_round(found):
    result = found.results["DDP"]
    assert len(result.seconds_by_rank) == 2 and len(result.rounds) == 3
    assert found.tokens_per_second("DDP") == SMALL.tokens / result.seconds
    assert "by round" in result.slower_than(found.results["FSDP2"])


def test_a_time_is_said_with_its_bounds():
    quick, slow = (Measured(None, [], [], [rounds]) for rounds in ([2, 2, 4], [3, 2, 4]))
    assert slow.slower_than(quick) == "+50% (+0 to +50% by round)"


@pytest.mark.parametrize("rounds, factor, larger", [
    ([2, 2, 2, 2], 1, True), ([2, 2, 2, 2], 2.5, False), ([2, 2, 2, 0.5], 1, True),
    ([2, 2, 0.5, 0.5], 1, False), ([1, 1, 1, 1], 1, False)])
def test_an_effect_is_larger_than_the_noise(rounds, factor, larger):
    one = Measured(None, [], [], [[1, 1, 1, 1]])
    assert Measured(None, [], [], [rounds]).clearly_slower_than(one, factor) is larger


def test_a_recording_that_does_not_show_its_lesson_is_repeated_and_then_refused():
    recordings = iter([3, 1, 2, 5, 4, 6])
    assert recorded_until(lambda: next(recordings), lambda n: n < 2, "n is below 2") == 1
    with pytest.raises(NotShown, match="n is below 2 in none of 3 recordings: .* is too busy"):
        recorded_until(lambda: next(recordings), lambda n: n > 9, "n is below 2", tries=3)


def test_observations_are_made_on_every_rank(found):
    assert found.results["DDP"].observed == [("DistributedDataParallel", 0, 2),
                                             ("DistributedDataParallel", 1, 2)]


def test_it_says_what_it_found(found):
    words = repr(found)
    assert words.startswith(f"2 ranks, {found.parameters:,} parameters in {found.tensors} tensors")
    assert "DDP: " in words and "MB at the peak of a step, " in words and "tokens/s" in words


def test_memory_and_times_can_be_left_out():
    found = compare({"alone": strategies.plain}, SMALL, measure_memory=False)
    result = found.results["alone"]
    assert result.report is None and result.seconds is None and not result.calls
    assert found.tokens_per_second("alone") is None
    assert repr(found).endswith("alone: no collective")

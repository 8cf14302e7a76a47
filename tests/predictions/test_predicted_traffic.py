"""Predicted bytes against the sources, and against bytes counted on real ranks."""

import pytest
from _build.definitions import definitions

from labs.predictions.communication import traffic
from labs.start_here import recorded_collectives


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 1024])
def test_an_all_reduce_is_its_two_halves(ranks):
    size = 96
    halves = traffic.reduce_scatter(size, ranks) + traffic.all_gather(size, ranks)
    assert traffic.all_reduce(size, ranks) == pytest.approx(halves)
    assert halves == pytest.approx(2 * (ranks - 1) / ranks * size)


@pytest.mark.parametrize("function, factor", [
    (traffic.all_reduce, 2 * 7 / 8), (traffic.reduce_scatter, 7 / 8),
    (traffic.all_gather, 7 / 8)])
def test_factors_are_those_of_nccl_tests(function, factor):
    assert function(1, 8) == pytest.approx(factor)


@pytest.mark.parametrize("function", [traffic.all_reduce, traffic.reduce_scatter,
                                      traffic.all_gather])
def test_one_rank_alone_sends_nothing(function):
    assert function(1000, 1) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_real_ring_sends_what_is_predicted(warm_launcher, ranks):
    ring_all_gather = definitions("00_start_here", RANKS=4).ring_all_gather
    assert recorded_collectives.counted_bytes(ring_all_gather, ranks, 96) == [
        traffic.all_reduce(96, ranks)]


def test_no_ranks_make_no_sense():
    with pytest.raises(ValueError, match="at least 1 rank"):
        traffic.all_reduce(1, 0)


def stage_elements(stage: int, parameters: float, ranks: int, reshard: bool = True) -> float:
    """Elements that each rank sends in one step: 2Ψ or, with ZeRO-3, 3Ψ, times (N-1)/N."""
    times = sum(traffic.passes(kind) * often
                for kind, often in traffic.stage_passes(stage, reshard).items())
    return times * parameters * (ranks - 1) / ranks


def stage_bytes(stage: int, parameters: float, ranks: int, reshard: bool = True,
                gathered: int = 4, reduced: int = 4) -> float:
    """Bytes that each rank sends in one step; gathered, reduced: bytes of an element of the
    parameters and of the gradients as they travel (2 in bf16). An all-reduce carries gradients."""
    each = {"all_gather": gathered}
    return sum(traffic.passes(kind) * often * each.get(kind, reduced)
               for kind, often in traffic.stage_passes(stage, reshard).items()
               ) * parameters * (ranks - 1) / ranks


@pytest.mark.parametrize(("stage", "often"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_stages_send_two_or_three_times_all_parameters(stage, often):
    assert stage_elements(stage, 1000, 4) == pytest.approx(often * 1000 * 3 / 4)
    assert stage_bytes(stage, 1000, 4) == 4 * stage_elements(stage, 1000, 4)


def test_zero3_without_reshard_sends_what_zero2_sends():
    assert stage_elements(3, 7, 2, reshard=False) == stage_elements(2, 7, 2)


def test_zero3_that_gathers_in_bf16_sends_the_bytes_of_ddp_in_fp32():
    mixed = stage_bytes(3, 1000, 8, gathered=2, reduced=4)
    assert mixed == stage_bytes(0, 1000, 8) == traffic.all_reduce(4000, 8)


def test_a_stage_that_zero_does_not_have_is_refused():
    with pytest.raises(ValueError, match="stages 1, 2 and 3"):
        traffic.stage_passes(4)


def test_phases_together_are_the_step():
    for stage in range(4):
        for reshard in (True, False):
            kinds = sum(traffic.passes_by_phase(stage, reshard).values(), ())
            assert {kind: kinds.count(kind) for kind in kinds} == traffic.stage_passes(stage,
                                                                                       reshard)

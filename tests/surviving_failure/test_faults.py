"""Flipped bits and slow ranks: what is injected, and who notices."""

import random

import pytest
import torch
from _build.definitions import definitions

import labs.surviving_failure as lab
from labs.surviving_failure import find_straggler, flips, slow_ranks

right = definitions("08_surviving_failure")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64,
                                   torch.uint8])
def test_a_bit_flips_once_and_back(dtype):
    tensor = torch.arange(12).to(dtype).view(3, 4).t()
    before = lab.tensor_bytes(tensor)
    for bit in range(8 * tensor.element_size()):
        lab.flip_bit(tensor, 5, bit)
        after = lab.tensor_bytes(tensor)
        flipped = int.from_bytes(before, "little") ^ int.from_bytes(after, "little")
        assert flipped == 1 << (8 * tensor.element_size() * 5 + bit)
        lab.flip_bit(tensor, 5, bit)
    assert lab.tensor_bytes(tensor) == before


def test_zeros_of_no_dimension():
    tensor = torch.tensor(0.0)
    lab.flip_bit(tensor, 0, 31)
    assert torch.equal(tensor, torch.tensor(0.0)) and lab.tensor_bytes(tensor) == b"\0\0\0\x80"


def test_smooth_removes_an_outlier_and_keeps_a_step():
    assert lab.smooth([1, 1, 1, 9, 1, 1, 4, 4, 4, 4]) == [1, 1, 1, 1, 1, 4, 4, 4, 4, 4]


def test_all_ranks_of_a_synthetic_job_have_the_same_step():
    for job in find_straggler.jobs(random.Random(1)):
        for same in zip(*job.timings(1), strict=True):
            steps = [step.data + step.compute + step.collectives for step in same]
            assert max(steps) == pytest.approx(min(steps))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cause", find_straggler.CAUSES)
def test_every_draw_has_an_early_outlier_of_what_becomes_slow_later(seed, cause):
    """Else whoever returns the first slow step, outlier or not, passes by chance."""
    found = [job for job in find_straggler.jobs(random.Random(seed))
             if job.straggler and job.straggler[1] == cause and job.outliers
             and job.outliers[0][:2] == job.straggler[:2]
             and job.outliers[0][2] < job.straggler[2] - 4]
    assert found
    rank, _, step = found[0].outliers[0]
    of_rank = found[0].timings(seed)[rank or 0]
    assert getattr(of_rank[step], "collectives" if cause == "link" else cause) > 1


@pytest.mark.slow
def test_who_finds_a_flip(warm_launcher):
    """As the text says: the loss NaN alone, digests all others; by layout and moment."""
    flipped = flips.flip_every_bit(right.find_corrupt)
    missed = [bit for bit in flips.BITS if not flipped.found[bit]]
    assert missed == [30] and flipped.losses[30][-1] != flipped.losses[30][-1]
    found = flips.flip_gradients(right.find_corrupt)
    named = {f"module.{flips.WEIGHT}": [flips.CORRUPT]}
    assert found == {
        "nothing": (False, {}, False, False), "parameter": (True, named, False, False),
        "gradient, after the all-reduce": (True, named, False, False),
        "gradient, before it, low bit": (False, {}, False, True),
        "gradient, before it, high bit": (False, {}, True, True)}
    layouts = flips.flip_in_layouts(right.find_corrupt)
    said = [next(iter(said.values())) if said else said for said, _ in layouts.values()]
    assert said == [[flips.CORRUPT]] * 2 + [[]] * 2 + [None] * 2
    assert [changed for _, changed in layouts.values()] == [[flips.CORRUPT], []] * 3


@pytest.mark.slow
def test_recorded_stragglers_are_found(warm_launcher):
    """Those that nothing else on the machine has disturbed."""
    runs = slow_ranks.recorded_stragglers()
    assert list(runs) == list(slow_ranks.FAULTS)
    for run in runs.values():
        if run.is_clear:
            found = right.find_straggler(run.timings)
            assert (found and found[:2]) == (run.straggler and run.straggler[:2])

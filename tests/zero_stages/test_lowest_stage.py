"""What the check of exercise 3.9 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from zero_answers import accepted, named, rejected, right

import labs.zero_stages as lab
from labs.predictions import hardware
from labs.zero_stages import lowest_stage

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# 3.9 the lowest stage


def fits(stage, parameters, ranks, capacity, activations):
    return lab.state_bytes(parameters, ranks, stage) + activations <= capacity


class Stage:
    def nothing(*case):
        return None

    def always_3(*case):
        return 3

    def never_none(*case):
        return next((stage for stage in range(3) if fits(stage, *case)), 3)

    def the_highest(*case):
        return next((stage for stage in (3, 2, 1, 0) if fits(stage, *case)), None)

    def without_activations(parameters, ranks, capacity, activations):
        return right.lowest_stage(parameters, ranks, capacity, 0)

    def gibibytes(parameters, ranks, capacity, activations):
        return right.lowest_stage(parameters, ranks, capacity / 1e9 * 2**30, activations)

    def limits(parameters, ranks, capacity, activations):
        """4 times, 8 times, N times, as the tables say."""
        for stage, saving in enumerate((1, 4, 8, ranks)):
            if 16 * parameters / saving + activations <= capacity:
                return stage

    def no_stage_1(*case):
        return next((stage for stage in (0, 2, 3) if fits(stage, *case)), None)

    def one_rank(parameters, ranks, capacity, activations):
        return right.lowest_stage(parameters, 1, capacity, activations)

    def activations_divided(parameters, ranks, capacity, activations):
        return right.lowest_stage(parameters, ranks, capacity, activations / ranks)

    def activations_divided_from_stage_3(parameters, ranks, capacity, activations):
        for stage in range(4):
            share = activations / ranks if stage == 3 else activations
            if fits(stage, parameters, ranks, capacity, share):
                return stage

    def nearly_full(parameters, ranks, capacity, activations):
        return right.lowest_stage(parameters, ranks, 0.8 * capacity, activations)

    def capacity_of_all_ranks(parameters, ranks, capacity, activations):
        return right.lowest_stage(parameters, ranks, capacity * ranks, activations)

    def less_than(parameters, ranks, capacity, activations):
        return next((stage for stage in range(4) if lab.state_bytes(parameters, ranks, stage)
                     + activations < capacity), None)

    def minus_one(*case):
        stage = right.lowest_stage(*case)
        return -1 if stage is None else stage

    def a_name(*case):
        return f"ZeRO-{right.lowest_stage(*case)}"

    def a_bool(*case):
        return fits(0, *case)


@pytest.mark.parametrize("answer, words", [
    (Stage.nothing, "stage_too_high"),
    (Stage.always_3, "stage_too_high"),
    (Stage.never_none, "stage_too_low"),
    (Stage.the_highest, "stage_too_high"),
    (Stage.without_activations, "stage_too_low"),
    (Stage.gibibytes, "stage_too_low"),
    (Stage.limits, "stage_too_low"),
    (Stage.no_stage_1, "stage_too_high"),
    (Stage.one_rank, "stage_too_high"),
    (Stage.activations_divided, "stage_too_low"),
    (Stage.activations_divided_from_stage_3, "stage_too_low"),
    (Stage.nearly_full, "stage_too_high"),
    (Stage.capacity_of_all_ranks, "stage_too_low"),
    (Stage.less_than, "exact_fit_refused"),
    (Stage.minus_one, "not_a_stage"),
    (Stage.a_name, "not_a_stage 'ZeRO-0'"),
    (Stage.a_bool, "not_a_stage True")], ids=named)
def test_wrong_lowest_stage(answer, words):
    rejected(lab.check_lowest_stage(answer), words)


def lowest_by_min(*case):
    return min((stage for stage in range(4) if fits(stage, *case)), default=None)


def lowest_by_gigabytes(parameters, ranks, capacity, activations):
    """Subtracts, in GB."""
    room = capacity / 1e9 - activations / 1e9
    return next((stage for stage in range(4)
                 if lab.state_bytes(parameters, ranks, stage) / 1e9 <= room), None)


def lowest_by_numpy(*case):
    found = np.flatnonzero([fits(stage, *case) for stage in range(4)])
    return found[0] if len(found) else None


def lowest_by_tensor(*case):
    return None if right.lowest_stage(*case) is None else torch.tensor(right.lowest_stage(*case))


@pytest.mark.parametrize("answer", [right.lowest_stage, lowest_by_min, lowest_by_numpy,
                                    lowest_by_tensor, lowest_by_gigabytes])
def test_right_lowest_stage(answer):
    accepted(lab.check_lowest_stage(answer))


def test_the_cases_ask_for_every_stage():
    asked = {lowest_stage._lowest_that_fits(parameters, ranks, hardware.gpu(gpu).usable, 12e9)
             for parameters in lowest_stage.MODELS.values() for ranks in lowest_stage.RANKS
             for gpu in lowest_stage.GPUS}
    assert asked == {0, 1, 2, 3, None}

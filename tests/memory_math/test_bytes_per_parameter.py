"""What the check of exercise 1.2 must reject, and what it must accept."""

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))
# 1.2 bytes_per_parameter


class Bytes:
    def always_fp32(weights, gradients, moments, master):
        return 4, 4, 8

    def mixed_precision(weights, gradients, moments, master):
        return 2, 2, 12

    def table(weights, gradients, moments, master):
        size = {torch.float32: 4, torch.bfloat16: 2}
        return size[weights], size[gradients], 2 * size[moments] + 4 * master

    def master_is_a_weight(weights, gradients, moments, master):
        return weights.itemsize + 4 * master, gradients.itemsize, 2 * moments.itemsize

    def one_moment(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, moments.itemsize + 4 * master

    def master_forgotten(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 2 * moments.itemsize

    def master_always(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 2 * moments.itemsize + 4

    def moments_as_weights(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 2 * weights.itemsize + 4 * master

    def moments_as_fp32(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 8 + 4 * master

    def gradients_as_weights(weights, gradients, moments, master):
        return weights.itemsize, weights.itemsize, 2 * moments.itemsize + 4 * master

    def master_as_moments(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, (2 + master) * moments.itemsize

    def master_as_weights(weights, gradients, moments, master):
        state = 2 * moments.itemsize + master * weights.itemsize
        return weights.itemsize, gradients.itemsize, state

    def a_sum(weights, gradients, moments, master):
        return weights.itemsize + gradients.itemsize + 2 * moments.itemsize + 4 * master

    def in_bits(weights, gradients, moments, master):
        return weights.itemsize * 8, gradients.itemsize * 8, moments.itemsize * 16 + 32 * master


# 1.2, second half: recipes_behind


class Names:
    def the_first(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, billions, recipes)[:1]

    def one_name(gigabytes, billions, recipes):
        return next(iter(right.recipes_behind(gigabytes, billions, recipes)), "none")

    def none_for_none(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, billions, recipes) or None

    def exactly(gigabytes, billions, recipes):
        return [name for name, types in recipes.items()
                if sum(right.bytes_per_parameter(*types)) == gigabytes / billions]

    def nearly(gigabytes, billions, recipes):
        return [name for name, types in recipes.items() if abs(
            sum(right.bytes_per_parameter(*types)) * billions - gigabytes) < 0.1 * gigabytes]

    def of_7b(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, 7, recipes)

    def weights_alone(gigabytes, billions, recipes):
        return [name for name, types in recipes.items()
                if round(types[0].itemsize * billions) == gigabytes]

    def in_gib(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes * 2**30 / 1e9, billions, recipes)

    def types(gigabytes, billions, recipes):
        return [recipes[name] for name in right.recipes_behind(gigabytes, billions, recipes)]

    def the_notebooks(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, billions, right.RECIPES)

    def rounded_down(gigabytes, billions, recipes):
        return [name for name, types in recipes.items()
                if int(billions * sum(right.bytes_per_parameter(*types))) == gigabytes]


BYTES = [
    (Bytes.always_fp32, "wrong_number bfloat16"),
    (Bytes.mixed_precision, "wrong_number"),
    (Bytes.table, "raised_KeyError"),
    (Bytes.master_is_a_weight, "master_copy_counted_among_weights"),
    (Bytes.one_moment, "only_one_moment_counted"),
    (Bytes.master_forgotten, "fp32_master_copy_missing"),
    (Bytes.master_always, "no_master_copy"),
    (Bytes.moments_as_weights, "moments_taken_in_weights_type"),
    (Bytes.moments_as_fp32, "moments_taken_fp32"),
    (Bytes.gradients_as_weights, "weights_type"),
    (Bytes.master_as_moments, "master_copy_taken_in_moments"),
    (Bytes.master_as_weights, "master_copy_taken_in_weights"),
    (Bytes.a_sum, "wrong_count"),
    (Bytes.in_bits, "wrong_number")]
NAMES = [
    (Names.the_first, "missing_entry master'"),
    (Names.one_name, "wrong_type moments'"),
    (Names.none_for_none, "wrong_type nothing"),
    (Names.exactly, "missing_entry 'bf16'"),
    (Names.nearly, "extra_entry|missing_entry"),
    (Names.of_7b, "missing_entry 156"),
    (Names.weights_alone, "missing_entry"),
    (Names.in_gib, "missing_entry"),
    (Names.types, "unknown_name"),
    (Names.the_notebooks, "missing_entry|unknown_name"),
    (Names.rounded_down, "missing_entry 'bf16'")]
WRONG = [*(((answer, right.recipes_behind), expected) for answer, expected in BYTES),
         *(((right.bytes_per_parameter, answer), expected) for answer, expected in NAMES)]


@pytest.mark.parametrize("answers, expected", [
    pytest.param(answers, expected, id=f"{'-'.join(one.__name__ for one in answers)}")
    for answers, expected in WRONG])
def test_wrong(answers, expected):
    assert_rejected(lab.check_bytes_per_parameter(*answers), expected)


# right, and written in another way


class Right:
    def bytes_by_finfo(weights, gradients, moments, master):
        each = [torch.zeros((), dtype=kind).element_size() for kind in (weights, gradients)]
        return [*each, torch.zeros(2, dtype=moments).nbytes + [0, 4][master]]

    def bytes_as_tensor(weights, gradients, moments, master):
        return torch.tensor([weights.itemsize, gradients.itemsize, 2 * moments.itemsize]) + (
            torch.tensor([0, 0, 4]) * master)

    def bytes_as_array(weights, gradients, moments, master):
        return np.array([weights.itemsize, gradients.itemsize,
                         2 * moments.itemsize + 4 * bool(master)], dtype=np.uint8)

    def names_in_a_set(gigabytes, billions, recipes):
        return {name for name in recipes if abs(
            billions * sum(right.bytes_per_parameter(*recipes[name])) - gigabytes) <= 0.5}

    def names_one_by_one(gigabytes, billions, recipes):
        for name, (weights, gradients, moments, master) in recipes.items():
            each = weights.itemsize + gradients.itemsize + 2 * moments.itemsize + 4 * master
            if f"{each * billions:.0f}" == str(gigabytes):
                yield name

    def names_in_a_list(gigabytes, billions, recipes):
        return [name for name, types in recipes.items()
                if round(billions * sum(right.bytes_per_parameter(*types))) == gigabytes]


@pytest.mark.parametrize("answers", [
    *((answer, right.recipes_behind) for answer in (
        right.bytes_per_parameter, Right.bytes_by_finfo, Right.bytes_as_tensor,
        Right.bytes_as_array)),
    *((right.bytes_per_parameter, answer) for answer in (
        Right.names_in_a_set, Right.names_one_by_one, Right.names_in_a_list))])
def test_a_right_answer_passes(answers):
    verdict = lab.check_bytes_per_parameter(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_bytes_per_parameter, "1.2", functions=2)
    unfilled = lab.check_bytes_per_parameter(right.bytes_per_parameter, ...)
    assert unfilled.passed is None

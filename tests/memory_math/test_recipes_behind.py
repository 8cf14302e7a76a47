"""What the check of exercise 1.9 must reject, and what it must accept."""

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))


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


WRONG = [
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


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_recipes_behind(answer), expected)


# right, and written in another way


class Right:
    def names_in_a_set(gigabytes, billions, recipes):
        return {name for name in recipes if abs(
            billions * sum(right.bytes_per_parameter(*recipes[name])) - gigabytes) <= 0.5}

    def names_one_by_one(gigabytes, billions, recipes):
        for name, (weights, gradients, moments, master) in recipes.items():
            each = weights.itemsize + gradients.itemsize + 2 * moments.itemsize + 4 * master
            if f"{each * billions:.0f}" == str(gigabytes):
                yield name


@pytest.mark.parametrize("answer", [
    right.recipes_behind, Right.names_in_a_set, Right.names_one_by_one])
def test_a_right_answer_passes(answer):
    verdict = lab.check_recipes_behind(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_recipes_behind, "1.9")

"""What the check of exercise 1.7 must reject, and what it must accept."""

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))
# 1.7 rank_states


def states(**by_strategy):
    """A function of (count, ranks) for each strategy; the right answer where none is given."""
    def rank_states(count, strategy, ranks):
        answer = by_strategy.get(strategy)
        return answer(count, ranks) if answer else right.rank_states(count, strategy, ranks)

    return rank_states


WRONG = [((answer,), words) for answer, words in [
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 0)),
     # or 4 bytes more, when gloo's thread frees a number unseen
     "nothing_counted buffers"),
    (states(DDP=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 0)),
     "divided_ranks parameters"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n * r / 2)), "wrong_number 1.5x"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 8 * n / r)), "wrong_number 0.66"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n / r)),
     "divided_ranks"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 2 * n)), "in_16_bits DDP"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 8 * n * (r - 1) / r)), "wrong_number 1.333x"),
    (states(FSDP2=lambda n, r: (4 * n, 4 * n, 8 * n, 0)),
     "no_such_copy"),
    (states(FSDP2=lambda n, r: (4 * n / 2, 4 * n / 2, 8 * n / 2, 0)),
     "divided_by_2"),
    (states(FSDP2=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 4 * n)),
     "no_such_copy"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 4 * n, 0)), "one_moment"),
    (states(DDP=lambda n, r: (4 * n, 0, 8 * n, 4 * n)), "nothing_counted"),
    (states(DDP=lambda n, r: (8 * n, 4 * n, 8 * n, 0)), "wrong_number"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n / r, 4 * n)),
     "divided_ranks optimizer"),
    (states(FSDP2=lambda n, r: (4 * n, 4 * n / r, 8 * n / r, 0)), "no_such_copy"),
    (states(FSDP2=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 4 * n / r)),
     "divided_ranks FSDP2"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 12 * n, 0)), "wrong_number"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n)), "no_such_copy"),
    (states(plain=lambda n, r: {"parameters": 4 * n}), "wrong_count dict"),
    (states(plain=lambda n, r: (n, n, 2 * n, 0)), "counted_in_elements"),
    (states(plain=lambda n, r: (2 * n, 2 * n, 4 * n, 0)), "in_16_bits"),
    (states(plain=lambda n, r: (4 * n, 0, 8 * n, 0)), "nothing_counted"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 9 * n, 0)), "wrong_number"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 8 * n)), "wrong_count tuple")]]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_rank_states(*answers), expected)


# right, and written in another way


class Right:
    def states_as_array(count, strategy, ranks):
        return np.array(right.rank_states(count, strategy, ranks))

    def states_as_tensor(count, strategy, ranks):
        return torch.tensor(right.rank_states(count, strategy, ranks))

    def states_by_cases(count, strategy, ranks):
        size = 4 * count / (ranks if strategy == "FSDP2" else 1)
        return [size, size, 2 * size, size if strategy == "DDP" else 0]


@pytest.mark.parametrize("answers", [
    [Right.states_as_array],
    [Right.states_as_tensor],
    [right.rank_states],
    [Right.states_by_cases]])
def test_a_right_answer_passes(answers):
    verdict = lab.check_rank_states(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_rank_states, "1.7")

"""What the check of exercise 2.1 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from ddp_answers import (
    Answers,
    accepted,
    rejected,
    right,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
# 2.1 combine


class Combine:
    def plain_mean(gradients, sizes):
        return sum(gradients) / len(gradients)

    def plain_sum(gradients, sizes):
        return sum(gradients)

    def weights_not_normalised(gradients, sizes):
        return sum(g * n for g, n in zip(gradients, sizes, strict=True))

    def weights_by_the_largest(gradients, sizes):
        return sum(g * n / max(sizes) for g, n in zip(gradients, sizes, strict=True))

    def only_the_largest_shard(gradients, sizes):
        return gradients[sizes.index(max(sizes))]

    def a_list(gradients, sizes):
        return [g * n / sum(sizes) for g, n in zip(gradients, sizes, strict=True)]

    def nothing(gradients, sizes):
        return None

    def writes_into_the_first(gradients, sizes):
        result = gradients[0]
        result *= sizes[0] / sum(sizes)
        for gradient, size in zip(gradients[1:], sizes[1:], strict=True):
            result += gradient * (size / sum(sizes))
        return result

    def empties_the_sizes(gradients, sizes):
        total = sum(sizes)
        return sum(gradient * sizes.pop(0) / total for gradient in gradients)

    def in_float64(gradients, sizes):
        return sum(g.double() * (n / sum(sizes)) for g, n in zip(gradients, sizes, strict=True))

    def as_numpy(gradients, sizes):
        return np.average([g.numpy() for g in gradients], axis=0, weights=sizes)

    def divides_whole_numbers(gradients, sizes):
        return sum(g * (n // sum(sizes)) for g, n in zip(gradients, sizes, strict=True))

    def rounds_the_weights(gradients, sizes):
        return sum(g * round(n / sum(sizes), 2) for g, n in zip(gradients, sizes, strict=True))

    def of_twelve_examples(gradients, sizes):
        return sum(g * (n / 12) for g, n in zip(gradients, sizes, strict=True))

    def in_reverse(gradients, sizes):
        return Right.combine(gradients[::-1], sizes)

    def the_larger_the_less(gradients, sizes):
        return Right.combine(gradients, [1 / size for size in sizes])

    def mean_of_weighted(gradients, sizes):
        return right.combine(gradients, sizes) / len(gradients)

    def by_squares(gradients, sizes):
        return Right.combine(gradients, [size ** 2 for size in sizes])


    def absent_left_out(gradients, sizes):
        used = [(g, n) for g, n in zip(gradients, sizes, strict=True) if g is not None]
        return sum(g * n for g, n in used) / sum(n for _, n in used)

    def none_multiplied(gradients, sizes):
        return sum(g * (n / sum(sizes)) for g, n in zip(gradients, sizes, strict=True))

    def none_replaced_in_the_list(gradients, sizes):
        like = next(g for g in gradients if g is not None)
        for number, gradient in enumerate(gradients):
            if gradient is None:
                gradients[number] = torch.zeros_like(like)
        return Combine.none_multiplied(gradients, sizes)

    def stops_at_none(gradients, sizes):
        result = 0
        for gradient, size in zip(gradients, sizes, strict=True):
            if gradient is None:
                break
            result = result + gradient * (size / sum(sizes))
        return result

    def none_takes_a_place(gradients, sizes):
        """The sizes are no longer those of the gradients."""
        used = [gradient for gradient in gradients if gradient is not None]
        return sum(g * (n / sum(sizes)) for g, n in zip(used, sizes, strict=False))


WRONG = [
    (Combine.plain_mean, "unweighted_mean"),
    (Combine.plain_sum, "sum_not_mean gradients"),
    (Combine.weights_not_normalised, "wrong_scale 12x"),
    (Combine.weights_by_the_largest, "wrong_scale 1.5x"),
    (Combine.only_the_largest_shard, "wrong_gradient"),
    (Combine.a_list, "wrong_type list"),
    (Combine.nothing, "wrong_type nothing"),
    (Combine.writes_into_the_first, "changes_input gradient"),
    (Combine.empties_the_sizes, "changes_input changed"),
    (Combine.in_float64, "wrong_dtype"),
    (Combine.as_numpy, "wrong_type ndarray"),
    (Combine.divides_whole_numbers, "zero_gradient"),
    (Combine.rounds_the_weights, "wrong_gradient"),
    (Combine.of_twelve_examples, "wrong_scale 1.083x"),
    (Combine.in_reverse, "wrong_gradient"),
    (Combine.the_larger_the_less, "wrong_gradient"),
    (Combine.mean_of_weighted, "wrong_scale 0.3333x"),
    (Combine.by_squares, "wrong_gradient"),
    (Combine.absent_left_out, "absent_shard_left_out"),
    (Combine.none_multiplied, "raised_TypeError zeros"),
    (Combine.none_replaced_in_the_list, "changes_input"),
    (Combine.stops_at_none, "wrong_gradient"),
    (Combine.none_takes_a_place, "wrong_gradient|wrong_scale")]
WRONG_ANSWERS = Answers([(lab.check_combine, *row) for row in WRONG])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


# right, and written in another way


def zeros_for_none(answer):
    """An answer for gradients of which none is None."""
    def combine(gradients, sizes):
        like = next(gradient for gradient in gradients if gradient is not None)
        return answer([torch.zeros_like(like) if gradient is None else gradient
                       for gradient in gradients], sizes)

    return combine


class Right:
    def combine(gradients, sizes):
        weights = torch.tensor(sizes, dtype=torch.float32)
        return torch.tensordot(weights / weights.sum(), torch.stack(gradients), dims=1)

    def combine_by_a_loop(gradients, sizes):
        result = torch.zeros_like(gradients[0])
        for gradient, size in zip(gradients, sizes, strict=True):
            result += size * gradient
        return result / sum(sizes)

    def combine_with_numpys_weights(gradients, sizes):
        weights = np.array(sizes) / np.sum(sizes)
        return sum(g * weight for g, weight in zip(gradients, weights, strict=True))

    def combine_step_by_step(gradients, sizes):
        mean, seen = gradients[0], sizes[0]
        for gradient, size in zip(gradients[1:], sizes[1:], strict=True):
            seen += size
            mean = mean.lerp(gradient, size / seen)
        return mean


RIGHT = [right.combine, *map(zeros_for_none, (
    Right.combine, Right.combine_by_a_loop, Right.combine_with_numpys_weights,
    Right.combine_step_by_step))]
RIGHT_ANSWERS = Answers([(lab.check_combine, answer) for answer in RIGHT], ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))

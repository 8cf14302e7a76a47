"""Exercise 6.17, two steps correct a prediction: what its check rejects and accepts."""

from dataclasses import replace

import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab
from labs.scaling import calibrate as exercise

solution = definitions("06_scaling")
solved, corrected = solution.calibrate, solution.correct


def gpu(step, seconds):
    return (seconds - step.once) / step.micro_batches / (step.layers * step.kernels + step.head)


def host(step, seconds, factor):
    return ((seconds - step.once) / step.micro_batches - factor * step.head) / step.layers


def other(factor=gpu, launch=host):
    def answer(large, large_seconds, small, small_seconds):
        found = factor(large, large_seconds)
        return found, launch(small, small_seconds, gpu(large, large_seconds))
    return answer


class Answers:
    def nothing(large, large_seconds, small, small_seconds):
        return None

    def one_number(large, large_seconds, small, small_seconds):
        return gpu(large, large_seconds)

    def ratios(large, large_seconds, small, small_seconds):
        predicted = [step.micro_batches * (step.layers * step.kernels + step.head) + step.once
                     for step in (large, small)]
        return large_seconds / predicted[0], small_seconds / predicted[1]

    def swapped(large, large_seconds, small, small_seconds):
        return solved(large, large_seconds, small, small_seconds)[::-1]

    def from_the_small_one(large, large_seconds, small, small_seconds):
        return gpu(small, small_seconds), solved(large, large_seconds, small, small_seconds)[1]

    def the_large_one_twice(large, large_seconds, small, small_seconds):
        return solved(large, large_seconds, large, large_seconds)

    def changes_the_step(large, large_seconds, small, small_seconds):
        found = solved(large, large_seconds, small, small_seconds)
        object.__setattr__(large, "kernels", found[0] * large.kernels)
        return found

    def the_public_runs_numbers(large, large_seconds, small, small_seconds):
        return 1.08, 4.47e-3


WRONG = [
    (Answers.nothing, "wrong_count"),
    (Answers.one_number, "wrong_count"),
    (Answers.ratios, "whole_step"),
    (Answers.swapped, "wrong_number"),
    (Answers.from_the_small_one, "other_step"),
    (Answers.the_large_one_twice, "wrong_number"),
    (Answers.changes_the_step, "changes_input"),
    (Answers.the_public_runs_numbers, "wrong_number"),
    (other(factor=lambda step, seconds: 1.0), "not_corrected"),
    (other(factor=lambda step, seconds: 1 / gpu(step, seconds)), "inverted"),
    (other(factor=lambda step, seconds: gpu(replace(step, once=0), seconds)), "once_kept"),
    (other(factor=lambda step, seconds: gpu(replace(step, head=0), seconds)), "head_missing"),
    (other(factor=lambda step, seconds: gpu(replace(step, micro_batches=1), seconds)),
     "one_micro_batch"),
    (other(factor=lambda step, seconds: (
        (seconds - step.once) / step.micro_batches - step.head) / step.layers / step.kernels),
     "head_not_scaled"),
    (other(launch=lambda step, seconds, factor: host(step, seconds, 1)), "head_not_scaled"),
    (other(launch=lambda step, seconds, factor: host(step, seconds, 0)), "head_kept"),
    (other(launch=lambda step, seconds, factor: host(replace(step, once=0), seconds, factor)),
     "once_kept"),
    (other(launch=lambda step, seconds, factor: step.micro_batches * host(step, seconds, factor)),
     "one_micro_batch"),
    (other(launch=lambda step, seconds, factor: step.layers * host(step, seconds, factor)),
     "one_layer"),
    (other(launch=lambda step, seconds, factor: host(step, seconds, factor)
           - factor * step.kernels), "kernels_subtracted"),
    (other(launch=lambda step, seconds, factor: seconds / step.micro_batches / step.layers),
     "whole_step"),
    (other(factor=lambda step, seconds: (seconds - step.once) / (
        step.micro_batches * step.layers * step.kernels + step.head)), "head_once"),
    (other(launch=lambda step, seconds, factor: step.layers * step.micro_batches
           * host(step, seconds, factor)), "one_layer"),
    (other(launch=lambda step, seconds, factor: (seconds - step.once - step.micro_batches * (
        step.layers * step.kernels + step.head)) / step.micro_batches / step.layers),
     "difference"),
    (other(launch=lambda step, seconds, factor: 1e3 * host(step, seconds, factor)),
     "in_milliseconds")]


class Right:
    def by_bisection(large, large_seconds, small, small_seconds):
        def seconds(step, factor, launch):
            layer = max(factor * step.kernels, launch)
            return step.micro_batches * (step.layers * layer + factor * step.head) + step.once

        def solve(takes, wanted):
            low, high = 0.0, 100.0
            for _ in range(200):
                middle = (low + high) / 2
                low, high = (middle, high) if takes(middle) < wanted else (low, middle)
            return low

        factor = solve(lambda value: seconds(large, value, 0.0), large_seconds)
        return factor, solve(lambda value: seconds(small, factor, value), small_seconds)

    def as_a_list_of_tensors(large, large_seconds, small, small_seconds):
        return [torch.tensor(value, dtype=torch.float64) for value in solved(
            large, large_seconds, small, small_seconds)]

    def in_one_expression(large, large_seconds, small, small_seconds):
        factor = (large_seconds - large.once) / (
            large.micro_batches * large.layers * large.kernels + large.micro_batches * large.head)
        return (factor, (small_seconds - small.once - small.micro_batches * factor * small.head)
                / (small.micro_batches * small.layers))


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_calibrate(answer, corrected), expected)


@pytest.mark.parametrize("answer", [solved, Right.by_bisection, Right.as_a_list_of_tensors,
                                    Right.in_one_expression])
def test_right(answer):
    verdict = lab.check_calibrate(answer, corrected)
    assert verdict.passed is True, str(verdict)


class Corrected:
    def nothing(step, factor, launch):
        return None

    def a_dictionary(step, factor, launch):
        return vars(corrected(step, factor, launch))

    def as_it_was(step, factor, launch):
        return step

    def head_as_it_was(step, factor, launch):
        return replace(corrected(step, factor, launch), head=step.head)

    def launch_times_factor(step, factor, launch):
        return replace(corrected(step, factor, launch), launch=factor * launch)

    def divided(step, factor, launch):
        return replace(step, kernels=step.kernels / factor, head=step.head / factor, launch=launch)

    def launch_added(step, factor, launch):
        return replace(corrected(step, factor, launch), launch=step.launch + launch)

    def launch_as_predicted(step, factor, launch):
        return replace(corrected(step, factor, launch), launch=step.launch)

    def launch_like_kernels(step, factor, launch):
        return replace(corrected(step, factor, launch), launch=factor * step.launch)

    def once_too(step, factor, launch):
        return replace(corrected(step, factor, launch), once=factor * step.once)

    def in_place(step, factor, launch):
        object.__setattr__(step, "launch", launch)
        return corrected(step, factor, launch)


@pytest.mark.parametrize("answer, expected", [
    (Corrected.nothing, "no_step"), (Corrected.a_dictionary, "no_step"),
    (Corrected.as_it_was, "not_corrected"), (Corrected.head_as_it_was, "not_corrected head"),
    (Corrected.launch_times_factor, "launch_scaled"), (Corrected.divided, "inverted kernels"),
    (Corrected.launch_added, "launch_added"), (Corrected.launch_as_predicted, "not_corrected"),
    (Corrected.launch_like_kernels, "launch_scaled"),
    (Corrected.once_too, "wrong_number once"), (Corrected.in_place, "changes_input"),
    (lambda step: step, "wrong_signature")])
def test_wrong_corrections(answer, expected):
    assert_rejected(lab.check_calibrate(solved, answer), expected)


def test_a_correction_written_out():
    def spelled(step, factor, launch):
        return type(step)(step.name, step.layers, step.micro_batches, step.kernels * factor,
                          launch, step.head * factor, step.once)

    assert lab.check_calibrate(solved, spelled).passed is True


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_calibrate, "6.17", 2)


def test_two_steps_halve_the_error_on_the_other_model_too():
    """Said in the notebook: 1B's steps correct 8B's, and, in part, those on more GPUs."""
    factor, launch = solved(*exercise.public_case().arguments)
    assert factor == pytest.approx(1.08, abs=0.01) and launch == pytest.approx(4.47e-3, abs=1e-5)
    for found, share in ((exercise.others(), 0.5),
                         ([run for run in exercise.others() if "8B" in run.job.name], 0.5),
                         ([run for run in exercise.others(256) if run.gpus > 16], 0.5)):
        before = exercise._median_error(found, 1.0, 0.0)
        assert exercise._median_error(found, factor, launch) < share * before
    table = lab.show_calibrated(solved)
    assert [row[1] for row in table.rows] == [35, 20, 118]

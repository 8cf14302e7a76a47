"""Exercise 6.16, the seconds of a step: what its check must reject, and what it must accept."""

from statistics import median

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab
from labs.checks import guesses
from labs.checks.verdicts import Wrong
from labs.predictions.gpu_runs.scoreboard import predicted_seconds
from labs.scaling import gpu_steps, step_seconds

solved = definitions("06_scaling").step_seconds


def longer(step):
    return max(step.kernels, step.launch)


def wrong(layer=longer, often=lambda step: step.micro_batches, head=lambda step: step.head,
          once=lambda step: step.once):
    return lambda step: often(step) * (step.layers * layer(step) + head(step)) + once(step)


class Step:
    def nothing(step):
        return None

    def a_constant(step):
        return 2.35

    def host_beside_the_whole_step(step):
        gpu = step.micro_batches * (step.layers * step.kernels + step.head) + step.once
        return max(gpu, step.micro_batches * step.layers * step.launch)

    def host_of_one_layer(step):
        gpu = step.micro_batches * (step.layers * step.kernels + step.head) + step.once
        return gpu + max(0, step.launch - step.kernels)

    def host_beside_the_head_too(step):
        micro_batch = max(step.layers * step.kernels + step.head, step.layers * step.launch)
        return step.micro_batches * micro_batch + step.once

    def only_where_the_host_is_slower(step):
        return solved(step) if step.launch > step.kernels else 2 * solved(step)

    def once_in_each_layer(step):
        layer = longer(step) + step.once
        return step.micro_batches * (step.layers * layer + step.head)

    def one_layer(step):
        return step.micro_batches * (longer(step) + step.head) + step.once

    def changes_the_step(step):
        object.__setattr__(step, "launch", 0.0)
        return 1.0


WRONG = [
    (Step.nothing, "not_a_number"),
    (Step.a_constant, "wrong_number"),
    (wrong(layer=lambda step: step.kernels), "host_missing"),
    (wrong(layer=lambda step: step.launch), "kernels_missing"),
    (wrong(layer=lambda step: step.kernels + step.launch), "launch_added"),
    (wrong(layer=lambda step: min(step.kernels, step.launch)), "shorter_counted"),
    (wrong(often=lambda step: 1), "one_micro_batch"),
    (wrong(head=lambda step: 0), "head_missing"),
    (wrong(head=lambda step: step.head / step.micro_batches), "head_once"),
    (wrong(head=lambda step: step.layers * step.head), "head_in_layers"),
    (wrong(once=lambda step: 0), "once_missing"),
    (wrong(once=lambda step: step.micro_batches * step.once), "once_repeated"),
    (Step.once_in_each_layer, "once_repeated"),
    (Step.one_layer, "one_layer"),
    (lambda step: 1e3 * solved(step), "in_milliseconds"),
    (Step.host_beside_the_whole_step, "host_for_the_step"),
    (Step.host_of_one_layer, "launch_once"),
    (Step.host_beside_the_head_too, "wrong_number"),
    (Step.only_where_the_host_is_slower, "wrong_number"),
    (Step.changes_the_step, "changes_input"),
    (lambda: 1.0, "wrong_signature")]


class RightStep:
    def by_idle_time(step):
        """The GPU's seconds, and what it waits."""
        gpu = step.layers * step.kernels + step.head
        waits = step.layers * max(0.0, step.launch - step.kernels)
        return step.micro_batches * (gpu + waits) + step.once

    def by_a_loop(step):
        total = 0.0
        for _ in range(step.micro_batches):
            for _ in range(step.layers):
                total += step.launch if step.launch > step.kernels else step.kernels
            total += step.head
        return total + step.once

    def as_an_array(step):
        return np.maximum(step.kernels, step.launch) * step.layers * step.micro_batches + (
            step.head * step.micro_batches + step.once)

    def as_a_tensor(step):
        return torch.tensor(solved(step), dtype=torch.float64)


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_step_seconds(answer), expected)


@pytest.mark.parametrize("answer", [solved, *(getattr(RightStep, name) for name in vars(RightStep)
                                              if not name.startswith("_"))])
def test_right(answer):
    verdict = lab.check_step_seconds(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_step_seconds, "6.16")


def test_the_parts_are_those_of_the_planner():
    """Where GPU and host take as long, the planner's step is up to 9 % longer (`launch_wait`)."""
    for run in gpu_steps.runs():
        ratio = predicted_seconds(run) / gpu_steps.right_seconds(gpu_steps.step_of(run))
        assert 1 - 1e-9 < ratio < 1.09, run.id


def test_the_target_is_kept_and_missed_by_the_kernels_alone_where_the_host_is_slower():
    def error(answer, found):
        return median(abs(answer(gpu_steps.step_of(run)) / run.seconds - 1) for run in found)

    bound = [run for run in gpu_steps.runs(16)
             if gpu_steps.step_of(run).launch > gpu_steps.step_of(run).kernels]
    assert error(solved, gpu_steps.runs(16)) < step_seconds.BOUND / 100 < 0.2 < error(
        wrong(layer=lambda step: step.kernels), bound)


def test_what_the_notebook_says_of_the_two_steps():
    assert lab.measured_step("1B", 8, 16)[1] == pytest.approx(2.35, abs=0.005)
    assert lab.measured_step("1B", 8, 1)[1] == pytest.approx(9.42, abs=0.005)
    assert len(gpu_steps.runs(16)) == 57


def test_a_run_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(Wrong, match="no run of 1B on 16 GPUs with tensor=3"):
        lab.measured_step("1B", tensor=3, micro_batch=1)
    with pytest.raises(Wrong, match="no run of 70B"):
        lab.measured_step("70B", tensor=8, micro_batch=1)


def test_the_picture_has_both_errors_and_the_guess():
    guesses.guess("6.16", "seconds", 3)
    shown = repr(lab.show_steps(solved))
    assert "kernels alone: median error 8.5 % of 175 runs" in shown
    assert "your function: median error 3.4 %" in shown and "You guessed 3" in shown

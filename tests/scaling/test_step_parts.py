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
from labs.scaling import gpu_steps, step_parts

solved = definitions("06_scaling").step_parts


def wrong(**parts):
    """Some parts otherwise; each is a function of the step."""
    names = {name.split()[0]: name for name in gpu_steps.PARTS}
    return lambda step: solved(step) | {names[name]: part(step) for name, part in parts.items()}


def often(seconds):
    return lambda step: step.micro_batches * step.layers * seconds(step)


def longer(step):
    return max(step.kernels, step.launch)


class Step:
    def nothing(step):
        return None

    def the_sum(step):
        return sum(solved(step).values())

    def without_once(step):
        return {name: seconds for name, seconds in solved(step).items() if name != "once"}

    def host_beside_the_whole_step(step):
        gpu = step.micro_batches * (step.layers * step.kernels + step.head) + step.once
        return max(0, step.micro_batches * step.layers * step.launch - gpu)

    def host_beside_the_head_too(step):
        late = step.layers * (step.launch - step.kernels) - step.head
        return step.micro_batches * max(0, late)

    def changes_the_step(step):
        object.__setattr__(step, "launch", 0.0)
        return solved(step)


WRONG = [
    (Step.nothing, "not_a_dictionary"),
    (Step.the_sum, "not_a_dictionary"),
    (Step.without_once, "wrong_keys once"),
    (wrong(kernels=lambda step: 2.35), "wrong_number"),
    (wrong(waiting=lambda step: None), "not_a_number"),
    (wrong(waiting=lambda step: 0), "host_missing"),
    (wrong(waiting=often(lambda step: step.launch)), "launch_counted"),
    (wrong(waiting=often(lambda step: step.launch if step.launch > step.kernels else 0)),
     "launch_counted"),
    (wrong(waiting=often(lambda step: step.launch - step.kernels)), "below_zero"),
    (wrong(waiting=often(lambda step: abs(step.launch - step.kernels))), "both_ways"),
    (wrong(waiting=often(lambda step: max(0, step.kernels - step.launch))), "gpu_counted"),
    (wrong(waiting=often(longer)), "longer_counted"),
    (wrong(waiting=lambda step: max(0, step.launch - step.kernels)), "one_layer"),
    (wrong(waiting=Step.host_beside_the_whole_step), "host_for_the_step"),
    (wrong(waiting=Step.host_beside_the_head_too), "host_for_the_step"),
    (wrong(kernels=often(longer)), "longer_counted"),
    (wrong(kernels=often(lambda step: step.kernels + step.launch)), "launch_added"),
    (wrong(kernels=lambda step: step.layers * step.kernels), "one_micro_batch"),
    (wrong(kernels=lambda step: step.micro_batches * step.kernels), "one_layer"),
    (wrong(kernels=lambda step: step.micro_batches * (step.layers * step.kernels + step.head)),
     "head_added"),
    (wrong(head=lambda step: step.head), "one_micro_batch"),
    (wrong(head=often(lambda step: step.head)), "each_layer"),
    (wrong(head=lambda step: step.micro_batches * max(step.head, step.launch)), "host_in_head"),
    (wrong(once=lambda step: step.micro_batches * step.once), "each_micro_batch"),
    (wrong(once=often(lambda step: step.once)), "each_layer"),
    (wrong(once=lambda step: 0), "wrong_number"),
    (lambda step: {name: 1e3 * seconds for name, seconds in solved(step).items()},
     "in_milliseconds"),
    (lambda step: solved(step) if step.launch > step.kernels else {
        **solved(step), "kernels": 2 * solved(step)["kernels"]}, "wrong_number"),
    (Step.changes_the_step, "changes_input"),
    (lambda: {}, "wrong_signature")]


class RightStep:
    def by_lanes(step):
        """When the host has started a layer and the GPU has run it."""
        found = dict.fromkeys(gpu_steps.PARTS, 0.0)
        for _ in range(step.micro_batches):
            for _ in range(step.layers):
                found["kernels"] += step.kernels
                found["waiting for the host"] += max(step.launch, step.kernels) - step.kernels
            found["head"] += step.head
        return found | {"once": step.once}

    def as_arrays(step):
        count = np.array([step.layers * step.micro_batches] * 2 + [step.micro_batches, 1])
        each = np.array([step.kernels, np.maximum(0, step.launch - step.kernels), step.head,
                         step.once])
        return dict(zip(gpu_steps.PARTS, count * each, strict=True))

    def as_tensors(step):
        return {name: torch.tensor(seconds, dtype=torch.float64)
                for name, seconds in reversed(solved(step).items())}


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_step_parts(answer), expected)


@pytest.mark.parametrize("answer", [solved, *(getattr(RightStep, name) for name in vars(RightStep)
                                              if not name.startswith("_"))])
def test_right(answer):
    verdict = lab.check_step_parts(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_step_parts, "6.16")


def test_the_parts_are_those_of_the_planner():
    """Where GPU and host take as long, the planner's step is up to 9 % longer (`launch_wait`)."""
    for run in gpu_steps.runs():
        ratio = predicted_seconds(run) / gpu_steps.right_seconds(gpu_steps.step_of(run))
        assert 1 - 1e-9 < ratio < 1.09, run.id


def test_the_target_is_kept_and_missed_by_the_kernels_alone_where_the_host_is_slower():
    def error(answer, found):
        return median(abs(sum(answer(gpu_steps.step_of(run)).values()) / run.seconds - 1)
                      for run in found)

    bound = [run for run in gpu_steps.runs(16)
             if gpu_steps.step_of(run).launch > gpu_steps.step_of(run).kernels]
    assert error(solved, gpu_steps.runs(16)) < step_parts.BOUND / 100 < 0.2 < error(
        wrong(waiting=lambda step: 0), bound)


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
    assert "without the host: median error 8.5 % of 175 runs" in shown
    assert "your function: median error 3.4 %" in shown and "You guessed 3" in shown

"""Exercise 6.18, the fastest plan that fits: what its check rejects and accepts; its pictures."""

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab
from labs.checks import guesses
from labs.checks.verdicts import Wrong
from labs.scaling import card_pairs, gpu_steps, stall_charts
from labs.scaling import fastest as exercise

solution = definitions("06_scaling")
solved = solution.fastest


def seconds(plan):
    return sum(solution.step_parts(plan.step).values())


def choose(fits=lambda plan: plan.memory_high <= plan.free, key=seconds, near=1.05,
           last=lambda plan: plan.memory_high):
    def answer(plans):
        fitting = list(filter(fits, plans))
        least = min(map(key, fitting), default=0)
        return min((plan for plan in fitting if key(plan) <= near * least), key=last, default=None)
    return answer


def alone(key, fits=lambda plan: plan.memory_high <= plan.free):
    return lambda plans: min(filter(fits, plans), key=key, default=None)


class Answers:
    def nothing(plans):
        return None

    def the_first_that_fits(plans):
        return next((plan for plan in plans if plan.memory_high <= plan.free), None)

    def raises_where_none_fits(plans):
        return min((plan for plan in plans if plan.memory_high <= plan.free),
                   key=seconds)

    def a_name(plans):
        found = solved(plans)
        return found and found.name

    def the_slowest(plans):
        return max((plan for plan in plans if plan.memory_high <= plan.free),
                   key=seconds, default=None)

    def fastest_or_else_any(plans):
        return solved(plans) or min(plans, key=lambda plan: plan.memory, default=None)

    def sorts_the_list(plans):
        plans.sort(key=seconds)
        return solved(plans)

    def removes_from_the_list(plans):
        for plan in list(plans):
            if plan.memory_high > plan.free:
                plans.remove(plan)
        return solved(plans)


def but(*names):
    """Seconds without some parts."""
    return lambda plan: sum(value for name, value in solution.step_parts(plan.step).items()
                            if name not in names)


WRONG = [
    (Answers.nothing, "nothing_returned"),
    (Answers.the_first_that_fits, "slower_choice"),
    (Answers.raises_where_none_fits, "raised_ValueError"),
    (Answers.a_name, "no_plan"),
    (Answers.the_slowest, "slower_choice"),
    (Answers.fastest_or_else_any, "does_not_fit"),
    (Answers.sorts_the_list, "changes_input"),
    (Answers.removes_from_the_list, "changes_input"),
    (choose(fits=lambda plan: True), "no_limit"),
    (choose(fits=lambda plan: plan.memory <= plan.free), "bare_memory"),
    (choose(fits=lambda plan: plan.memory_high < plan.free), "strict_limit"),
    (choose(fits=lambda plan: plan.memory_high <= 80e9), "own_limit"),
    (alone(seconds), "fastest_alone"),
    (choose(near=1), "fastest_alone"),
    *((choose(near=near), "other_limit") for near in (1.04, 1.045, 1.055, 1.06, 1.07, 1.1)),
    (choose(near=1.5), "slower_choice"),
    (choose(last=lambda plan: -plan.memory_high), "most_memory"),
    (choose(last=lambda plan: plan.memory), "least_of_bare"),
    (choose(last=lambda plan: plan.memory_high - plan.memory), "least_interval"),
    (choose(last=lambda plan: 0), "first_alike"),
    (choose(last=lambda plan: plan.memory_high / plan.memory), "more_memory"),
    (alone(lambda plan: plan.memory_high), "least_alone"),
    (alone(lambda plan: -plan.memory_high), "slower_choice"),
    (choose(key=lambda plan: plan.step.kernels), "slower_choice"),
    (choose(key=lambda plan: plan.step.micro_batches), "slower_choice"),
    (choose(key=but("once")), "wrong_seconds"), (choose(key=but("head")), "wrong_seconds"),
    (choose(key=but("head", "once")), "wrong_seconds"),
    (choose(key=but("waiting for the host")), "wrong_seconds"),
    (choose(key=but("kernels")), "slower_choice"),
    (choose(key=lambda plan: max(solution.step_parts(plan.step).values())), "wrong_seconds"),
    (choose(key=lambda plan: seconds(plan) / plan.step.micro_batches), "wrong_seconds"),
    (choose(key=lambda plan: seconds(plan) - plan.step.head * (plan.step.micro_batches - 1)),
     "wrong_seconds")]


class Right:
    def by_a_loop(plans):
        shortest, best = None, None
        for plan in plans:
            if plan.memory_high <= plan.free:
                shortest = min(shortest or seconds(plan), seconds(plan))
        for plan in plans:
            if plan.memory_high <= plan.free and seconds(plan) <= 1.05 * shortest and (
                    best is None or plan.memory_high < best.memory_high):
                best = plan
        return best

    def by_sorting(plans):
        order = sorted((plan for plan in plans if plan.memory_high <= plan.free), key=seconds)
        near = [plan for plan in order if seconds(plan) / seconds(order[0]) <= 1.05]
        return sorted(near, key=lambda plan: plan.memory_high)[0] if near else None


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_fastest(answer), expected)


@pytest.mark.parametrize("answer", [solved, Right.by_a_loop, Right.by_sorting])
def test_right(answer):
    verdict = lab.check_fastest(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_fastest, "6.18")


def test_what_the_notebook_says_of_the_25_plans():
    """One plan would be chosen without its interval, and it ran out of memory."""
    plans, runs = lab.candidates(), gpu_steps.candidate_runs()
    assert len(plans) == 25 and sum(bool(run.ran) for run in runs) == 14
    bold = alone(seconds, fits=lambda plan: plan.memory <= plan.free)(plans)
    assert (not runs[plans.index(bold)].ran and "TP 2" in bold.name
            and bold.name.endswith("micro-batch 2"))
    chosen = runs[plans.index(solved(plans))]
    best = min(run.seconds for run in runs if run.seconds)
    assert chosen.ran and best / chosen.seconds > 0.95


def test_the_chosen_plan_of_every_list_ran():
    assert all(exercise._speed(*asked) > 0.95 for asked in exercise.PUBLIC)


def test_the_picture_has_every_plan_and_the_choice():
    guesses.guess("6.18", "plans that ran", 18)
    shown = repr(lab.show_fastest(solved))
    assert "14 of 25 plans ran; yours reaches 97 %" in shown and "You guessed 18" in shown
    assert shown.count("ran out of memory") == 11
    assert "yours ran out of memory" in repr(lab.show_fastest(choose(fits=lambda plan: True)))
    with pytest.raises(Wrong, match="no model '70B'"):
        lab.candidates("70B")


def test_one_job_on_two_cards_takes_the_same_memory_and_other_seconds():
    pairs = card_pairs.pairs()
    near = [pair for pair in pairs if abs(pair.memory - 1) <= card_pairs.NEAR]
    assert len(near) > 0.75 * len(pairs) > 40
    assert max(pair.seconds for pair in near) > 4.5
    assert all(pair.memory == 1 for pair in pairs if pair.card == "H200")
    # Said in the notebook: B200s were slower
    assert all(pair.seconds > 1.5 for pair in pairs if pair.card == "B200")
    assert "jobs take an H100's bytes within 3 %" in repr(lab.show_cards())


def test_a_pipeline_stalls_at_each_neighbour_or_not_at_all():
    rows = stall_charts.pipelines()
    between = [row for row in rows if 0.15 < row.missing < stall_charts.STALLED]
    assert len(between) < 0.05 * len(rows)
    shown = repr(lab.show_stalls())
    assert "0.6 s for each micro-batch with 2 stages, 1.2 s with more" in shown
    many = [row for row in rows if row.run.gpus == 512]
    assert sum(row.missing > stall_charts.STALLED for row in many) > 0.9 * len(many)
    fast, slow = stall_charts.farthest()
    assert slow.seconds > 40 * fast.seconds and fast.plan.sharding != slow.plan.sharding

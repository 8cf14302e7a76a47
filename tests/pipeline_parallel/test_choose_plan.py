"""What the check of exercise 7.25 must reject, and what it must accept."""

import pytest
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab
from labs.predictions.plans import memory, search

# 7.25 choose_plan


def right_plan(job, **settings):
    return search.fastest(job, **settings)


def of_those(allows):
    """The fastest of the plans that fit, have the settings and are allowed."""
    def answer(job, **settings):
        fitting = [plan for plan in search.plans(job) if allows(plan) and memory.fits(job, plan)
                   and search.has_settings(plan, settings)]
        return min(fitting, key=lambda plan: search.step_seconds(job, plan), default=None)

    return (answer,)


def filtered_last(job, **settings):
    """The settings are asked of the fastest plan alone."""
    plan = search.fastest(job)
    return plan if plan and search.has_settings(plan, settings) else None


def one_setting(job, **settings):
    """Only the last setting counts."""
    return search.fastest(job, **dict(list(settings.items())[-1:]))


def any_setting(job, **settings):
    """One of the settings is enough."""
    fitting = [plan for plan in search.plans(job) if memory.fits(job, plan) and (
        not settings or any(getattr(plan, name) == value for name, value in settings.items()))]
    return min(fitting, key=lambda plan: search.step_seconds(job, plan), default=None)


WRONG = [
    ((lambda job, **settings: search.fastest(job),), "setting_ignored"),
    (filtered_last, "nothing_returned"),
    (one_setting, "setting_ignored"),
    (any_setting, "setting_ignored"),
    ((lambda job: search.fastest(job),), "wrong_signature"),
    ((lambda job, settings=None: search.fastest(job),), "wrong_signature"),
    ((lambda job, **settings: next(plan for plan in search.plans(job) if search.has_settings(
        plan, settings)) if settings else search.fastest(job),), "slower_choice|does_not_fit"),
    ((lambda job: None,), "nothing_returned"),
    ((lambda job: min((plan for plan in search.plans(job) if memory.fits(job, plan)),
                      key=lambda plan: search.step_seconds(job, plan)),),
     "raised_ValueError None"),
    ((lambda job: "FSDP",), "wrong_type lab.Plan"),
    ((lambda job: lab.Plan(8, micro_batch=0),), "impossible_plan"),
    ((lambda job: lab.Plan(job.gpus / 1),), "impossible_plan 8.0"),
    ((lambda job: lab.Plan(8),), "slower_choice|impossible_plan"),
    ((lambda job: lab.Plan(job.gpus, sharding="DDP", recompute="none"),),
     "slower_choice|does_not_fit|impossible_plan"),
    ((lambda job: lab.Plan(job.gpus, sharding="FSDP", recompute="full"),), "slower_choice"),
    ((lambda job: min(search.plans(job), key=lambda plan: search.step_seconds(job, plan)),),
     "does_not_fit"),
    ((lambda job: next((plan for plan in search.plans(job) if memory.fits(job, plan)), None),),
     "slower_choice"),
    ((lambda job: max((plan for plan in search.plans(job) if memory.fits(job, plan)),
                      key=lambda plan: search.step_seconds(job, plan), default=None),),
     "slower_choice"),
    of_those(lambda plan: plan.pipeline == 1) + ("slower_choice",),
    of_those(lambda plan: plan.tensor == plan.context == 1) + ("slower_choice|nothing_returned",),
    of_those(lambda plan: plan.sharding != "FSDP") + ("slower_choice",),
    of_those(lambda plan: plan.sharding != "ZeRO-1") + ("slower_choice",),
    of_those(lambda plan: plan.chunks == 1) + ("slower_choice",),
    of_those(lambda plan: plan.chunks == 1 and plan.schedule == "1F1B")
    + ("slower_choice",),
    of_those(lambda plan: plan.recompute == "none") + ("slower_choice",),
    of_those(lambda plan: plan.micro_batch == 1) + ("slower_choice",),
    ((lambda job: lab.Plan(job.gpus // 4, pipeline=4, chunks=5, sharding="DDP")),
     "impossible_plan divided"),
    ((lambda job: lab.Plan(job.gpus // 4, pipeline=4, chunks=2, schedule="ZB-H1",
                           sharding="DDP")), "impossible_plan ZB-H1"),
    ((lambda job: lab.Plan(job.gpus, chunks=2, sharding="DDP")), "impossible_plan"),
    of_those(lambda plan: plan.context == 1) + ("slower_choice",),
    of_those(lambda plan: plan.sharding == "DDP") + ("slower_choice|nothing_returned",)]
WRONG = [case if isinstance(case[0], tuple) else ((case[0],), case[1])
                                for case in WRONG]
RIGHT = [
    (right_plan,),
    (lambda job, **settings: next((plan for _, _, plan in sorted(
        (search.step_seconds(job, plan), number, plan)
        for number, plan in enumerate(search.plans(job))
        if memory.fits(job, plan) and vars(plan) == vars(plan) | settings)), None),),
    of_those(lambda plan: plan.sharding != "HSDP")]  # 1.4 % slower at most: within the tolerance


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_choose_plan(*answers), expected)


@pytest.mark.parametrize("answers", RIGHT)
def test_right(answers):
    verdict = lab.check_choose_plan(*answers)
    assert verdict.passed is True, str(verdict)


def test_what_is_not_filled_in_waits():
    assert_waits(lab.check_choose_plan, "7.25")

"""What the check of exercise 7.24 must reject, and what it must accept."""

import pytest
import torch
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab
from labs.predictions.plans import memory

# 7.24 rank_memory


def right_memory(job, plan, stage):
    found = memory.rank_memory(job, plan, stage)
    return {name: found[name] for name in
            ("parameters", "gradients", "optimizer state", "activations")}


def parts(change):
    """An answer with other parts. change(found, job, plan, stage) -> name -> bytes."""
    def answer(job, plan, stage):
        found = right_memory(job, plan, stage)
        return found | change(found, job, plan, stage)

    return (answer,)


def states(found, factor):
    return {name: factor * found[name] for name in ("parameters", "gradients", "optimizer state")}


def without_ends(found, job, plan, stage):
    own = plan.layers(job, stage) * job.layer_parameters / plan.tensor
    kept = job.bytes_per_parameter
    return {"parameters": kept.parameters * own, "gradients": kept.gradients * own,
            "optimizer state": kept.optimizer_state * own / plan.data}


def in_flight(count):
    def change(found, job, plan, stage):
        one = found["activations"] / memory.in_flight(plan, job, stage)
        return {"activations": one * count(job, plan, stage)}

    return parts(change)


WRONG = [
    ((lambda job, plan, stage: None,), "not_a_dictionary|wrong_type"),
    ((lambda job, plan, stage: {},), "wrong_keys"),
    ((lambda job, plan, stage: dict.fromkeys(right_memory(job, plan, stage), 0),),
     "wrong_number parameters"),
    (parts(without_ends), "embedding_head_missing"),
    (parts(lambda found, job, plan, stage: states(found, plan.tensor)),
     "tensor_parallelism_not_cut"),
    (parts(lambda found, job, plan, stage: states(found, 1 / plan.data)),
     "cut_over_data_parallel_ranks"),
    (parts(lambda found, job, plan, stage: {
        "optimizer state": found["optimizer state"] * plan.data}), "zero_1_not_cut"),
    (parts(lambda found, job, plan, stage: {name: size / 1e9 for name, size in found.items()}),
     "wrong_unit"),
    (in_flight(lambda job, plan, stage: min(plan.pipeline - stage - 1, plan.micro_batches(job))),
     "one_micro_batch_too_few"),
    (in_flight(lambda job, plan, stage: min(plan.pipeline - stage + 1, plan.micro_batches(job))),
     "one_micro_batch_too"),
    (in_flight(lambda job, plan, stage: 1), "one_micro_batch"),
    (in_flight(lambda job, plan, stage: plan.micro_batches(job)), "all_micro_batches"),
    (in_flight(lambda job, plan, stage: plan.pipeline), "p_micro_batches_on_stage"),
    (in_flight(lambda job, plan, stage: plan.pipeline - stage), "more_micro_batches_than_step"),
    (in_flight(lambda job, plan, stage: min(stage + 1, plan.micro_batches(job))),
     "stages_counted_from_end"),
    # The number is that of a mistake which was not made, in the first case that shows it.
    (parts(lambda found, job, plan, stage: {"activations": 2 * found["activations"]}),
     "wrong_number 2x"),
    (parts(lambda found, job, plan, stage: {
        "activations": found["activations"] / plan.layers(job, stage)}), "one_layer")]
RIGHT = [
    (right_memory,),
    (lambda job, plan, stage: {name: torch.tensor(value, dtype=torch.float64) for name, value in
                               reversed(right_memory(job, plan, stage).items())},),
    (lambda job, plan, stage: {name: int(value) for name, value in
                               right_memory(job, plan, stage).items()},)]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_rank_memory(*answers), expected)


@pytest.mark.parametrize("answers", RIGHT)
def test_right(answers):
    verdict = lab.check_rank_memory(*answers)
    assert verdict.passed is True, str(verdict)


def test_what_is_not_filled_in_waits():
    assert_waits(lab.check_rank_memory, "7.24")

"""What the check of exercise 8.1 must reject, and accept: states of a job that lack a part, or have
another rank's."""

import copy
import io
import random
import sys

import cloudpickle
import gate
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, judge_all

from labs.surviving_failure.job_state import RANKS, check_job_state
from labs.workers.devices import random_states
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("08_surviving_failure")
zero3 = definitions("03_zero_stages").zero3


def changed(**parts):
    """job_state with other entries: name -> function of the job."""
    def job_state(job):
        return {**right.job_state(job), **{name: part(job) for name, part in parts.items()}}

    return job_state, right.load_job_state, zero3


def loaded_without(*parts):
    """load_job_state that leaves the new job's own in place of these entries of the state."""
    def load_job_state(job, state):
        own = right.job_state(job)
        right.load_job_state(job, {**state, **{part: own[part] for part in parts}})

    return right.job_state, load_job_state, zero3


def with_tensors(keep):
    """load_job_state that loads only the tensors for which keep(job, name) is true."""
    def load_job_state(job, state):
        own = job.tensors()
        tensors = {name: state["tensors"][name] if keep(job, name) else own[name].clone()
                   for name in own}
        right.load_job_state(job, {**state, "tensors": tensors})

    return right.job_state, load_job_state, zero3


def then(do):
    """The right answer, and do(job, state) after loading."""
    def load_job_state(job, state):
        right.load_job_state(job, state)
        do(job, state)

    return right.job_state, load_job_state, zero3


def of_rank_0(*parts):
    """load_job_state that takes these entries from rank 0."""
    def load_job_state(job, state):
        box = [state]
        dist.broadcast_object_list(box, 0)
        right.load_job_state(job, {**state, **{part: box[0][part] for part in parts}})

    return right.job_state, load_job_state, zero3


def saved_by_rank_0(job):
    return right.job_state(job) if dist.get_rank() == 0 else None


def load_from_rank_0(job, state):
    box = [state]
    dist.broadcast_object_list(box, 0)
    right.load_job_state(job, box[0])


def no_copy(job):
    return {"tensors": job.tensors(), "optimizer": job.optimizer.state_dict(),
            "scheduler": job.scheduler.state_dict(), "step": job.step,
            "data": (job.data.epoch, job.data.position),
            "torch": random_states(), "python": random.getstate()}


def moments_not_copied(job):
    state = no_copy(job)
    return {**state, "tensors": {name: value.clone() for name, value in state["tensors"].items()}}


def without_moments(job):
    return {**copy.deepcopy(job.optimizer.state_dict()), "state": {}}


def second_moment_lost(job, state):
    for each in job.optimizer.state.values():
        if "exp_avg_sq" in each:
            each["exp_avg_sq"].zero_()


def step_of_adam_lost(job, state):
    for each in job.optimizer.state.values():
        if "step" in each:
            each["step"].zero_()


def whole_module(job):
    return {**right.job_state(job), "tensors": copy.deepcopy(job.module.state_dict())}


def load_whole_module(job, state):
    job.module.load_state_dict(state["tensors"])
    right.load_job_state(job, {**state, "tensors": job.tensors()})


def seeds(job):
    torch.manual_seed(1)
    return right.job_state(job)


def is_trained(job, name):
    names = {name for name, _ in job.model.named_buffers()}
    names |= {name for name, p in job.model.named_parameters() if not p.requires_grad}
    return name not in names


WRONG = [
    ((lambda job: None, lambda job, state: None, zero3), "nothing_returned"),
    ((lambda job: {}, lambda job, state: None, zero3),
     "nothing_loaded"),
    ((right.job_state, lambda job, state: job.step, zero3), "nothing_loaded"),
    (loaded_without("optimizer", "scheduler", "step", "data", "torch", "python"),
     "exp_avg_not_restored schedule"),
    (changed(optimizer=without_moments), "exp_avg_not_restored"),
    (loaded_without("optimizer"), "exp_avg_not_restored"),
    (then(second_moment_lost), "exp_avg_sq_not_restored"),
    (then(step_of_adam_lost), "the_optimizer's_step_not_restored"),
    (loaded_without("torch"), "torch's_random_numbers_not_restored begins"),
    (loaded_without("python"), "Python's_random_numbers_not_restored"),
    (of_rank_0("torch", "python"), "torch's_random_numbers_not_restored Python's"),
    (then(lambda job, state: torch.rand(1)), "torch's_random_numbers_not_restored"),
    (changed(data=lambda job: (job.data.epoch, 0)), "position_not_restored"),
    (changed(data=lambda job: (0, job.data.position)), "epoch_not_restored"),
    (loaded_without("data"), "position_not_restored"),
    (loaded_without("scheduler"), "schedule_not_restored"),
    (then(lambda job, state: job.scheduler.step()), "learning_rate_not_restored"),
    (changed(step=lambda job: job.step + 1), "step_not_restored"),
    (changed(step=lambda job: job.step - 1), "step_not_restored"),
    (loaded_without("step"), "step_not_restored"),
    ((saved_by_rank_0, load_from_rank_0, zero3), "nothing_returned"),
    ((right.job_state, load_from_rank_0, zero3), "buffers_not_restored"),
    (of_rank_0("optimizer"), "exp_avg_not_restored FSDP2"),
    ((no_copy, right.load_job_state, zero3), "not_a_snapshot"),
    ((moments_not_copied, right.load_job_state, zero3), "not_a_snapshot 'optimizer'"),
    ((lambda job: copy.copy(no_copy(job)), right.load_job_state, zero3), "not_a_snapshot"),
    (with_tensors(is_trained), "frozen_parameters_not_restored"),
    (with_tensors(lambda job, name: name != "center"), "buffers_not_restored"),
    (with_tensors(lambda job, name: not is_trained(job, name)), "parameters_not_restored"),
    ((whole_module, load_whole_module, zero3), "full_tensor_gathered"),
    ((seeds, right.load_job_state, zero3), "state_changed"),
    (changed(extra=lambda job: lambda: 1), "cannot_be_saved"),
    (then(lambda job, state: job.module.eval()), "wrong_loss"),
]


class Right:
    def in_bytes(job):
        file = io.BytesIO()
        torch.save(no_copy(job), file)
        return file.getvalue()

    def from_bytes(job, state):
        right.load_job_state(job, torch.load(io.BytesIO(state), weights_only=False))

    def objects(job):
        return copy.deepcopy({**no_copy(job), "data": job.data})

    def from_objects(job, state):
        right.load_job_state(job, {**state, "data": (0, 0)})
        job.data = state["data"]

    def cpu_only(job):
        """Right where the check runs."""
        return {**right.job_state(job), "torch": torch.get_rng_state()}

    def from_cpu_only(job, state):
        right.load_job_state(job, {**state, "torch": [state["torch"]]})

    def modules(job):
        state = no_copy(job)
        if job.kind != "ZeRO-3":
            state["tensors"] = job.module.state_dict()
        return copy.deepcopy(state)

    def into_modules(job, state):
        if job.kind != "ZeRO-3":
            job.module.load_state_dict(state["tensors"])
            state = {**state, "tensors": job.tensors()}
        right.load_job_state(job, state)

    def skipping(job, state):
        """Draws the batches that were taken, then sets the random numbers."""
        right.load_job_state(job, {**state, "data": (state["data"][0], 0)})
        for _ in range(state["data"][1]):
            job.data.next_batch()
        random.setstate(state["python"])


RIGHT = [(Right.in_bytes, Right.from_bytes, zero3), (Right.objects, Right.from_objects, zero3),
         (Right.modules, Right.into_modules, zero3), (right.job_state, Right.skipping, zero3),
         (Right.cpu_only, Right.from_cpu_only, zero3)]


@pytest.fixture(autouse=True)
def the_same_on_all_ranks(monkeypatch):
    """Where the check itself runs on ranks, each draws when the job saves."""
    monkeypatch.setenv("WORKBOOK_SEED", "8")


def test_wrong_states():
    judge_all(check_job_state, WRONG, [], RANKS)


def test_right_states():
    launch(_judge_right, len(gate.some_of(RIGHT, 1)), ranks=RANKS, quiet=True, timeout=120)


def _judge_right(answers):
    from labs.surviving_failure import job_state

    for answer in RIGHT[:answers]:
        job_state._judge_states(job_state.Answer(*answer), 3)


@pytest.mark.slow
@pytest.mark.parametrize("answer", RIGHT[2:3])
def test_right_states_after_kills(answer, nothing_left):
    verdict = check_job_state(*answer)
    assert verdict.passed, str(verdict)


KEPT = {}


def keeps_in_memory(job):
    key = job.kind, job.step
    KEPT[key] = right.job_state(job)
    return key


def test_a_state_in_memory_is_gone_after_a_kill():
    def load(job, key):
        right.load_job_state(job, copy.deepcopy(KEPT[key]))

    assert_rejected(check_job_state(keeps_in_memory, load, zero3), "raised_KeyError")


def keeps_mode_in_memory(job):
    KEPT[job.kind] = job.module.training
    return right.job_state(job)


def test_what_no_state_shows_is_another_loss_after_a_kill():
    def load(job, state):
        right.load_job_state(job, state)
        job.module.train(KEPT.get(job.kind, False))  # a new process has no KEPT

    assert_rejected(check_job_state(keeps_mode_in_memory, load, zero3),
                    "wrong_loss killed")


def test_an_unfilled_one_waits():
    assert_waits(lambda unfilled: check_job_state(unfilled, right.load_job_state, zero3), "8.1")

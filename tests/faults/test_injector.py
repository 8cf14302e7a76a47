"""Faults by rank and step."""

import pickle
from functools import partial

import pytest
import torch.distributed as dist

from labs import launch
from labs.faults.injector import FaultInjector
from labs.workers.failures import RankFailed
from labs.workers.outcomes import Kind


def test_a_fault_is_due_on_its_rank_in_its_step_and_once():
    seen = []
    injector = FaultInjector().fail_at(1, 2, partial(seen.append, "second")).fail_at(
        None, 3, partial(seen.append, "all")).fail_at(1, 2, partial(seen.append, "and third"))
    for step in (1, 2, 2, 3):
        for rank in (0, 1):
            injector.check(rank, step)
    assert seen == ["second", "and third", "all"]


def test_several_jobs_take_turns():
    seen = []
    injector = FaultInjector().fail_at(0, (2, 1), partial(seen.append, "here"))
    for step in range(4):
        for turn in range(2):
            injector.check(0, (step, turn))
            if seen:
                assert (step, turn) == (2, 1)
                return
    raise AssertionError("no fault")


def train(injector):
    for step in range(3):
        dist.barrier()
        injector.check(dist.get_rank(), step)
    return "trained"


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_is_killed_in_its_step():
    injector = FaultInjector().fail_at(1, 1)
    assert pickle.loads(pickle.dumps(injector))._faults == injector._faults
    with pytest.raises(RankFailed) as raised:
        launch(train, injector, ranks=2, quiet=True)
    assert raised.value.outcomes[1].kind is Kind.KILLED
    assert launch(train, FaultInjector(), ranks=2, quiet=True) == ["trained"] * 2

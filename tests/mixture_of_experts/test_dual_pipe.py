"""What hides all-to-alls, simulated."""

import pytest

from labs.mixture_of_experts import dual_pipe
from labs.mixture_of_experts.dual_pipe import COMPUTES, SENDS, runs, simulate, tasks
from labs.mixture_of_experts.dual_pipe import show_dual_pipe as show

# of one layer and micro-batch: forward and backward of attention, experts and shared expert
COMPUTING = 3 * (1 + 1 + 0.5)
ALL = dual_pipe.LAYERS * dual_pipe.MICRO_BATCHES


def test_without_overlap_each_all_to_all_is_idle_time():
    run = runs()["nothing overlaps"]
    assert run.makespan == ALL * (COMPUTING + 4 * 0.5)
    assert run.idle == pytest.approx(4 * 0.5 / (COMPUTING + 4 * 0.5))


def test_the_shared_expert_hides_one_all_to_all_of_two():
    before, meanwhile, _ = runs().values()
    assert before.makespan - meanwhile.makespan == ALL * 2 * 0.5


def test_two_micro_batches_hide_all():
    run = runs()["two micro-batches take turns"]
    assert run.makespan == ALL * COMPUTING and run.idle == 0


@pytest.mark.parametrize("shared_meanwhile", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_run_is_possible(shared_meanwhile, together):
    """Every task once, after what it needs, and one at a time computing and sending."""
    todo = tasks(shared_meanwhile, together)
    run = simulate(todo)
    assert {id(task) for task, _, _ in run.spans} == set(map(id, todo))
    ends = {id(task): end for task, _, end in run.spans}
    for task, begin, end in run.spans:
        assert end - begin == task.duration
        assert all(ends[id(todo[one])] <= begin for one in task.after)
    for resource in (COMPUTES, SENDS):
        [spans] = run.timeline(resource).spans
        assert all(one.end <= other.begin for one, other in zip(spans, spans[1:], strict=False))


def test_the_picture_says_how_much_is_idle():
    picture = show()
    idle = [run.idle for run in picture.data.values()]
    assert idle == sorted(idle, reverse=True)
    for share in idle:
        assert f"{share:.0%}".replace("%", " %") in picture.text

"""Invariants: what is recorded on real ranks, and what is said where a limit is exceeded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.checks import invariants
from labs.checks.invariants import judge_memory, judge_recorded, positions, record_step
from labs.checks.verdicts import Wrong, verdict_of
from labs.meters import memory
from labs.meters.memory import PHASES, Report
from labs.training import data
from labs.training.memory_categories import Memory
from labs.training.models import DeepMLP
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch

pytestmark = pytest.mark.usefixtures("warm_launcher")


def on(ranks, fn, *args):
    return launch(fn, *args, ranks=ranks, quiet=True, device="cpu")


def holding(**held):
    return Report({phase: Memory(**held) for phase in PHASES}, Memory(), {
        phase: Memory() for phase in PHASES})


def judged(allowed, **held):
    def work():
        judge_memory(holding(**held), allowed, "under ZeRO-2", {
            "gradients": "free them", "rest": "a copy?"}, {"gradients": " (4Ψ/N)"})

    on(2, work)


def test_what_is_allowed_passes_to_the_byte():
    judged({"backward": {"gradients": 100, "rest": 30}}, gradients=100, buffers=20, other=10)


@pytest.mark.parametrize("phase, category, sentence, hint", [
    ("backward", "gradients", "100 bytes of gradients after backward; under ZeRO-2 on 2 ranks it "
     "is at most 99 (4Ψ/N)", "free them"),
    ("build", "rest", "30 bytes of activations, buffers and the rest after building; under ZeRO-2 "
     "on 2 ranks it is at most 29", "a copy?")])
def test_an_excess_is_said_with_its_limit(phase, category, sentence, hint):
    most = {"gradients": 99, "rest": 29}[category]
    with pytest.raises(RankFailed) as failed:
        judged({phase: {category: most}}, gradients=100, buffers=20, other=10)
    assert str(failed.value.cause) == f"rank {failed.value.rank} has allocated {sentence}"
    assert failed.value.cause.hint == hint


@pytest.mark.parametrize("held, recordings", [((9, 5, 5), 2), ((9, 9, 5), 3), ((5, 9, 9), 1)])
def test_memory_is_recorded_again_where_a_free_was_missed(held, recordings):
    def judge(report):
        # only rank 1 misses frees, and all ranks record again
        if dist.get_rank() == 1 and report.phases["backward"].total > 5:
            raise Wrong("too much", code="wrong")

    def work():
        tries = iter(held)
        judge_recorded(lambda: holding(other=next(tries)), judge)
        return len(held) - len(list(tries))

    assert on(2, work) == [recordings] * 2


def test_what_is_held_in_every_try_is_wrong():
    def judge(report):
        raise Wrong(f"{report.phases['backward'].total} bytes", code="wrong")

    def work():
        tries = iter([9, 7, 8, 1])
        judge_recorded(lambda: holding(other=next(tries)), judge)

    with pytest.raises(RankFailed) as failed:
        on(2, work)
    assert failed.value.cause.sentence == "7 bytes" and invariants.TRIES == 3


def test_a_steps_events_are_in_their_order():
    def work():
        model = DeepMLP(layers=2)

        def build(model):
            def average(parameter):
                dist.all_reduce(parameter.grad, async_op=True).wait()

            model.layers[1].weight.register_post_accumulate_grad_hook(average)
            gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
            model.register_forward_pre_hook(
                lambda *_: dist.all_gather(gathered, torch.ones(1), async_op=True).wait() and None)
            return model, torch.optim.SGD(nn.ModuleList(model.layers).parameters(), lr=0.1)

        events = record_step(build, model, data.xy_batches(2, 4), model.layers).events
        names = [getattr(event, "kind", None) or event.what for event in events]
        return positions(events, "backward"), positions(events, "wait all_gather"), names

    for (begin, end), waits, names in on(2, work):
        assert names[:begin] == ["all_gather", "wait all_gather", "compute", "compute"]
        assert waits == [1]
        backward = names[begin + 1:end]
        assert backward.count("compute") == 2 and len(names) == end + 1
        ready = backward.index("ready layers.1.weight")
        assert backward[ready + 1:ready + 3] == ["all_reduce", "wait all_reduce"]
        assert ready < backward.index("ready layers.0.weight")


def test_memory_outside_torch_is_rejected_with_its_line():
    class NumPySGD(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            self.copies = [p.detach().numpy().copy() for p in self.param_groups[0]["params"]]
            super().step()

    def work(optimizer_class):
        def build():
            model = DeepMLP(layers=2)
            return model, optimizer_class(model.parameters(), lr=0.1)

        judge_recorded(lambda: memory.record(build, data.xy_batches(2, 4), outside=True),
                       lambda report: None)

    on(2, work, torch.optim.SGD)
    with pytest.raises(RankFailed) as failed:
        on(2, work, NumPySGD)
    wrong = failed.value.cause
    # the copies of step 1 are still held in step 2
    assert wrong.sentence == "rank 0 holds 13,320 bytes outside torch's tensors after forward"
    assert "self.copies = " in str(verdict_of("3.1", failed.value))

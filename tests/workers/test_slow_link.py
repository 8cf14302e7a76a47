"""The slow link: every way to call a collective takes its time, really asynchronously, on real
ranks; it appears in the trace as it is; errors and deadlocks are found as without it."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist

from labs.workers.collectives import all_gather_single, reduce_scatter_single
from labs.workers.failures import RankFailed, RanksStuck
from labs.workers.launcher import launch
from labs.workers.slow_link import Link, link_bytes, proportional_link, read_label, slow_link

LINK = Link(bytes_per_second=4e6, latency=0.01)
RANKS, K = 2, 20_000  # K elements of float32 are 80 kB, 20 ms on this link
NBYTES = 4 * K


def test_a_ring_sends_all_parts_but_one():
    assert link_bytes("all_gather", 800, 4) == link_bytes("reduce_scatter", 800, 4) == 600
    assert link_bytes("all_reduce", 800, 4) == 1200
    assert link_bytes("broadcast", 800, 4) == 800
    assert link_bytes("all_reduce", 800, 1) == link_bytes("barrier", 0, 4) == 0
    assert Link(1e3, 0.5).seconds("all_gather", 800, 4) == pytest.approx(0.5 + 0.6)
    assert Link().seconds("all_reduce", 800, 4) == 0


@pytest.mark.parametrize("wrong", [{"bytes_per_second": 0}, {"latency": -1}])
def test_a_link_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="above 0"):
        Link(**wrong)


def test_labels_are_read_as_they_were_written():
    assert read_label("link:all_reduce of 12 elements, 48 bytes") == ("link:all_reduce", 12, 48)


def _calls() -> dict:
    """name -> (call, kind, bytes of the whole tensor)."""
    import torch.distributed._functional_collectives as functional

    whole, rank, group = torch.ones(K), dist.get_rank(), dist.group.WORLD
    part, parts = torch.ones(K // RANKS), list(torch.ones(K).chunk(RANKS))

    def empty():
        return [torch.empty(K // RANKS) for _ in range(RANKS)]

    def manager():
        with dist._coalescing_manager():
            dist.all_reduce(part)
            dist.all_reduce(part)

    return {
        "all_reduce": (lambda: dist.all_reduce(whole), "all_reduce", NBYTES),
        "functional all_reduce": (lambda: functional.all_reduce(whole, "sum", group) + 1,
                                  "all_reduce", NBYTES),
        "functional reduce_scatter": (lambda: functional.reduce_scatter_tensor(
            whole, "sum", 0, group) + 1, "reduce_scatter", NBYTES),
        "functional coalesced": (lambda: functional.all_reduce_coalesced(
            [part, part], "sum", group)[0] + 1, "all_reduce", NBYTES),
        "coalescing manager": (manager, "all_reduce", NBYTES),
        "all_gather": (lambda: all_gather_single(torch.empty(K), part), "all_gather", NBYTES),
        "list all_gather": (lambda: dist.all_gather(empty(), part), "all_gather", NBYTES),
        "reduce_scatter": (lambda: reduce_scatter_single(part, whole), "reduce_scatter", NBYTES),
        "list reduce_scatter": (lambda: dist.reduce_scatter(part, parts), "reduce_scatter",
                                NBYTES),
        "all_to_all": (lambda: dist.all_to_all_single(torch.empty(K), whole), "all_to_all",
                       NBYTES),
        "broadcast": (lambda: dist.broadcast(whole, 0), "broadcast", NBYTES),
        "gather": (lambda: dist.gather(part, empty() if rank == 0 else None, dst=0), "gather",
                   NBYTES),
        "scatter": (lambda: dist.scatter(part, parts if rank == 0 else None, src=0), "scatter",
                    NBYTES),
        "barrier": (dist.barrier, "barrier", 0),
        "direct": (lambda: group.allreduce([whole]).wait(), "all_reduce", NBYTES),
        "future": (lambda: dist.all_reduce(whole, async_op=True).get_future().wait(),
                   "all_reduce", NBYTES)}


def _on_ranks():
    torch.manual_seed(0)
    with slow_link(LINK) as usage:
        durations = {}
        for name, (call, kind, nbytes) in _calls().items():
            began = time.perf_counter()
            call()
            durations[name] = time.perf_counter() - began, LINK.seconds(kind, nbytes, RANKS)
    began = time.perf_counter()
    dist.all_reduce(torch.ones(K))
    return {"durations": durations, "usage": usage, "without": time.perf_counter() - began,
            "asynchronous": _asynchronous(), "trained": _trained(), "proportional": _proportional()}


def _asynchronous() -> dict:
    found, link = {}, Link(latency=0.1)
    with slow_link(link):
        began, cpu = time.perf_counter(), time.process_time()
        tensors = [torch.ones(3) for _ in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        found["issued"] = time.perf_counter() - began
        found["completed"] = [work.is_completed() for work in works]
        try:
            works[2].wait(datetime.timedelta(seconds=0.01))
        except RuntimeError as error:
            found["timeout"] = str(error)
        works[2].wait(datetime.timedelta(seconds=20))
        found["all"], found["cpu"] = time.perf_counter() - began, time.process_time() - cpu
        found["completed then"] = [work.is_completed() for work in works]
        found["values"] = [tensor.tolist() for tensor in tensors]
    return found


def _trained() -> dict:
    """Weights and traces of DDP and FSDP2, on the link and without it."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from labs.meters.trace_file import record_trace

    def fsdp(model):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module._set_unshard_async_op(True)
        return model

    def ddp(model):
        return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)

    def train(wrap, link=None):
        torch.manual_seed(0)
        model = wrap(torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(3))))
        data = torch.randn(20, 60) + dist.get_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            model(data).square().mean().backward()
            optimizer.step()

        step(), step()  # DDP makes its buckets anew after the first, and says so in the second
        if link is None:
            return step(), model
        with slow_link(link):
            return record_trace(step), model

    def weights(model):
        return [getattr(p, "full_tensor", p.detach)().detach() for p in model.parameters()]

    found = {}
    for wrap in (ddp, fsdp):
        _, usual = train(wrap)
        trace, slowed = train(wrap, LINK)
        found[wrap.__name__] = trace, all(map(torch.equal, weights(usual), weights(slowed)))
    return found


def _proportional():
    def step():
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        time.sleep(0.1)  # no computing
        dist.all_reduce(torch.ones(K))

    return proportional_link(step, share=2.0, latency_share=0.5)


@pytest.fixture(scope="module")
def found():
    return launch(_on_ranks, ranks=RANKS)


def test_every_way_to_call_a_collective_takes_its_time(found):
    for rank in found:
        too_quick = {name: (took, due) for name, (took, due) in rank["durations"].items()
                     if took < due}
        assert not too_quick
        calls = {name: due for name, (_, due) in rank["durations"].items()}
        assert rank["usage"].collectives == len(calls)
        assert rank["usage"].bytes == pytest.approx(
            sum(due - LINK.latency for due in calls.values()) * LINK.bytes_per_second)


def test_it_is_asynchronous_and_leaves_the_cores_free(found):
    for rank in found:
        one = rank["asynchronous"]
        assert one["issued"] < 0.1 and one["completed"] == [False] * 3
        assert "not complete after 0:00:00.01" in one["timeout"]
        # One after the other: the third is there after three times the latency.
        assert one["all"] >= 0.3 and one["completed then"] == [True] * 3
        assert one["values"] == [[RANKS] * 3] * 3
        assert one["cpu"] < 0.5 * one["all"]


@pytest.mark.parametrize(("strategy", "kinds"), [
    ("ddp", {"all_reduce": 3}), ("fsdp", {"all_gather": 6, "reduce_scatter": 3})])
def test_the_trace_shows_the_time_in_flight(found, strategy, kinds):
    for rank in found:
        trace, equal = rank["trained"][strategy]
        assert equal, "the link changed what is trained"
        assert {kind: len(trace.of(kind)) for kind in kinds} == kinds
        assert len(trace.collectives) == sum(kinds.values())
        for one in trace.collectives:
            assert one.bytes == 4 * one.elements >= 4 * 60 * 61
            assert one.issued <= one.begin
            assert one.seconds >= LINK.seconds(one.kind, one.bytes, RANKS)
        for before, after in zip(trace.collectives, trace.collectives[1:], strict=False):
            assert before.end <= after.begin, "two collectives on one link at once"
        # equal where a busy machine computed nothing meanwhile
        assert trace.exposed_seconds <= trace.seconds_of()["total"] < trace.seconds


def test_a_link_in_proportion_to_what_a_step_computes(found):
    [link] = {rank["proportional"] for rank in found}  # the same on all ranks
    computes = link.latency / 0.5
    assert 0.05 <= computes < 0.1
    assert link.seconds("all_reduce", NBYTES, RANKS) == pytest.approx(2.5 * computes)


def _rank_1_leaves(how):
    import torch.distributed._functional_collectives as functional

    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        raise ValueError("on purpose")
    for _ in range(100):
        if how == "exit":
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        else:
            functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1


def _rank_1_returns():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))


def test_errors_and_deadlocks_are_named_on_a_slow_link():
    with pytest.raises(RankFailed, match="rank 1 raised ValueError: on purpose"):
        launch(_rank_1_leaves, "raise", ranks=2, link=LINK)
    with pytest.raises(RankFailed, match="rank 1 ended its process with exit code 3"):
        launch(_rank_1_leaves, "exit", ranks=2, link=LINK)
    with pytest.raises(RanksStuck, match="rank 1 never joined all_reduce"):
        launch(_rank_1_returns, ranks=2, link=LINK)

"""The traffic meter records every collective once, whatever API it is called by, and every wait."""

import sys

import cloudpickle
import collective_apis as apis
import pytest
import torch
import torch.distributed as dist

from labs import launch
from labs.meters.collective_hooks import OPERATORS
from labs.meters.traffic import CollectiveCall, Traffic

cloudpickle.register_pickle_by_value(sys.modules["collective_apis"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
# Functions of torch.distributed that move no bytes between ranks of a group.
OTHERS = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group",
          "shrink_group", "init_process_group", "destroy_process_group", "record_comm",
          "reduce_op", "supports_complex", "default_pg_timeout", "group"}


def launched(work, ranks=apis.RANKS):
    return launch(work, ranks=ranks, quiet=True, device="cpu")


@pytest.fixture(scope="module")
def calls():
    """API -> by rank, (what it returned, (kind, elements, bytes, asynchronous) of its calls)."""
    def work():
        found = {}
        for name, (function, _) in apis.APIS.items():
            with Traffic() as traffic:
                kinds = function()
            found[name] = kinds, [(c.kind, c.elements, c.bytes, c.asynchronous)
                                  for c in traffic.calls], {c.ranks for c in traffic.calls}
        return found

    by_rank = launched(work)
    return {name: [found[name] for found in by_rank] for name in apis.APIS}


def test_what_is_never_waited_for():
    def work():
        found = {}
        for name, (function, _) in apis.APIS.items():
            with Traffic() as traffic, traffic.marked_waits():
                function()
                found[name] = traffic.never_waited_for()
        with Traffic() as traffic, traffic.marked_waits():
            forgotten = [dist.all_reduce(torch.ones(2), async_op=True),
                         dist.broadcast(torch.ones(2), 0, async_op=True)]
            forgotten[1].wait()
            found["forgotten"] = [call.kind for call in traffic.never_waited_for()]
        forgotten[0].wait()
        return found

    for found in launched(work):
        assert found.pop("forgotten") == ["all_reduce"]
        assert not any(found.values())


@pytest.mark.parametrize("name", apis.APIS)
def test_every_api_is_recorded_once(calls, name):
    for kinds, found, ranks in calls[name]:
        want = apis.APIS[name][1]
        if want[0][1] is None:  # objects: as many bytes as they are pickled to
            assert all(nbytes > 0 for _, _, nbytes, _ in found)
            found = [(kind, None, None, is_async) for kind, _, _, is_async in found]
        if kinds is not None:  # a rank of a ring may receive first
            found, want = sorted(found), sorted(want)
        assert found == want and ranks == {apis.RANKS}


def test_the_table_has_every_function_that_torch_distributed_exports():
    from torch.distributed import distributed_c10d

    functions = {name for name in distributed_c10d.__all__ if name.islower() and not
                 name.startswith(("get_", "is_"))} - OTHERS
    tried = "".join(name + " " for name in apis.APIS) + "irecv recv recv_object_list"
    assert [name for name in functions if name not in tried] == []


def test_every_operator_of_torchs_is_known():
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    found = {name.split("::")[1] for name in names if name.startswith("c10d::")}
    assert found - {"check_for_nan"} == set(OPERATORS)


def events_of(function):
    """On a rank: the kinds of the collectives of a function, and its marks, in order."""
    with Traffic() as traffic, traffic.marked_waits():
        function(lambda: traffic.mark("between"))
    return [getattr(event, "what", None) or event.kind for event in traffic.events], [
        event.call is traffic.calls[0] for event in traffic.events
        if getattr(event, "what", "").startswith("wait")]


def test_every_way_to_wait_is_marked_once():
    def work():
        return {name: events_of(function) for name, (function, _) in apis.WAITS.items()}

    [found, *_] = launched(work)
    want = ["all_reduce", "between", "wait all_reduce"], [True]
    assert found == {name: want for name in apis.WAITS}


def test_a_synchronous_call_waits_at_once_and_a_barrier_too():
    def work():
        return events_of(lambda _: (dist.all_reduce(torch.ones(1)), dist.barrier()))[0]

    assert launched(work)[0] == ["all_reduce", "wait all_reduce", "barrier", "wait barrier"]


def test_polls_between_other_events_are_no_waits():
    def work():
        def poll(mark):
            works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
            while works:
                mark()
                works = [work for work in works if not work.is_completed()]

        return set(events_of(poll)[0])

    assert launched(work) == [{"all_reduce", "between"}] * apis.RANKS


def test_the_wait_for_each_of_several_is_told_apart():
    def work():
        with Traffic() as traffic, traffic.marked_waits():
            works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 2, 3)]
            gathered = dist.all_gather([torch.ones(1) for _ in range(apis.RANKS)], torch.ones(1),
                                       async_op=True)
            for work in (works[1], gathered, works[0]):
                work.wait()
        return [(event.what, event.call.elements) for event in traffic.events
                if not isinstance(event, CollectiveCall)]

    assert launched(work)[1] == [("wait all_reduce", 2), ("wait all_gather", 3),
                                 ("wait all_reduce", 1)]


def test_what_torchs_ddp_calls_from_cpp_is_counted_too():
    def work():
        with Traffic() as traffic:
            module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 3))
            module(torch.ones(2, 10)).sum().backward()
        return [(c.kind, c.elements, c.bytes, c.asynchronous) for c in traffic.calls]

    # 10 x 3 weights and 3 biases, one bucket, 4 bytes each, broadcast first and then all-reduced
    found = launched(work, ranks=2)[0]
    assert found[-1] == ("all_reduce", 33, 132, True)
    assert ("broadcast", 33, 132, True) in found


def test_two_meters_see_the_same_calls_and_a_closed_one_none():
    def work():
        with Traffic() as outer:
            dist.all_reduce(torch.ones(1))
            with Traffic() as inner:
                dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4))
        return [[call.elements for call in traffic.calls] for traffic in (outer, inner)]

    assert launched(work, ranks=2)[0] == [[1, 2, 3], [2]]


def test_marks_keep_their_place_between_calls():
    def work():
        with Traffic() as traffic:
            traffic.mark("before")
            dist.all_reduce(torch.ones(1))
            traffic.mark("after")
        return [getattr(event, "what", None) or event.kind for event in traffic.events]

    assert launched(work, ranks=2)[0] == ["before", "all_reduce", "after"]

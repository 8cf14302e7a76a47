"""Every way to move bytes between ranks with torch.distributed, and every way to wait: what the
traffic meter must record of each. On 3 ranks; `SIX` is 6 float32 elements on each."""

import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS, SIX = 3, 6
APIS, WAITS = {}, {}


def six():
    return torch.ones(SIX)


def shard():
    return torch.ones(SIX // RANKS)


def neighbours():
    rank = dist.get_rank()
    return (rank + 1) % RANKS, (rank - 1) % RANKS


def group():
    return dist.group.WORLD


def backend():
    return group()._get_backend(torch.device("cpu"))


def api(*kinds, elements=SIX, asynchronous=False, element_size=4):
    """Registers a function that must be recorded as collectives of these kinds, each with so many
    elements (None: whatever the objects' bytes come to)."""
    def register(function):
        APIS[function.__name__] = function, [
            (kind, elements, None if elements is None else elements * element_size, asynchronous)
            for kind in kinds]
        return function

    return register


# torch.distributed's functions

@api("all_reduce")
def all_reduce():
    dist.all_reduce(six())


@api("all_reduce", asynchronous=True)
def all_reduce_async():
    dist.all_reduce(six(), async_op=True).wait()


@api("all_reduce", element_size=8)
def all_reduce_of_doubles():
    dist.all_reduce(six().double())


@api("all_reduce")
def all_reduce_of_a_part_of_a_tensor():
    dist.all_reduce(torch.ones(10, SIX)[3])


@api("broadcast")
def broadcast():
    dist.broadcast(six(), 0)


@api("reduce")
def reduce():
    dist.reduce(six(), 1)


@api("all_gather", elements=RANKS * SIX)
def all_gather():
    dist.all_gather([six() for _ in range(RANKS)], six())


@api("all_gather", elements=RANKS * SIX)
def all_gather_into_tensor():
    dist.all_gather_into_tensor(torch.empty(RANKS * SIX), six())


@api("all_gather", elements=RANKS * SIX)
def all_gather_single():
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(torch.empty(18), six())


@api("all_gather", elements=RANKS * SIX)
def all_gather_base():
    dist.distributed_c10d._all_gather_base(torch.empty(RANKS * SIX), six())


@api("all_gather", elements=RANKS * SIX, asynchronous=True)
def all_gather_async():
    dist.all_gather([six() for _ in range(RANKS)], six(), async_op=True).wait()


@api("all_gather", elements=2 * RANKS * SIX)
def all_gather_coalesced():
    lists = [[six() for _ in range(RANKS)] for _ in range(2)]
    dist.all_gather_coalesced([[a, b] for a, b in zip(*lists, strict=True)], [six(), six()])


@api("reduce_scatter")
def reduce_scatter():
    dist.reduce_scatter(shard(), list(six().chunk(RANKS)))


@api("reduce_scatter")
def reduce_scatter_tensor():
    dist.reduce_scatter_tensor(shard(), six())


@api("reduce_scatter")
def reduce_scatter_single():
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(shard(), six())


@api("reduce_scatter", asynchronous=True)
def reduce_scatter_async():
    dist.reduce_scatter_tensor(shard(), six(), async_op=True).wait()


@api("all_to_all")
def all_to_all():
    dist.all_to_all([shard() for _ in range(RANKS)], list(six().chunk(RANKS)))


@api("all_to_all")
def all_to_all_single():
    dist.all_to_all_single(six(), six())


@api("all_to_all", asynchronous=True)
def all_to_all_async():
    dist.all_to_all_single(six(), six(), async_op=True).wait()


@api("gather")
def gather():
    dist.gather(six(), [six() for _ in range(RANKS)] if dist.get_rank() == 1 else None, dst=1)


@api("scatter")
def scatter():
    dist.scatter(six(), [six() for _ in range(RANKS)] if dist.get_rank() == 1 else None, src=1)


@api("barrier", elements=0)
def barrier():
    dist.barrier()


@api("barrier", elements=0)
def monitored_barrier():
    dist.monitored_barrier()


@api("all_reduce", elements=3 * SIX)
def all_reduce_coalesced():
    dist.all_reduce_coalesced([six(), six(), six()])


@api("all_reduce", elements=3 * SIX)
def coalescing_manager():
    with _coalescing_manager():
        for _ in range(3):
            dist.all_reduce(six())


@api("all_gather", elements=2 * RANKS * SIX, asynchronous=True)
def coalescing_manager_async():
    with _coalescing_manager(async_ops=True) as manager:
        for _ in range(2):
            dist.all_gather_into_tensor(torch.empty(RANKS * SIX), six())
    manager.wait()


@api("reduce_scatter", elements=2 * SIX)
def coalescing_manager_with_reduce_scatter():
    with _coalescing_manager():
        for _ in range(2):
            dist.reduce_scatter_tensor(shard(), six())


# from rank to rank

@api("send", "recv")
def send():
    to, source = neighbours()
    # one after the other round the ring, rank 0 first
    for sender in range(RANKS):
        if dist.get_rank() == sender:
            dist.send(six(), to)
        elif source == sender:
            dist.recv(six(), source)
    return ("recv", "send") if dist.get_rank() else ("send", "recv")


@api("send", "recv", asynchronous=True)
def isend():
    to, source = neighbours()
    for work in (dist.isend(six(), to), dist.irecv(six(), source)):
        work.wait()


@api("send", "recv", asynchronous=True)
def recv_from_any_rank():
    sent = dist.isend(six(), neighbours()[0])
    dist.irecv(six()).wait()
    sent.wait()


@api("send", "recv", asynchronous=True)
def batch_isend_irecv():
    to, source = neighbours()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, six(), to),
                                        dist.P2POp(dist.irecv, six(), source)]):
        work.wait()


# objects: their sizes, then their bytes

@api("all_gather", "all_gather", elements=None)
def all_gather_object():
    dist.all_gather_object([None] * RANKS, {"a": 1})


@api("broadcast", "broadcast", elements=None)
def broadcast_object_list():
    dist.broadcast_object_list([{"a": 1}], 0)


@api("all_gather", "gather", elements=None)
def gather_object():
    dist.gather_object({"a": 1}, [None] * RANKS if dist.get_rank() == 0 else None, 0)


@api("broadcast", "scatter", "scatter", elements=None)
def scatter_object_list():
    dist.scatter_object_list([None], [1, 2, 3], 0)


@api("send", "send", "recv", "recv", elements=None)
def send_object_list():
    to, source = neighbours()
    for sender in range(RANKS):
        if dist.get_rank() == sender:
            dist.send_object_list([1], to)
        elif source == sender:
            dist.recv_object_list([None], source)
    return ("recv", "recv", "send", "send") if dist.get_rank() else APIS["send_object_list"][1]


# functional collectives, and what is made of them

@api("all_reduce", asynchronous=True)
def functional_all_reduce():
    functional.all_reduce(six(), "sum", group()) + 1


@api("broadcast", asynchronous=True)
def functional_broadcast():
    functional.broadcast(six(), 0, group()) + 1


@api("all_gather", elements=RANKS * SIX, asynchronous=True)
def functional_all_gather():
    functional.all_gather_tensor(six(), 0, group()) + 1


@api("all_gather", elements=RANKS * SIX, asynchronous=True)
def functional_all_gather_of_columns():
    functional.all_gather_tensor(torch.ones(2, 3), 1, group()) + 1


@api("reduce_scatter", asynchronous=True)
def functional_reduce_scatter():
    functional.reduce_scatter_tensor(six(), "sum", 0, group()) + 1


@api("all_to_all", asynchronous=True)
def functional_all_to_all():
    functional.all_to_all_single(six(), None, None, group()) + 1


@api("all_reduce", elements=2 * SIX, asynchronous=True)
def functional_all_reduce_coalesced():
    [t + 1 for t in functional.all_reduce_coalesced([six(), six()], "sum", group())]


@api("all_gather", elements=2 * RANKS * SIX, asynchronous=True)
def functional_all_gather_coalesced():
    found = functional.all_gather_into_tensor_coalesced([six(), six()], group())
    [t + 1 for t in found]


@api("reduce_scatter", elements=2 * SIX, asynchronous=True)
def functional_reduce_scatter_coalesced():
    found = functional.reduce_scatter_tensor_coalesced([six(), six()], "sum", [0, 0], group())
    [t + 1 for t in found]


@api("all_to_all", asynchronous=True)
def functional_permute():
    functional.permute_tensor(six(), [1, 2, 0], group()) + 1


@api("all_reduce", asynchronous=True)
def functional_all_reduce_in_place():
    functional.all_reduce_inplace(six(), "sum", group())


@api("all_gather", "reduce_scatter", elements=RANKS * SIX, asynchronous=True)
def functional_all_gather_with_its_backward():
    mine = six().requires_grad_()
    functional.all_gather_tensor_autograd(mine, 0, group()).sum().backward()


@api("all_reduce", asynchronous=True)
def operator():
    torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(six(), "sum", group().group_name))


@api("all_gather", elements=RANKS * SIX, asynchronous=True)
def dtensor_to_replicate():
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = distribute_tensor(torch.ones(RANKS * SIX), mesh, [Shard(0)], src_data_rank=None)
    whole.redistribute(placements=[Replicate()]).to_local() + 1


@api("all_reduce", "all_reduce", asynchronous=False)
def differentiable_all_reduce():
    differentiable.all_reduce(six().requires_grad_()).sum().backward()


# a group's methods, and its backend's

@api("all_reduce", asynchronous=True)
def groups_allreduce():
    group().allreduce([six()]).wait()


@api("all_reduce", asynchronous=True)
def groups_allreduce_of_one_tensor():
    group().allreduce(six()).wait()


@api("all_gather", elements=RANKS * SIX, asynchronous=True)
def groups_allgather():
    group().allgather([[six() for _ in range(RANKS)]], [six()]).wait()


@api("reduce_scatter", asynchronous=True)
def groups_reduce_scatter():
    group()._reduce_scatter_base(shard(), six()).wait()


@api("all_reduce", asynchronous=True)
def backends_allreduce():
    backend().allreduce([six()]).wait()


@api("all_reduce", asynchronous=False)
def backends_allreduce_by_keyword():
    options = dist.AllreduceOptions()
    options.asyncOp = False
    backend().allreduce(opts=options, tensors=[six()]).wait()


@api("all_reduce", elements=2 * SIX, asynchronous=True)
def backends_allreduce_coalesced():
    backend().allreduce_coalesced([six(), six()]).wait()


@api("broadcast", asynchronous=True)
def backends_broadcast():
    backend().broadcast(six(), 0).wait()


@api("reduce", asynchronous=True)
def backends_reduce():
    backend().reduce(six(), 0).wait()


@api("all_gather", elements=RANKS * SIX, asynchronous=True)
def backends_allgather():
    backend().allgather(input_tensor=six(), output_tensors=[six() for _ in range(RANKS)]).wait()


@api("all_gather", elements=RANKS * SIX, asynchronous=True)
def backends_allgather_base():
    backend()._allgather_base(torch.empty(RANKS * SIX), six()).wait()


@api("reduce_scatter", asynchronous=True)
def backends_reduce_scatter():
    backend()._reduce_scatter_base(shard(), six()).wait()


@api("all_to_all", asynchronous=True)
def backends_alltoall():
    backend().alltoall_base(six(), six(), [], []).wait()


@api("send", "recv", asynchronous=True)
def backends_send():
    to, source = neighbours()
    for work in (backend().send([six()], to, 0), backend().recv([six()], source, 0)):
        work.wait()


@api("barrier", elements=0, asynchronous=True)
def backends_barrier():
    backend().barrier().wait()


@api("all_reduce")
def all_reduce_on_another_thread():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as executor:
        executor.submit(dist.all_reduce, six()).result()


@api("all_reduce")
def all_reduce_in_backward():
    mine = six().requires_grad_()
    mine.register_hook(lambda gradient: dist.all_reduce(gradient.contiguous()))
    mine.sum().backward()


# Ways to wait for `work` of an all-reduce, or for the result of a functional one


def waits(function):
    WAITS[function.__name__] = function, "all_reduce"
    return function


@waits
def wait(mark):
    work = dist.all_reduce(six(), async_op=True)
    mark()
    work.wait()
    work.wait()


@waits
def wait_with_a_timeout(mark):
    from datetime import timedelta

    work = dist.all_reduce(six(), async_op=True)
    mark()
    work.wait(timedelta(seconds=30))


@waits
def synchronize(mark):
    work = dist.all_reduce(six(), async_op=True)
    mark()
    work.wait()
    work.synchronize()


@waits
def wait_of_the_future(mark):
    future = dist.all_reduce(six(), async_op=True).get_future()
    mark()
    future.wait()
    future.value()


@waits
def wait_of_a_future_made_by_then(mark):
    work = dist.all_reduce(six(), async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] / RANKS).then(lambda done: 1)
    mark()
    future.wait()


@waits
def wait_all(mark):
    future = dist.all_reduce(six(), async_op=True).get_future()
    mark()
    torch.futures.wait_all([future])


@waits
def collect_all(mark):
    future = torch.futures.collect_all([dist.all_reduce(six(), async_op=True).get_future()])
    mark()
    future.wait()


@waits
def polling(mark):
    work = dist.all_reduce(six(), async_op=True)
    mark()
    while not work.is_completed():
        pass


@waits
def polling_the_future_and_sleeping(mark):
    future = dist.all_reduce(six(), async_op=True).get_future()
    mark()
    while not future.done():
        time.sleep(0.001)


@waits
def wait_tensor(mark):
    result = functional.all_reduce(six(), "sum", group())
    mark()
    functional.wait_tensor(result)


@waits
def use_of_an_async_collective_tensor(mark):
    result = functional.all_reduce(six(), "sum", group())
    mark()
    result + 1
    result.sum()


@waits
def wait_of_the_groups_work(mark):
    work = group().allreduce([six()])
    mark()
    work.wait()


@waits
def wait_of_the_backends_work(mark):
    work = backend().allreduce([six()])
    mark()
    work.wait()


@waits
def wait_of_the_coalescing_manager(mark):
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(six())
    mark()
    manager.wait()


@waits
def wait_on_another_thread(mark):
    from threading import Thread

    work = dist.all_reduce(six(), async_op=True)
    mark()
    thread = Thread(target=work.wait)
    thread.start()
    thread.join()

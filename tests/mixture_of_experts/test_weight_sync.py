"""Weight syncs that exercise 9.14 must reject, and right ones written differently."""

import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, assert_waits
from torch import nn

from labs.mixture_of_experts.weight_sync import check_weight_sync

pytestmark = pytest.mark.usefixtures("warm_launcher")
STUCK = "collectives_differ|deadlock|no_progress"


def sync(model, trainers, generators, dtype, parts=lambda full, n: full.chunk(n), source=None,
         skip=lambda p: False, convert=lambda tensor, dtype: tensor.to(dtype)):
    rank, source = dist.get_rank(), trainers[0] if source is None else source
    for p in model.parameters():
        if skip(p):
            continue
        if rank not in trainers:
            dist.recv(p.data, source)
            continue
        full = convert(p.full_tensor().detach(), dtype)
        if rank == source:
            for generator, part in zip(generators, parts(full, len(generators)), strict=True):
                dist.send(part.contiguous(), generator)


def with_(**changes):
    return lambda *arguments: sync(*arguments, **changes)


def nothing(model, trainers, generators, dtype):
    pass


def gathers_on_the_sender(model, trainers, generators, dtype):
    """full_tensor() is a collective, to which only the sender comes."""
    rank = dist.get_rank()
    for p in model.parameters():
        if rank in generators:
            dist.recv(p.data, trainers[0])
        elif rank == trainers[0]:
            full = p.full_tensor().detach().to(dtype)
            for generator, part in zip(generators, full.chunk(len(generators)), strict=True):
                dist.send(part, generator)


def another_order_on_the_sender(model, trainers, generators, dtype):
    rank = dist.get_rank()
    parameters = list(model.parameters())
    for p in parameters if rank in (trainers[0], *generators) else parameters[::-1]:
        if rank in generators:
            dist.recv(p.data, trainers[0])
        else:
            full = p.full_tensor().detach().to(dtype)
            if rank == trainers[0]:
                for generator, part in zip(generators, full.chunk(len(generators)), strict=True):
                    dist.send(part, generator)


def own_shards(model, trainers, generators, dtype):
    """Two trainers send each generator the shards that they have: of 4, these are not its part."""
    rank = dist.get_rank()
    for p in model.parameters():
        if rank in generators:
            dist.recv(p.data, trainers[generators.index(rank)])
        elif trainers.index(rank) < len(generators):
            dist.send(p.to_local().detach().to(dtype), generators[trainers.index(rank)])


def complete_tensors(model, trainers, generators, dtype):
    rank = dist.get_rank()
    for p in model.parameters():
        if rank in trainers:
            full = p.full_tensor().detach().to(dtype)
            shape = torch.tensor(full.shape)
            for generator in generators if rank == trainers[0] else ():
                dist.send(torch.tensor(len(shape)), generator)
                dist.send(shape, generator)
                dist.send(full, generator)
        else:
            dims = torch.tensor(0)
            dist.recv(dims, trainers[0])
            shape = torch.zeros(int(dims), dtype=torch.int64)
            dist.recv(shape, trainers[0])
            full = torch.empty(shape.tolist(), dtype=dtype)
            dist.recv(full, trainers[0])
            p.data.copy_(full.chunk(len(generators))[generators.index(rank)])


def new_parameters(model, trainers, generators, dtype):
    sync(model, trainers, generators, dtype)
    if dist.get_rank() in generators:
        model[1].weight = nn.Parameter(model[1].weight.detach().clone(), requires_grad=False)


def trainers_converted(model, trainers, generators, dtype):
    sync(model, trainers, generators, dtype)
    if dist.get_rank() in trainers:
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().mul_(1.5)


def all_then_broadcast(model, trainers, generators, dtype):
    """Gathers all, then broadcasts each part in a group of the sender and one generator."""
    rank = dist.get_rank()
    groups = [dist.new_group([trainers[0], generator]) for generator in generators]
    fulls = [p.full_tensor().detach().to(dtype) if rank in trainers else p.data
             for p in model.parameters()]
    for number, (generator, group) in enumerate(zip(generators, groups, strict=True)):
        for full in fulls if rank in (trainers[0], generator) else ():
            part = full if rank == generator else full.chunk(len(generators))[number]
            dist.broadcast(part, trainers[0], group=group)


def at_once(model, trainers, generators, dtype):
    """isend and irecv, and only then waits."""
    rank, works = dist.get_rank(), []
    for p in model.parameters():
        if rank in generators:
            works.append((dist.irecv(p.data, trainers[0]), None))
            continue
        parts = p.full_tensor().detach().to(dtype).chunk(len(generators))
        if rank == trainers[0]:
            works += [(dist.isend(part, generator), part)
                      for generator, part in zip(generators, parts, strict=True)]
    for work, _ in works:
        work.wait()


WRONG = {
    "nothing": (nothing, "not_synced"),
    "full_tensor on the sender alone": (gathers_on_the_sender, STUCK),
    "another order on the sender": (another_order_on_the_sender,
                                    STUCK + "|rank_died different collectives"),
    "from rank 0": (with_(source=0), STUCK + "|raised_RuntimeError"),
    "not converted": (with_(convert=lambda tensor, dtype: tensor), "rank_died converted"),
    "shards as they are": (own_shards, "raised_RuntimeError|wrong_part|rank_died"),
    "complete tensors": (complete_tensors, "too_much_received"),
    "parts in the opposite order": (with_(parts=lambda full, n: [
        torch.cat([part, part])[:len(other)] for part, other in
        zip(full.chunk(n)[::-1], full.chunk(n), strict=True)]), "wrong_part"),
    "the first part to both": (with_(parts=lambda full, n: [
        full[:len(part)] for part in full.chunk(n)]), "wrong_part"),
    "matrices only": (with_(skip=lambda p: p.dim() == 1), "not_synced"),
    "always rounded": (with_(convert=lambda tensor, dtype: tensor.bfloat16().to(dtype)), "rounded"),
    "new parameters": (new_parameters, "parameter_replaced"),
    "changes the trainers": (trainers_converted, "trainer_changed"),
}
RIGHT = {"one parameter at a time": sync, "broadcasts": all_then_broadcast, "at once": at_once}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected(name):
    answer, expected = WRONG[name]
    assert_rejected(check_weight_sync(answer), expected)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(name):
    verdict = check_weight_sync(RIGHT[name])
    assert verdict.passed, str(verdict)


def test_the_solution_passes():
    verdict = check_weight_sync(definitions("09_mixture_of_experts").sync_weights)
    assert verdict.passed, str(verdict)


def test_it_waits_for_an_untouched_gap():
    assert_waits(check_weight_sync, "9.14")

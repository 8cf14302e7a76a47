"""What the checks of exercises 6.5 to 6.8 must reject, with the words that must say why; and what
they must accept."""

import sys
from functools import partial
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _build.definitions import definitions
from answers import assert_rejected
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labs.scaling as lab
from labs.predictions import strategy_choice
from labs.predictions.host_links import LinkTime, Topology, flat_all_reduce
from labs.predictions.strategy_choice import STRATEGIES, Links

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")
WRONG, RIGHT = {}, {}


# 6.5 link_seconds


def link_seconds(nbytes, seconds=lambda nbytes, alpha, beta: alpha + nbytes / beta):
    """An answer that computes the bytes from (size, hosts, ranks)."""
    def answer(size, hosts, ranks, alpha, beta):
        found = nbytes(size, hosts, ranks)
        return found, seconds(found, alpha, beta)

    return answer


def right_bytes(size, hosts, ranks):
    return right.link_seconds(size, hosts, ranks, 0, 1)[0]


def with_topology(size, hosts, ranks, alpha, beta):
    nbytes = flat_all_reduce(size, Topology(hosts, ranks))
    return [torch.tensor(float(nbytes), dtype=torch.float64), LinkTime(alpha, beta).seconds(nbytes)]


WRONG[lab.check_link_seconds] = [
    (lambda size, hosts, ranks, alpha, beta: None, "wrong_count nothing"),
    (lambda size, hosts, ranks, alpha, beta: right_bytes(size, hosts, ranks), "wrong_count"),
    (lambda size, hosts: (0, 0), "wrong_signature"),
    (link_seconds(lambda size, hosts, ranks: 1.5 * size), "wrong_number"),
    (link_seconds(lambda size, hosts, ranks: size), "tensor_itself"),
    (link_seconds(lambda size, hosts, ranks: 2 * size), "own_piece_too"),
    (link_seconds(lambda size, hosts, ranks: 2 * (hosts - 1) / hosts * size),
     "ring_one_rank_on_host"),
    (link_seconds(lambda size, hosts, ranks: 2 * (ranks - 1) / ranks * size),
     "ring_inside_one_host"),
    (link_seconds(lambda *case: right_bytes(*case) / 2), "reduce_scatter_alone"),
    (link_seconds(lambda *case: 2 * right_bytes(*case)), "counts_both_directions_together"),
    (link_seconds(lambda *case: case[2] * right_bytes(*case)), "all_ranks_host_send_together"),
    (link_seconds(lambda *case: case[1] * case[2] * right_bytes(*case)), "all_ranks_send_together"),
    (link_seconds(lambda size, hosts, ranks: 2 * (hosts * ranks - 1) / (hosts * ranks) * size),
     "on_one_host_no_byte"),
    (link_seconds(lambda size, hosts, ranks: int(right_bytes(size, hosts, ranks)) // 1000 * 1000),
     "wrong_number"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: nbytes / beta), "missing"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: alpha + 8 * nbytes / beta),
     "takes_for_bits_per_second"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: alpha + nbytes * beta),
     "multiplies"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: max(alpha, nbytes / beta)),
     "missing"),
    (lambda size, hosts, ranks, alpha, beta: (
        right_bytes(size, hosts, ranks),
        2 * (hosts * ranks - 1) * alpha + right_bytes(size, hosts, ranks) / beta),
     "wrong_steps"),
    (lambda size, hosts, ranks, alpha, beta: (right_bytes(size, hosts, ranks),
                                              alpha + size / beta), "size_not_bytes"),
    (link_seconds(lambda *case: right_bytes(*case) // 1 - 1), "wrong_number"),
    (lambda size, hosts, ranks, alpha, beta: (
        right.link_seconds(size, hosts, ranks, alpha, beta)[::-1]), "swapped"),
    (lambda size, hosts, ranks, alpha, beta: (alpha, right_bytes(size, hosts, ranks)),
     "wrong_number")]
RIGHT[lab.check_link_seconds] = [
    right.link_seconds, with_topology, link_seconds(lambda *case: int(right_bytes(*case)))]


# 6.6 hierarchical_all_reduce


def in_three_steps(tensor, mesh):
    total = tensor.clone()
    right.hierarchical_all_reduce(total, mesh)
    return total


class Hierarchical:
    def a_name_is_bound(tensor, mesh):
        tensor = in_three_steps(tensor, mesh)

    def without_a_group(tensor, mesh):
        """The all-reduce of the pieces runs over all ranks."""
        all_ranks = init_device_mesh("cpu", (dist.get_world_size(),))
        tensor.copy_(in_three_steps(tensor, {"inside": mesh["inside"], "across": all_ranks}))

    def not_waited_for(tensor, mesh):
        with mock.patch.object(dist, "all_reduce", partial(dist.all_reduce, async_op=True)):
            tensor.copy_(in_three_steps(tensor, mesh))

    def another_dtype(tensor, mesh):
        inside = mesh["inside"]
        padded = F.pad(tensor.flatten(), (0, -tensor.numel() % inside.size()))
        piece = torch.empty(len(padded) // inside.size())
        dist.reduce_scatter_tensor(piece, padded, group=inside.get_group())
        dist.all_reduce(piece, group=mesh["across"].get_group())
        dist.all_gather_into_tensor(padded, piece, group=inside.get_group())
        tensor.copy_(padded[:tensor.numel()].view_as(tensor))

    def flat(tensor, mesh):
        dist.all_reduce(tensor)

    def a_copy_is_returned(tensor, mesh):
        return in_three_steps(tensor, mesh)

    def inside_only(tensor, mesh):
        dist.all_reduce(tensor, group=mesh["inside"].get_group())

    def across_only(tensor, mesh):
        dist.all_reduce(tensor, group=mesh["across"].get_group())

    def two_whole_all_reduces(tensor, mesh):
        dist.all_reduce(tensor, group=mesh["inside"].get_group())
        dist.all_reduce(tensor, group=mesh["across"].get_group())

    def a_slice_of_a_whole_all_reduce(tensor, mesh):
        inside = mesh["inside"]
        flat = tensor.flatten()
        padded = F.pad(flat, (0, -len(flat) % inside.size()))
        dist.all_reduce(padded, group=inside.get_group())
        piece = padded.chunk(inside.size())[inside.get_local_rank()].clone()
        dist.all_reduce(piece, group=mesh["across"].get_group())
        dist.all_gather_into_tensor(padded, piece, group=inside.get_group())
        tensor.copy_(padded[:len(flat)].view_as(tensor))

    def dimensions_exchanged(tensor, mesh):
        tensor.copy_(in_three_steps(tensor, {"inside": mesh["across"], "across": mesh["inside"]}))

    def piece_over_all_ranks(tensor, mesh):
        pieces = F.pad(tensor.flatten(), (0, -tensor.numel() % dist.get_world_size()))
        piece = pieces.new_empty(len(pieces) // dist.get_world_size())
        dist.reduce_scatter_tensor(piece, pieces)
        dist.all_gather_into_tensor(pieces, piece)
        tensor.copy_(pieces[:tensor.numel()].view_as(tensor))

    def mean(tensor, mesh):
        total = in_three_steps(tensor, mesh)
        tensor.copy_((total / dist.get_world_size()).to(tensor.dtype))

    def without_padding(tensor, mesh):
        inside = mesh["inside"]
        flat = tensor.flatten()
        piece = flat.new_empty(len(flat) // inside.size())
        dist.reduce_scatter_tensor(piece, flat, group=inside.get_group())
        dist.all_reduce(piece, group=mesh["across"].get_group())
        dist.all_gather_into_tensor(flat, piece, group=inside.get_group())
        tensor.copy_(flat.view_as(tensor))

    def the_rest_is_left_out(tensor, mesh):
        ranks = mesh["inside"].size()
        whole = tensor.flatten()
        most = len(whole) // ranks * ranks
        if most:
            whole[:most] = in_three_steps(whole[:most].clone(), mesh)
        tensor.copy_(whole.view_as(tensor))

    def leaders_only(tensor, mesh):
        inside = mesh["inside"]
        leader = inside.mesh[0].item()
        dist.reduce(tensor, leader, group=inside.get_group())
        if dist.get_rank() == leader:
            dist.all_reduce(tensor, group=mesh["across"].get_group())
        dist.broadcast(tensor, leader, group=inside.get_group())

    def rank_0_is_left_out(tensor, mesh):
        total = in_three_steps(tensor, mesh)
        if dist.get_rank():
            tensor.copy_(total)

    def without_the_middle(tensor, mesh):
        inside = mesh["inside"]
        tensor.copy_(in_three_steps(tensor, {"inside": inside, "across": inside}))

    def gathered_everywhere(tensor, mesh):
        everyone = tensor.new_empty(dist.get_world_size() * tensor.numel())
        dist.all_gather_into_tensor(everyone, tensor.flatten())
        tensor.copy_(everyone.view(dist.get_world_size(), -1).sum(0).view_as(tensor))


WRONG[lab.check_hierarchical_all_reduce] = [
    (Hierarchical.a_name_is_bound, "not_in_place"),
    (Hierarchical.without_a_group,
     "wrong_group"),
    (Hierarchical.not_waited_for, "never_waited"),
    (Hierarchical.another_dtype, "raised_RuntimeError"),
    (Hierarchical.flat, "wrong_group 004"),
    (Hierarchical.a_copy_is_returned, "not_in_place"),
    (Hierarchical.inside_only, "wrong_result its"),
    (Hierarchical.across_only, "wrong_result place"),
    (Hierarchical.two_whole_all_reduces, "too_much_between_hosts"),
    (Hierarchical.a_slice_of_a_whole_all_reduce, "too_much_inside_hosts"),
    (Hierarchical.dimensions_exchanged, "too_much_between_hosts|wrong_group"),
    (Hierarchical.piece_over_all_ranks, "wrong_group"),
    (Hierarchical.mean, "wrong_result mean"),
    (Hierarchical.without_padding, "raised_RuntimeError zeros"),
    (Hierarchical.the_rest_is_left_out, "wrong_value 1001"),
    (Hierarchical.leaders_only, "too_much_between_hosts|too_much_inside_hosts"),
    (Hierarchical.rank_0_is_left_out, "not_in_place"),
    (Hierarchical.without_the_middle, "wrong_value|wrong_result"),
    (Hierarchical.gathered_everywhere, "wrong_group"),
    (lambda tensor: None, "raised_TypeError")]


def by_all_to_all(tensor, mesh):
    """The reduce-scatter as an exchange of pieces that each rank adds up."""
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    ranks = mesh["inside"].size()
    pieces = F.pad(tensor.flatten(), (0, -tensor.numel() % ranks)).view(ranks, -1)
    got = torch.empty_like(pieces)
    dist.all_to_all_single(got, pieces, group=inside)
    piece = got.sum(0)
    dist.all_reduce(piece, group=across, async_op=True).wait()
    found = [torch.empty_like(piece) for _ in range(ranks)]
    dist.all_gather(found, piece, group=inside)
    tensor.copy_(torch.cat(found)[:tensor.numel()].view_as(tensor))


def with_own_groups(tensor, mesh):
    """The four collectives of a ring, also between hosts: reduce-scatter and all-gather."""
    ranks, hosts = mesh["inside"].size(), mesh["across"].size()
    whole = F.pad(tensor.flatten(), (0, -tensor.numel() % (ranks * hosts)))
    groups, parts = [mesh["inside"].get_group(), mesh["across"].get_group()], [whole]
    for group, number in zip(groups, (ranks, hosts), strict=True):
        piece = whole.new_empty(len(parts[-1]) // number)
        dist.reduce_scatter_tensor(piece, parts[-1].contiguous(), group=group)
        parts.append(piece)
    for group, part, piece in zip(groups[::-1], parts[1::-1], parts[:0:-1], strict=True):
        dist.all_gather_into_tensor(part, piece, group=group)
    tensor.copy_(whole[:tensor.numel()].view_as(tensor))


def in_place(tensor, mesh):
    right.hierarchical_all_reduce(tensor, mesh)
    return tensor


RIGHT[lab.check_hierarchical_all_reduce] = [in_place, by_all_to_all, with_own_groups]


# 6.7 hybrid_shard


def host_mesh(hosts):
    return init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts),
                            mesh_dim_names=("across", "inside"))


def shard_all(model, mesh, **options):
    for block in lab.blocks(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


class Hybrid:
    def nothing(model, hosts):
        pass

    def places_for_too_many(model, hosts):
        shard_all(model, init_device_mesh("cpu", (hosts, dist.get_world_size())))

    def places_for_too_few(model, hosts):
        shard_all(model, init_device_mesh("cpu", (hosts, 2), mesh_dim_names=("a", "b")))

    def root_first(model, hosts):
        mesh = host_mesh(hosts)
        fully_shard(model, mesh=mesh)
        shard_all(model, mesh)

    def root_without_mesh(model, hosts):
        for block in lab.blocks(model):
            fully_shard(block, mesh=host_mesh(hosts))
        fully_shard(model)

    def flat(model, hosts):
        shard_all(model, init_device_mesh("cpu", (dist.get_world_size(),)))

    def default_mesh(model, hosts):
        shard_all(model, None)

    def dimensions_exchanged(model, hosts):
        ranks = dist.get_world_size() // hosts
        shard_all(model, init_device_mesh("cpu", (ranks, hosts), mesh_dim_names=("a", "b")))

    def one_row(model, hosts):
        shard_all(model, host_mesh(hosts)["inside"])

    def root_only(model, hosts):
        fully_shard(model, mesh=host_mesh(hosts))

    def blocks_only(model, hosts):
        for block in lab.blocks(model):
            fully_shard(block, mesh=host_mesh(hosts))

    def one_block_only(model, hosts):
        fully_shard(lab.blocks(model)[0], mesh=host_mesh(hosts))
        fully_shard(model, mesh=host_mesh(hosts))

    def not_resharded(model, hosts):
        shard_all(model, host_mesh(hosts), reshard_after_forward=False)

    def replicated_only(model, hosts):
        nn.parallel.DistributedDataParallel(model)

    def summed_by_hand(model, hosts):
        mesh = host_mesh(hosts)
        shard_all(model, mesh["inside"])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(
                p.grad.to_local(), group=mesh["across"].get_group()))

    def scaled_twice(model, hosts):
        shard_all(model, host_mesh(hosts))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.div_(hosts))


WRONG[lab.check_hybrid_shard] = [
    (Hybrid.nothing, "not_sharded"),
    (Hybrid.replicated_only, "not_sharded"),
    (Hybrid.places_for_too_many, "raised_RuntimeError each"),
    (Hybrid.places_for_too_few, "raised_IndexError each"),
    (Hybrid.root_first, "raised_RuntimeError blocks"),
    (Hybrid.root_without_mesh, "other_mesh"),
    (Hybrid.flat, "sharded_over_all_hosts"),
    (Hybrid.default_mesh, "sharded_over_all_hosts"),
    (Hybrid.dimensions_exchanged, "wrong_shards|wrong_group"),
    (Hybrid.one_row, "not_reduced_between_hosts"),
    (Hybrid.root_only, "wrong_units"),
    (Hybrid.blocks_only, "not_sharded"),
    (Hybrid.one_block_only, "wrong_units"),
    (Hybrid.not_resharded, "gathered_too_often"),
    (Hybrid.scaled_twice, "differs_from_reference"),
    (Hybrid.summed_by_hand, "not_reduced_between_hosts|differs_from_reference"),
    (lambda model: None, "raised_TypeError")]


def with_own_names(model, hosts):
    mesh = init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts),
                            mesh_dim_names=("replicate", "shard"))
    fully_shard([*model.layers][0], mesh=mesh)
    for layer in model.layers[1:]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def root_gathered_twice(model, hosts):
    shard_all(model, host_mesh(hosts))
    model.set_reshard_after_forward(True, recurse=False)


RIGHT[lab.check_hybrid_shard] = [right.hybrid_shard, with_own_names, root_gathered_twice]


# 6.8 choose_strategy


def kept(parameters, hosts, ranks, each=16):
    return {"DDP": each * parameters, "HSDP": each * parameters / ranks,
            "FSDP": each * parameters / (hosts * ranks)}


def modelled(parameters, hosts, ranks, inside, across):
    return {name: strategy_choice.step_seconds(name, parameters, Topology(hosts, ranks),
                                               Links(inside, across)) for name in STRATEGIES}


def rule(held=kept, seconds=modelled):
    """An answer: the fastest by `seconds` of those that `held` lets fit."""
    def answer(parameters, memory, hosts, ranks, inside, across):
        states = held(parameters, hosts, ranks)
        times = seconds(parameters, hosts, ranks, inside, across)
        fitting = [name for name in states if states[name] <= memory]
        return min(fitting, key=times.get) if fitting else None

    return answer


def without_a_link(parameters, memory, hosts, ranks, inside, across):
    """Right, and without an answer for a single GPU, which has no link."""
    slowest = min([across] * (hosts > 1) + [inside] * (ranks > 1))
    n, times = hosts * ranks, modelled(parameters, hosts, ranks, inside, across)
    times |= {"DDP": 4 * parameters * (n - 1) / n / slowest}
    return rule(seconds=lambda *_: times)(parameters, memory, hosts, ranks, inside, across)


def first_that_fits(parameters, memory, hosts, ranks, inside, across):
    return next((name for name, states in kept(parameters, hosts, ranks).items()
                 if states <= memory), None)


def fits_the_host(parameters, memory, hosts, ranks, inside, across):
    """The usual rule of thumb: DDP if it fits a GPU, HSDP between hosts if it fits a host."""
    if 16 * parameters <= memory:
        return "DDP"
    return "HSDP" if 16 * parameters <= ranks * memory and hosts > 1 else "FSDP"


def by_bytes_alone(parameters, hosts, ranks, inside, across):
    n = hosts * ranks
    return {"DDP": 2 * (n - 1) / n, "HSDP": 3 * (ranks - 1) / ranks + 2 * (hosts - 1) / hosts,
            "FSDP": 3 * (n - 1) / n}


def inside_is_free(parameters, hosts, ranks, inside, across):
    times = modelled(parameters, hosts, ranks, 1e30, across)
    return times if hosts > 1 else modelled(parameters, hosts, ranks, inside, across)


def always_across(parameters, hosts, ranks, inside, across):
    return modelled(parameters, hosts, ranks, across, across)


def ring_at_the_speed_across(parameters, hosts, ranks, inside, across):
    n, times = hosts * ranks, modelled(parameters, hosts, ranks, inside, across)
    return {**times, "DDP": 4 * parameters * (n - 1) / n / across,
            "FSDP": 6 * parameters * (n - 1) / n / across}


def one_card_for_each_gpu(parameters, hosts, ranks, inside, across):
    """Takes `across` as the rate of one of a host's cards."""
    return modelled(parameters, hosts, ranks, inside, ranks * across)


def a_share_of_the_card(parameters, hosts, ranks, inside, across):
    """Divides the host's link by its ranks in a ring, of which one edge passes it."""
    times = modelled(parameters, hosts, ranks, inside, across / ranks)
    return times | {"HSDP": modelled(parameters, hosts, ranks, inside, across)["HSDP"]}


def hsdp_if_it_fits(parameters, memory, hosts, ranks, inside, across):
    """DDP or HSDP by seconds, and FSDP only where neither fits: right on slow links."""
    times = modelled(parameters, hosts, ranks, inside, across)
    states = kept(parameters, hosts, ranks)
    fitting = [name for name in ("DDP", "HSDP") if states[name] <= memory]
    return min(fitting, key=times.get) if fitting else (
        "FSDP" if states["FSDP"] <= memory else None)


def two_passes(parameters, hosts, ranks, inside, across):
    times = modelled(parameters, hosts, ranks, inside, across)
    return {**times, "FSDP": 2 / 3 * times["FSDP"]}


WRONG[lab.check_choose_strategy] = [
    (lambda *case: None, "nothing_returned DDP"),
    (lambda *case: "DDP", "does_not_fit|slower_choice"),
    (lambda *case: "HSDP", "slower_choice|does_not_fit"),
    (lambda *case: "FSDP", "slower_choice"),
    (lambda *case: "ZeRO-2", "unknown_name 'ZeRO-2'"),
    (lambda *case: 1, "unknown_name"), (lambda parameters: "DDP", "wrong_signature"),
    (first_that_fits, "slower_choice"),
    (fits_the_host, "slower_choice|does_not_fit"),
    (rule(held=lambda *case: kept(*case, each=2)), "does_not_fit"),
    (rule(held=lambda *case: kept(*case, each=12)), "does_not_fit"),
    (rule(held=lambda *case: kept(*case, each=18)), "nothing_returned|slower_choice"),
    (rule(held=lambda *case: dict.fromkeys(STRATEGIES, 0)), "does_not_fit"),
    (rule(held=lambda parameters, hosts, ranks: {
        **kept(parameters, hosts, ranks), "HSDP": 16 * parameters / hosts}),
            "does_not_fit|slower_choice"),
    (rule(seconds=by_bytes_alone), "slower_choice"),
    (rule(seconds=inside_is_free), "slower_choice"),
    (rule(seconds=always_across), "slower_choice"),
    (rule(seconds=ring_at_the_speed_across), "slower_choice"),
    (rule(seconds=two_passes), "slower_choice"),
    (rule(seconds=one_card_for_each_gpu), "slower_choice"),
    (rule(seconds=a_share_of_the_card), "slower_choice"),
    (hsdp_if_it_fits, "slower_choice"),
    (lambda *case: {"HSDP": "DDP"}.get(right.choose_strategy(*case), right.choose_strategy(*case)),
     "slower_choice|does_not_fit"),
    (rule(seconds=lambda *case: {name: -one for name, one in modelled(*case).items()}),
     "slower_choice")]
RIGHT[lab.check_choose_strategy] = [
    right.choose_strategy, rule(), without_a_link,
    lambda parameters, memory, hosts, ranks, inside, across:
        strategy_choice.fastest_that_fits(parameters, memory, Topology(hosts, ranks),
                                          Links(inside, across))]


def cases(kinds, on_ranks):
    return [pytest.param(check, answer, *words, id=f"{check.__name__[6:]}-{number}",
                         marks=[pytest.mark.slow, pytest.mark.sample(5)] if on_ranks else [])
            for check, answers in kinds.items()
            if on_ranks == (check in (lab.check_hierarchical_all_reduce, lab.check_hybrid_shard))
            for number, (answer, *words) in enumerate(answers)]


@pytest.mark.parametrize(("check", "answer", "said"),
                         [*cases(WRONG, False), *cases(WRONG, True)])
def test_a_wrong_answer_is_rejected(check, answer, said):
    assert_rejected(check(answer), said)


@pytest.mark.parametrize(
    ("check", "answer"),
    [each for on_ranks in (False, True) for each in cases(
        {check: [(answer,) for answer in answers] for check, answers in RIGHT.items()}, on_ranks)])
def test_a_right_answer_passes(check, answer):
    verdict = check(answer)
    assert verdict.passed, verdict

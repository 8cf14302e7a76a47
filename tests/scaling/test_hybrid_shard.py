"""What the check of exercise 6.7 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labs.scaling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")
# 6.7 hybrid_shard


def host_mesh(hosts):
    return init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts),
                            mesh_dim_names=("across", "inside"))


def shard_all(model, mesh, **options):
    for block in model.layers:
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
        for block in model.layers:
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
        for block in model.layers:
            fully_shard(block, mesh=host_mesh(hosts))

    def one_block_only(model, hosts):
        fully_shard(model.layers[0], mesh=host_mesh(hosts))
        fully_shard(model, mesh=host_mesh(hosts))

    def layers_not_blocks(model, hosts):
        mesh = host_mesh(hosts)
        for block in model.layers:
            for layer in block:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def half_of_each_block(model, hosts):
        """The other half is the root's, which keeps it until backward."""
        mesh = host_mesh(hosts)
        for block in model.layers:
            fully_shard(block[0], mesh=mesh)
        fully_shard(model, mesh=mesh)

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


WRONG = [
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
    (Hybrid.layers_not_blocks, "wrong_units"),
    (Hybrid.half_of_each_block, "wrong_units"),
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


RIGHT = [right.hybrid_shard, with_own_names, root_gathered_twice]


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_hybrid_shard(answer), expected)


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_hybrid_shard(answer)
    assert verdict.passed, verdict

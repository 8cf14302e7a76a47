"""Strategies and loops of the jobs in memory_kinds: FSDP2's units and options, DDP's hooks,
clipping, accumulation, two optimizers."""

import torch
from torch import nn

from labs.training.models import blocks


def nested(model, optimizer_class):
    """FSDP2 with a unit for each linear layer, each block, and the root."""
    from torch.distributed.fsdp import fully_shard

    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        fully_shard(module)
    for block in blocks(model):
        fully_shard(block)
    return fully_shard(model), optimizer_class(model.parameters(), lr=1e-3)


def without_root(model, optimizer_class):
    """FSDP2 on the blocks alone; what lies outside of them is whole on every rank."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block)
    return model, optimizer_class(model.parameters(), lr=1e-3, foreach=False)


def with_ignored(model, optimizer_class):
    """FSDP2 in which the root leaves the embeddings whole."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block)
    whole = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    fully_shard(model, ignored_params=whole)
    return model, optimizer_class([p for p in model.parameters() if p not in whole], lr=1e-3)


def hybrid(model, optimizer_class):
    """FSDP2 on a mesh of 2 x 2 CPU ranks (memory_events): sharded among two, copied on two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), optimizer_class(model.parameters(), lr=1e-3)


def offloaded(model, optimizer_class):
    """FSDP2 with its shards on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False)
    for block in blocks(model):
        fully_shard(block, offload_policy=policy)
    return (fully_shard(model, offload_policy=policy),
            optimizer_class(model.parameters(), lr=1e-3))


def of_half_gradients(model, optimizer_class):
    """DDP that sends gradients in fp16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    module = nn.parallel.DistributedDataParallel(model)
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return module, optimizer_class(module.parameters(), lr=1e-3)


def clipped(module, optimizer, batch):
    """One step with gradients clipped to a norm of 1."""
    loss = module(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(module, optimizer, batch):
    """Two micro-batches, each reduced."""
    for _ in range(2):
        loss = module(**batch).loss
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated_without_sync(module, optimizer, batch):
    """Two micro-batches under DDP; the first is not reduced."""
    with module.no_sync():
        module(**batch).loss.backward()
    module(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated_whole(module, optimizer, batch):
    """Two micro-batches under FSDP2; the first keeps whole gradients."""
    for number in range(2):
        module.set_requires_gradient_sync(number == 1)
        module(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed(module, optimizer, batch):
    """The plain step, in which gradients are set to zero and stay."""
    loss = module(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def scheduled(module, optimizer, batch):
    """The plain step, then one of a schedule's."""
    if not hasattr(optimizer, "schedule"):
        optimizer.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loss = module(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.schedule.step()
    optimizer.zero_grad()


def adversarial(module, optimizers, batch):
    """A critic's step, then a generator's."""
    for optimizer in optimizers:
        module(**batch).loss.backward()
        optimizer.step()
        module.zero_grad()


def two_optimizers(model, optimizer_class):
    """The model unchanged, with an optimizer for each of its two parts."""
    parts = model.module.critic, model.module.generator
    return model, [optimizer_class(part.parameters(), lr=1e-3) for part in parts]

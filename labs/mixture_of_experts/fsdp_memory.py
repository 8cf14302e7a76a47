"""What a rank of 4 has in memory under three strategies, measured and predicted: experts divided
and all else replicated, FSDP alone, and both."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from labs.checks.on_ranks import module_and_optimizer
from labs.meters import memory
from labs.mixture_of_experts.expert_meshes import EXPERTS, Meshes
from labs.mixture_of_experts.reference_parallel import divide_experts, sum_gradients
from labs.training import data, strategies
from labs.training.memory_categories import Memory
from labs.training.mixtures import Mixture
from labs.training.models import move_to_rank
from labs.workers import devices
from labs.workers.launcher import launch

SHARD, EXPERT = 2, 2
RANKS = SHARD * EXPERT
LAYERS, PER_RANK, SEQUENCE = 3, 4, 32
BYTES = 4  # of an fp32 number
EP, FSDP, BOTH = "EP 2", "FSDP", "EP 2 and FSDP"


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. states: parameters, gradients and optimizer states after a step;
    activations: what forward saves for backward; gathered: parameters of other ranks, at most."""

    states: Memory
    activations: float
    gathered: float

    @classmethod
    def of(cls, report: memory.Report) -> "RankMemory":
        return cls(report.phases["step"], report.phases["forward"].activations, report.gathered)


def measured(expert_fsdp: Callable) -> dict[str, RankMemory]:
    """Strategy -> what rank 0 of 4 has. expert_fsdp: the student's."""
    def record():
        meshes = Meshes.of(SHARD, EXPERT)
        # the student's first: an answer that is not filled in is known at once
        return {name: RankMemory.of(_record(build, meshes)) for name, build in (
            (BOTH, expert_fsdp), (FSDP, _sharded), (EP, _divided))}

    found = launch(record, ranks=RANKS, quiet=True, hang_after=30.0)[0]
    return {name: found[name] for name in (EP, FSDP, BOTH)}


def predicted() -> dict[str, RankMemory]:
    """The same by formulas; activations are those of one process with a rank's tokens."""
    sizes = {name: p.numel() for name, p in _model().named_parameters()}
    experts = sum(size for name, size in sizes.items() if EXPERTS in name)
    total, tensors = sum(sizes.values()), len(sizes)
    block_experts = experts // LAYERS
    block_rest = sum(size for name, size in sizes.items()
                     if name.startswith("layers.0.") and EXPERTS not in name)
    root = total - experts - LAYERS * block_rest
    alone = launch(_record, _plain, ranks=1, quiet=True, hang_after=30.0)[0]

    def of(elements, gathered):
        # AdamW has two moments, and a step count for each parameter.
        states = Memory(BYTES * elements, BYTES * elements, BYTES * (2 * elements + tensors))
        return RankMemory(states, alone.phases["forward"].activations, BYTES * gathered)

    # In forward a unit's all-gather output stays until the next unit's has been copied out. So a
    # block that is one unit is there three times: the output before it, its own, and the copy. With
    # the experts as a unit of their own, each of the two is there twice. The root is there, too.
    return {EP: of(total - experts + experts // EXPERT, 0),
            FSDP: of(total // RANKS, root + 3 * (block_rest + block_experts)),
            BOTH: of(total // RANKS, root + 2 * (block_rest + block_experts // EXPERT))}


def _model() -> Mixture:
    return Mixture(layers=LAYERS, hidden=64, ffn=128, shared=True)


def _record(build, meshes=None) -> memory.Report:
    """On a rank: the memory of two steps on its part of the batch."""
    own = [data.shard({"input_ids": batch["input_ids"].to(devices.device())},
                      dist.get_rank(), RANKS)
           for batch in data.lm_batches(2, PER_RANK * RANKS, SEQUENCE)]
    given = (meshes.mesh, meshes.everyone) if meshes else ()

    def built():
        return module_and_optimizer(
            lambda *args, **settings: build(*args, *given, **settings), move_to_rank(_model()),
            torch.optim.AdamW, {"lr": 1e-3})

    # The profiler misses frees on gloo's threads at times, and never invents one.
    return memory.leanest([memory.record(built, own, strategies.resident_tensors)
                           for _ in range(2)])


def _plain(model, optimizer_class, **settings):
    return model, optimizer_class(model.parameters(), **settings)


def _divided(model, optimizer_class, mesh, everyone, **settings):
    """The strategy of exercise 9.4, with a layer of ours."""
    divide_experts(model, mesh["expert"].get_group())
    optimizer = optimizer_class(model.parameters(), **settings)
    optimizer.register_step_pre_hook(
        partial(_average, model, mesh["shard"].get_group(), everyone.size()))
    return model, optimizer


def _average(model: nn.Module, same_experts: dist.ProcessGroup, ranks: int, *_):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    sum_gradients(gradients, same_experts)
    for gradient in gradients.values():
        gradient /= ranks


def _sharded(model, optimizer_class, mesh, everyone, **settings):
    """FSDP, without expert parallelism."""
    for block in model.layers:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model, optimizer_class(model.parameters(), **settings)

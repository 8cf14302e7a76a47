"""One trial of exercise 9.8 on a rank: what the student's function made of a mixture is trained
beside the reference, and its shards, collectives and resident bytes are judged."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labs.checks.explanations import TrainingMistake
from labs.checks.invariants import ResidentBytes, judge_resident_bytes
from labs.checks.mistakes import NOT_UPDATED
from labs.checks.on_ranks import module_and_optimizer, raise_on_all_ranks, torchs_own_refused
from labs.checks.reference import Reference, Step, Tensors
from labs.checks.training import Hints, train_and_compare
from labs.checks.verdicts import Wrong
from labs.fsdp.strategy_checks import judge_optimizer
from labs.fsdp.unit_errors import explained
from labs.meters.traffic import Traffic
from labs.mixture_of_experts.expert_meshes import (
    EXPERTS,
    Meshes,
    judge_averaged,
    judge_shards,
    require_own_layers,
)
from labs.training import data
from labs.training.loop import ModuleAndOptimizer
from labs.training.mixtures import Mixture
from labs.training.models import move_to_rank, trainable
from labs.workers import devices

STEPS = 5
PER_RANK, SEQUENCE = 2, 8


class AdamW(torch.optim.AdamW):
    """The optimizer class that a check gives: a strategy that makes torch's own is found."""


class SGD(torch.optim.SGD):
    """As above."""


@dataclass(frozen=True)
class Case:
    """What is trained. settings: of the optimizer; with a large eps AdamW shows a factor that it
    hides otherwise. parts: micro-batches of a step. frozen: a part of names of parameters that are
    not trained."""

    kind: type
    settings: tuple[tuple[str, float], ...]
    layers: int = 2
    shared: bool = True
    k: int = 2
    parts: int = 1
    frozen: str = ""

    def model(self) -> Mixture:
        """The full model on the rank's device, the same on all ranks."""
        model = Mixture(layers=self.layers, hidden=16, experts=8, ffn=32, k=self.k,
                        shared=self.shared, context=SEQUENCE)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.frozen or self.frozen not in name)
        return move_to_rank(model)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.kind([parameter for _, parameter in trainable(model)], **dict(self.settings))


WITH_SGD = Case(SGD, (("lr", 0.2), ("momentum", 0.9)), layers=1)
WITH_ADAMW = Case(AdamW, (("lr", 1e-2), ("weight_decay", 0.1), ("eps", 1e-2)), shared=False, k=1,
                  parts=2, frozen="places")
# World size -> sizes of the mesh, what is trained. 8 ranks first: on 4 two ranks have the same
# experts and two divide them, so that some wrong divisors are right.
TRIALS = {8: ((2, 2, 2), WITH_SGD), 4: ((2, 2), WITH_ADAMW)}


def try_on_rank(expert_fsdp: Callable) -> float:
    """The largest difference of a parameter from the reference's. Raises Wrong on all ranks."""
    shape, case = TRIALS[dist.get_world_size()]
    meshes = Meshes.of(*shape)
    difference = _train(expert_fsdp, case, meshes)
    # what is kept of one layer is kept of several
    _judge_memory(expert_fsdp, replace(case, layers=1), meshes)
    return difference


def build(expert_fsdp: Callable, case: Case, meshes: Meshes,
          model: Mixture | None = None) -> ModuleAndOptimizer:
    """Returns the strategy's (module, optimizer). Raises Wrong where `fully_shard` refused."""
    model = case.model() if model is None else model
    try:
        with torchs_own_refused("DistributedDataParallel"), explained(model) as given:
            return module_and_optimizer(
                lambda *args, **settings: expert_fsdp(*args, meshes.mesh, meshes.everyone,
                                                      **settings),
                given, case.kind, dict(case.settings))
    except Wrong as wrong:
        require_own_layers(model)
        if wrong.code == "units_overlap":
            raise Wrong(wrong.sentence, "First the experts of a layer, then the block, then the "
                        "model: a call takes all parameters that no earlier one has taken.",
                        wrong.place, code=wrong.code) from None
        raise


def _train(expert_fsdp, case, meshes) -> float:
    model = case.model()
    reference = Reference(model, case.optimizer_of)
    module, optimizer = raise_on_all_ranks(build, expert_fsdp, case, meshes, model)
    raise_on_all_ranks(judge_shards, module, reference.model, meshes)
    raise_on_all_ranks(judge_optimizer, module, optimizer, dict(case.settings), case.kind)
    traffic = Traffic()

    @contextlib.contextmanager
    def recorded():
        with traffic:
            yield

    ranks = dist.get_world_size()
    steps = [Step({"input_ids": batch["input_ids"].to(devices.device())}, parts=case.parts)
             for batch in data.lm_batches(STEPS, PER_RANK * ranks, SEQUENCE)]
    try:
        difference = train_and_compare(
            module, optimizer, [reference], steps, mistakes=_mistakes(meshes), hints=_HINTS,
            parameters_of=partial(_full_parameters, group=meshes.mesh["expert"].get_group(),
                                  like=reference.model), during=recorded)
    except Wrong:
        raise_on_all_ranks(judge_averaged, module, reference.model, meshes)
        raise
    raise_on_all_ranks(_judge_gathered, traffic, reference.model, meshes)
    return difference


# numbers


def _full_parameters(module, group, like) -> Tensors:
    """Each full parameter, on all ranks: shards are gathered, then experts over the group."""
    sizes = {name: len(parameter) for name, parameter in like.named_parameters()}
    found = {}
    for name, parameter in module.named_parameters():
        full = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        if EXPERTS in name and len(full) != sizes[name]:
            parts = [torch.empty_like(full) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, full.contiguous(), group=group)
            full = torch.cat(parts)
        found[name] = full.clone()
    return found


_HINTS = Hints(
    loss="Does your ExpertParallelLayer pass exercise 9.3? Its forward is used here.",
    unexplained="All that FSDP averages is right by default, except the experts: their sum over "
                "the ranks that have the same is divided by the number of all ranks.")


def _mistakes(meshes) -> tuple[TrainingMistake, ...]:
    """The factors that the gradients of experts may have."""
    expert, ranks = meshes.expert, dist.get_world_size()
    same = ranks // expert
    factor = "set_gradient_divide_factor(everyone.size()) of the experts' unit."

    def experts(code, sentence, scale, hint=factor):
        return TrainingMistake(code, sentence, hint, lambda reference: [
            {name: value for name, value in reference.otherwise(scale=scale).items()
             if EXPERTS in name}])

    return (NOT_UPDATED.with_hint("Make the optimizer last, from the sharded model's parameters."),
            experts("averaged_over_replicas", f"updated with gradients averaged over {same} "
                    f"ranks, {expert} times too large", expert),
            experts("sum_not_mean", f"updated with the sum of the gradients, {ranks} times too "
                    "large", ranks),
            experts("divided_by_expert_ranks", f"updated with a sum divided by {expert}, "
                    f"{same} times too large", same),
            experts("mean_twice", f"updated with the mean divided by {ranks} once more", 1 / ranks,
                    "Divide once."),
            experts("mean_twice", f"updated with the mean divided by {same} once more",
                    1 / same, "Divide once."))


# bytes


def _judge_gathered(traffic, full, meshes):
    """Invariant: a block with this rank's part of its experts is the most that is gathered."""
    sizes = {name: p.numel() for name, p in full.named_parameters()}
    experts, rest = (sum(size for name, size in sizes.items()
                         if name.startswith("layers.0.") and (EXPERTS in name) == is_expert)
                     for is_expert in (True, False))
    root = sum(size for name, size in sizes.items() if not name.startswith("layers."))
    due = max(root, rest + experts // meshes.expert)
    found = max((call.elements for call in traffic.of("all_gather")), default=0)
    if found > 1.05 * due:  # shards are padded
        block = rest + experts // meshes.expert
        raise Wrong(f"rank {dist.get_rank()} gathers {found:,} elements at once; a block with this "
                    f"rank's 1/{meshes.expert} of its experts has {block:,}, what is in no block "
                    f"{root:,}",
                    "Replace block.mlp by an ExpertParallelLayer, so that FSDP gathers only a part "
                    "of the experts, and make each block a unit.", code="gathered_too_much")


def _judge_memory(expert_fsdp, case, meshes):
    """Invariant: a rank has its part of all parameters, gradients and optimizer states."""
    ranks, model = dist.get_world_size(), case.model()
    shards = meshes.everyone["shard"].size()
    names = [name for name, _ in trainable(model)]
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    allowed = ResidentBytes.of(model, names, shards, padding=frozen // shards)
    [own] = [data.shard({"input_ids": batch["input_ids"].to(devices.device())}, dist.get_rank(),
                        ranks) for batch in data.lm_batches(1, PER_RANK * ranks, SEQUENCE)]
    judge_resident_bytes(partial(build, expert_fsdp, case, meshes), [own, own], allowed,
                         f"with 1/{shards} of everything", _MEMORY_HINTS)


_MEMORY_HINTS = {
    "parameters": "Each parameter is sharded over all ranks that have it: the experts over those "
                  "with the same, all else over everyone, and nothing is kept beside the shards.",
    "gradients": "Gradients are as large as the parameters: is anything not sharded?",
    "optimizer_state": "Make the optimizer last, from the sharded model's parameters.",
    "rest": "Is something kept that was needed only to make the shards?"}

"""Small jobs that are recorded on real ranks: each strategy, on models with tied, frozen and odd
parameters."""

import copy
import functools
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks
from labs.meters.evidence import RankEvidence, StepEvidence
from labs.training import data, strategies
from labs.training.loop import ModuleAndOptimizer
from labs.training.models import DeepMLP, EdgeCaseModel, trainable
from labs.workers import devices

WORLD_SIZES = (1, 2, 3)
_STEPS = 3  # the last one is recorded: torch's DDP sets up in the first two
_MODELS = {"tied and frozen parameters": EdgeCaseModel,
           "odd sizes": partial(DeepMLP, layers=3, width=37),
           "64-bit numbers": lambda: DeepMLP(layers=2, width=21).double()}


def jobs() -> Iterator[tuple[str, str, list[RankEvidence]]]:
    """(what it is, the right name, what each rank did) of every job."""
    for ranks in WORLD_SIZES:
        for (kind, model), found in _recorded(ranks, devices.device().type).items():
            yield (f"recorded on {ranks} rank{'s' * (ranks > 1)} with {model}",
                   kind if ranks > 1 else "one process", copy.deepcopy(found))


@functools.cache
def _recorded(ranks, device) -> dict[tuple[str, str], list[RankEvidence]]:
    by_rank = on_ranks(_record, world_sizes=(ranks,), timeout=60.0)
    return {job: [found[job] for found in by_rank] for job in by_rank[0]}


def _record() -> dict[tuple[str, str], RankEvidence]:
    """On a rank: (strategy's name, model's name) -> what this rank did."""
    chosen = {"separate": strategies.plain, "DDP": strategies.ddp,
              "ZeRO-1": strategies.zero_redundancy, "ZeRO-2": zero2, "ZeRO-3": strategies.fsdp2}
    return {(kind, name): _evidence(strategy, model) for kind, strategy in chosen.items()
            for name, model in _MODELS.items()}


def _evidence(strategy, make) -> RankEvidence:
    model = make()
    evidence = StepEvidence(model)
    dtype = next(p.dtype for p in model.parameters())
    module, optimizer = strategy(model, torch.optim.AdamW, lr=1e-3)
    for batch in data.xy_batches(_STEPS, 6, seed=dist.get_rank()):
        if isinstance(model, EdgeCaseModel):
            batch["use_all"] = True
        elif dtype == torch.float64:
            batch["x"] = batch["x"].double()
        with evidence:
            loss = module(**batch).loss
            loss.backward()
            evidence.note(module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())  # to print it: the gradients are not its business
    return evidence.of_this_rank()


def zero2(model, optimizer_class, **kwargs) -> ModuleAndOptimizer:
    """ZeRO-2 by whole parameters: a gradient is reduced to its parameter's owner during backward
    and freed on the others; owners broadcast what they have updated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    owners = {parameter: number % ranks for number, (_, parameter) in enumerate(trainable(model))}

    def keep_own(parameter):
        dist.reduce(parameter.grad, owners[parameter])
        if owners[parameter] != rank:
            parameter.grad = None

    def broadcast(*_):
        for parameter, owner in owners.items():
            dist.broadcast(parameter.data, owner)

    for parameter in owners:
        parameter.register_post_accumulate_grad_hook(keep_own)
    optimizer = optimizer_class([p for p, owner in owners.items() if owner == rank], **kwargs)
    optimizer.register_step_post_hook(broadcast)
    return model, optimizer

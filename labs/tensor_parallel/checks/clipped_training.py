"""A Llama of which everything but the norms is divided, trained with the student's clipping: the
second half of exercise 7.6."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from labs.exercises.numbers import judge_number
from labs.exercises.on_ranks import raise_on_all_ranks
from labs.exercises.reference import Reference
from labs.exercises.verdicts import Wrong
from labs.tensor_parallel.checks.invariants import (
    Activations,
    ResidentBytes,
    judge_collectives,
    judge_resident_bytes,
    record_last_step,
)
from labs.tensor_parallel.checks.reference import (
    SGD,
    build,
    make_optimizer,
    token_batches,
    train_on_whole_batch,
    whole_steps,
)
from labs.tensor_parallel.checks.shards import ShardReader
from labs.tensor_parallel.checks.tensor_parallel import (
    BATCH,
    PER_LAYER,
    SEQUENCE,
    SIZES,
    sharded_names,
)
from labs.tensor_parallel.checks.vocabulary_loss import MOST_PER_TOKEN
from labs.tensor_parallel.checks.vocabulary_parallel import CAUSES, HINTS, MORE, NAMES
from labs.training import models

MAX_NORM = 0.5  # every step's gradient is larger
_TOLERANCE = 1e-4  # of a norm, relative


def train_clipped(clip_grad_norm: Callable, strategy: Callable, tied: bool) -> None:
    """On a rank: trains strategy(model, optimizer_class, **settings) with clip_grad_norm before
    each step; raises Wrong unless it is the reference that torch's clip_grad_norm_ clips, with 1/t
    of all matrices on each rank and the collectives that these need."""
    model = whole_model(tied)
    norms = []
    reference = Reference(copy.deepcopy(model), _clipped(norms))
    module, optimizer = raise_on_all_ranks(build, strategy, model, *SGD)
    reader = ShardReader(module, reference.model)
    own = reader.local(module)
    sharded, replicated = ([own[name] for name in names]
                           for names in (reader.sharded, reader.replicated))

    def clip(*_):
        norm = clip_grad_norm(sharded, replicated, MAX_NORM, dist.group.WORLD)
        raise_on_all_ranks(_judge_norm, norm, norms)

    optimizer.register_step_pre_hook(clip)
    train_on_whole_batch(module, optimizer, reference, whole_steps(5, BATCH, SEQUENCE),
                         causes=CAUSES)


def judge_traffic_and_memory(strategy: Callable, tied: bool) -> None:
    """On a rank: raises Wrong unless embedding, attention, MLPs and head are all divided, for four
    all-reduces of b·s·h in each layer, one after the embedding and one before the head."""
    batches, whole = token_batches(2, BATCH, SEQUENCE), whole_model(tied)

    def make(model):
        return build(strategy, model, torch.optim.AdamW, {"lr": 1e-3})

    traffic = record_last_step(make, whole_model(tied), batches)
    layers = SIZES["layers"]
    judge_collectives(traffic, {"all_reduce": PER_LAYER + 2 / layers},
                      Activations(layers, BATCH, SEQUENCE, SIZES["hidden"]),
                      small=MOST_PER_TOKEN * BATCH * SEQUENCE, hints=MORE)
    names = sharded_names(whole) + [name for name, _ in models.trainable(whole) if name in NAMES]
    judge_resident_bytes(lambda: make(whole_model(tied)), batches,
                         ResidentBytes.of(whole, names, dist.get_world_size()),
                         "with all matrices divided", HINTS)


def whole_model(tied: bool) -> nn.Module:
    """The Llama that is trained, the same on every rank."""
    return models.move_to_rank(models.llama(**SIZES, tied=tied))


def _clipped(norms: list[float]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Returns what makes the reference's optimizer, which clips before each step; each norm is
    appended to `norms`. The reference's gradients stay as they are, for who looks at them later."""
    def make(model):
        optimizer = make_optimizer(*SGD)(model)

        def clip(*_):
            parameters = list(model.parameters())
            for parameter in parameters:
                parameter.grad = parameter.grad.clone()
            norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return make


def _judge_norm(norm, norms):
    if norms[-1] <= MAX_NORM:
        raise AssertionError(f"the reference's norm {norms[-1]} is not clipped at {MAX_NORM}")
    try:
        judge_number(norm, norms[-1], (), f"rank {dist.get_rank()}, the norm",
                     rel_tol=_TOLERANCE, source="the reference's is")
    except Wrong as wrong:
        raise Wrong(f"Llama, step {len(norms) - 1}: {wrong.sentence}",
                    "Are the gradients right before they are clipped? One that every rank has "
                    "whole is not summed, and the shard of a tied weight is counted once.",
                    code=wrong.code) from None

"""Exercise 7.3: a Llama whose attention and MLPs are divided among ranks trains as the whole one
does, with 1/t of those parameters on each rank and four all-reduces a layer."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.reference import Reference
from labs.exercises.verdicts import check
from labs.tensor_parallel.checks.division import require_value_error
from labs.tensor_parallel.checks.groups import every_second_rank
from labs.tensor_parallel.checks.invariants import (
    Activations,
    ResidentBytes,
    judge_collectives,
    judge_resident_bytes,
    record_last_step,
)
from labs.tensor_parallel.checks.reference import (
    ADAMW,
    SGD,
    STEPS,
    build,
    make_optimizer,
    token_batches,
    train_on_whole_batch,
    whole_steps,
)
from labs.training import models
from labs.words import to_within

WORLD_SIZES = (2, 4)
# No parameter has as many elements as an activation, so that a collective tells which it sends.
SIZES = {"layers": 2, "hidden": 48, "heads": 8, "kv_heads": 4, "intermediate": 92, "context": 16}
BATCH, SEQUENCE = 3, 10
PER_LAYER = 4  # all-reduces of b·s·h: f's and g's, of attention and of the MLP
_ATTENTION = r"(?i)attn|attention|[qkvo]_proj"
_MLP = r"(?i)mlp|gate_proj|up_proj|down_proj|intermediate"
COLLECTIVE_HINTS = {
    "all_reduce": "Query, key and value layers take the same input, and so do gate and up: apply f "
                  "once to that input, at the entry of attention and of the MLP. Gradients of "
                  "parameters are not reduced: a shard's is whole, a replicated one's is the same "
                  "on all ranks.",
    "all_gather": "Weights stay where they are: each rank computes with its own shard."}


@dataclass(frozen=True)
class Case:
    """A model and an optimizer to train. pairs: on two groups of every second rank."""

    optimizer: tuple[type, dict]
    tied: bool
    bias: bool
    pairs: bool = False

    def model(self) -> nn.Module:
        """The whole model, on the rank's device."""
        return models.move_to_rank(models.llama(tied=self.tied, bias=self.bias, **SIZES))


# The first one finds most; with weight decay, and a bias that shows if it is added twice.
CASES = {2: (Case(ADAMW, False, True), Case(SGD, True, False)),
         4: (Case(SGD, False, True), Case(ADAMW, True, False, pairs=True))}
# ranks -> (sizes, what does not divide, its number, what must be named)
REFUSED = {2: (({"heads": 6, "kv_heads": 3, "hidden": 48}, "3 key/value heads", 3, _ATTENTION),
               ({"intermediate": 97}, "an MLP 97 wide", 97, _MLP)),
           4: (({"heads": 6, "kv_heads": 6, "hidden": 48}, "6 heads of 8 elements", 6, _ATTENTION),
               ({"heads": 8, "kv_heads": 2}, "2 key/value heads", 2, _ATTENTION))}


@check("7.3")
def check_tensor_parallel(tensor_parallel: Callable):
    """tensor_parallel(model, optimizer_class, group=None, **settings) -> (module, optimizer) for a
    Llama of Hugging Face's: attention and MLPs divided among the group's ranks."""
    difference = max(on_ranks(_try_all, tensor_parallel, world_sizes=WORLD_SIZES, timeout=60))
    return (f"equals the reference over {STEPS} steps on 2 and 4 ranks and on a group of 2 of them "
            f"({to_within(difference)}); a rank holds 1/t of attention and MLP, and sends "
            f"{PER_LAYER} all-reduces of b·s·h elements a layer and step; heads and sizes that do "
            "not divide are refused")


def _try_all(tensor_parallel) -> float:
    ranks = dist.get_world_size()
    with torchs_own_refused():
        first, *others = CASES[ranks]  # most mistakes show in what is judged before the others
        differences = [_train(tensor_parallel, first)]
        _judge_traffic_and_memory(tensor_parallel, ranks)
        for sizes, what, number, module in REFUSED[ranks]:
            small = models.llama(**{**SIZES, "layers": 1, **sizes})
            require_value_error(
                partial(tensor_parallel, small, torch.optim.SGD, lr=0.1), f"a Llama with {what}",
                (number, ranks), module, _MLP if module == _ATTENTION else _ATTENTION)
        return max(differences + [_train(tensor_parallel, case) for case in others])


def _train(tensor_parallel, case: Case) -> float:
    group = every_second_rank() if case.pairs else None
    model = case.model()
    reference = Reference(copy.deepcopy(model), make_optimizer(*case.optimizer))
    options = {"group": group} if case.pairs else {}
    module, optimizer = raise_on_all_ranks(
        build, partial(tensor_parallel, **options), model, *case.optimizer)
    return train_on_whole_batch(module, optimizer, reference,
                                whole_steps(STEPS, BATCH, SEQUENCE), group)


def _judge_traffic_and_memory(tensor_parallel, ranks):
    case, batches = CASES[ranks][0], token_batches(2, BATCH, SEQUENCE)
    make = partial(build, tensor_parallel, optimizer_class=torch.optim.AdamW, settings={"lr": 1e-3})
    traffic = record_last_step(lambda model: raise_on_all_ranks(make, model), case.model(), batches)
    whole = case.model()
    judge_collectives(traffic, {"all_reduce": PER_LAYER},
                      Activations(SIZES["layers"], BATCH, SEQUENCE, SIZES["hidden"]),
                      hints=COLLECTIVE_HINTS)
    judge_resident_bytes(lambda: make(case.model()), batches,
                         ResidentBytes.of(whole, sharded_names(whole), ranks))


def sharded_names(model: nn.Module) -> list[str]:
    """The parameters that tensor parallelism divides: the linear layers of attention and MLP, but
    for the biases of the row-parallel ones."""
    return [name for name, _ in model.named_parameters() if "_proj." in name
            and not name.endswith(("o_proj.bias", "down_proj.bias"))]

"""Exercise 4.12: fully_shard without torch's own: rows of each parameter, bf16 gathers, fp32 sums,
and the next unit's all-gather in flight in backward."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labs.checks.invariants import judge_memory, judge_recorded
from labs.checks.mistakes import (
    GRADIENT_OF_ONE_RANK,
    MEAN_TWICE,
    NOT_ACCUMULATED,
    NOT_UPDATED,
    SUM_NOT_MEAN,
)
from labs.checks.on_ranks import (
    largest_difference,
    on_ranks,
    raise_on_all_ranks,
    torchs_own_refused,
)
from labs.checks.reference import Reference
from labs.checks.tolerances import TRAINED
from labs.checks.training import Hints, train_and_compare
from labs.checks.verdicts import Wrong, check
from labs.fsdp import strategy_checks
from labs.fsdp.packed_units import BYTES, judge_packed_units
from labs.fsdp.units import SMALL
from labs.meters import memory
from labs.training import models

WORLD_SIZES = (3, 2)
PARTS = {1: 2}  # step -> backward passes from which its gradient accumulates
_EMPTY = "A unit computes while it is sharded: gather it before its forward and its backward."
_HINTS = {
    "inplace operation": "Write into an unsharded parameter through `.data`: autograd counts all "
                         "other changes of what it has saved.",
    "same dtype": "Every unit computes in bf16, the root too.",
    "non-empty": "The root of some models has no parameter of its own: a unit may be empty.",
    **dict.fromkeys(("storage of size 0", "SIGSEGV", "SIGABRT", "SIGBUS"), _EMPTY)}


class Rootless(nn.Module):
    """Layers of odd sizes and no parameter outside them; one has fewer rows than 3 ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Embedding(models.VOCABULARY, 5), nn.Linear(5, 7),
                                     nn.Linear(7, 2), nn.Linear(2, models.VOCABULARY)])

    def forward(self, input_ids, labels):
        hidden = input_ids
        for layer in self.layers:
            hidden = layer(hidden)  # (batch, sequence, width of the layer)
        # (batch · sequence, 256) in fp32: the loss of bf16 logits would itself be rounded to bf16.
        loss = F.cross_entropy(hidden.flatten(0, 1).float(), labels.flatten())
        return SimpleNamespace(logits=hidden, loss=loss)


MODELS = {"GPT-2": strategy_checks.make_model, "a model whose root has no parameter": Rootless}


class HalfPrecisionReference(Reference):
    """Computes each rank's share in bf16, averages the gradients and updates in fp32."""

    def _share(self, step, rank) -> tuple[float, list]:
        # A fresh bf16 copy in each step: the fp32 parameters stay those that the optimizer updates.
        half = copy.deepcopy(self.model).bfloat16()
        loss = half(**step.inputs(rank)).loss
        loss.backward()
        return loss.item(), [p.grad.float() for _, p in models.trainable(half)]


@check("4.12", hints=_HINTS)
def check_from_scratch(strategy: Callable) -> str:
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): fully sharded training
    with one unit for each block and one for the root, built without torch's fully_shard."""
    difference = max(on_ranks(_train_and_record, strategy, world_sizes=WORLD_SIZES,
                              timeout=strategy_checks.TIMEOUT))
    return ("each rank keeps its rows of each parameter in fp32; units are gathered in bf16, the "
            "next one while this one's gradients are computed, and summed in fp32; equals the "
            f"reference over {strategy_checks.STEPS} steps on 2 and 3 ranks "
            f"({strategy_checks.closeness(difference)})")


def _train_and_record(strategy) -> float:
    # The root returns no tensor, so torch warns that its backward hooks do not run.
    warnings.filterwarnings("ignore", "For backward hooks to be called")
    with torchs_own_refused():
        for name, make in MODELS.items():
            _in_model(name, _judge_built, strategy, make)
        # What is sent shows a missing sum or cast by its name; the numbers only show that they
        # differ. One world size is enough for it, and for memory.
        if dist.get_world_size() == WORLD_SIZES[0]:
            _judge_traffic_and_memory(strategy)
        return max(_in_model(name, _compare_with_reference, strategy, make)
                   for name, make in MODELS.items())


def _in_model(name, judge, *args):
    """judge(*args); where it raises Wrong, the sentence begins with the model."""
    try:
        return judge(*args)
    except Wrong as error:
        raise Wrong(f"in {name}: {error.sentence}", error.hint, error.place,
                    code=error.code) from None


def _judge_built(strategy, make):
    module, optimizer = raise_on_all_ranks(strategy_checks.build, strategy, make())
    raise_on_all_ranks(_judge_shards, module, make())
    raise_on_all_ranks(strategy_checks.judge_optimizer, module, optimizer, strategy_checks.SETTINGS)


def _judge_traffic_and_memory(strategy):
    want = strategy_checks.one_unit_per_block(dist.get_world_size())
    events = strategy_checks.record_events(strategy, overlap=True)
    raise_on_all_ranks(judge_packed_units, events, want)
    unsharded = memory.record(_unsharded, [step.inputs() for step in strategy_checks.steps(2)])
    judge_recorded(partial(strategy_checks.record_memory, strategy), _judge_memory, unsharded, want)


def _unsharded():
    model = strategy_checks.make_model().bfloat16()
    return model, strategy_checks.make_optimizer(model)


def _compare_with_reference(strategy, make) -> float:
    """On a rank: the largest difference of a parameter."""
    reference = HalfPrecisionReference(make(), strategy_checks.make_optimizer)
    module, optimizer = raise_on_all_ranks(strategy_checks.build, strategy, make())
    steps = [replace(step, parts=PARTS.get(number, 1))
             for number, step in enumerate(strategy_checks.steps())]
    return train_and_compare(
        module, optimizer, [reference], steps, mistakes=_MISTAKES, hints=_NUMBERS,
        parameters_of=partial(_whole_parameters, model=reference.model), tolerance=TRAINED)


_NUMBERS = Hints(
    loss="Forward computes in bf16 with unsharded, updated parameters: is every unit gathered "
         "again after a step, and unpacked as it was packed?",
    unexplained="Cast to fp32 before the sum; clear the gradients of unsharded parameters after "
                "it; unpack what comes back as it was packed.")
_MISTAKES = (
    NOT_UPDATED.with_hint("Does the shard get a gradient, and is it the shard that the module and "
                          "the optimizer have?"),
    NOT_ACCUMULATED.with_hint("A new gradient is added to the one that the shard has."),
    GRADIENT_OF_ONE_RANK.with_hint("Reduce-scatter the gradients."), SUM_NOT_MEAN, MEAN_TWICE)


def _rows(whole, rank) -> tuple[int, int]:
    """First row of a rank's shard, and the first row after it, as torch.chunk and FSDP2 split."""
    each = -(-len(whole) // dist.get_world_size())
    return min(rank * each, len(whole)), min((rank + 1) * each, len(whole))


def _judge_shards(module, model, numbers=True):
    """Raises Wrong where a parameter of the module is not this rank's rows of it. numbers: of a
    module that has not been trained: its shards hold the model's numbers."""
    rank, found = dist.get_rank(), strategy_checks.named_parameters(module)
    wanted = dict(model.named_parameters())
    # A tied weight is one parameter in two places: a shard in only one of them unties it.
    for name in found.keys() - wanted.keys():
        raise Wrong(f"rank {rank}: {name!r} is a parameter of its own now; in the model it is the "
                    "weight of the embedding", "A tied parameter has two places: its shard goes "
                    "into both.", code="tie_lost")
    for name, whole in wanted.items():
        if name not in found:
            raise Wrong(f"rank {rank}: {name!r} is no parameter of the module any more",
                        "The shard takes the parameter's place: owner._parameters[name] = shard.",
                        code="missing_parameter")
        first, after = _rows(whole, rank)
        local, want = models.local_shard(found[name]).detach(), whole.detach()[first:after]
        # Shards of whole rows keep shape, name and type; a flat piece may end inside a row.
        if local.shape != want.shape:
            raise Wrong(f"rank {rank} has {name!r} in shape {tuple(local.shape)}; its rows {first} "
                        f"to {after} have {tuple(want.shape)}", _shape_hint(local, whole),
                        code="wrong_shape")
        # The optimizer adds small updates to the shard: bf16 would round them away.
        if local.dtype != torch.float32:
            raise Wrong(f"rank {rank} keeps its shard of {name!r} in {local.dtype}", "Only what "
                        "is gathered is bf16; shards are copies of the fp32 parameters.",
                        code="wrong_dtype")
        if numbers and largest_difference(local, want):
            raise Wrong(f"rank {rank} has other numbers than rows {first} to {after} of {name!r}",
                        "Rank r keeps rows r·k to (r + 1)·k, copied from the fp32 parameter.",
                        code="wrong_shard")


def _shape_hint(local, whole) -> str:
    if local.shape == whole.shape:
        return ("It is unsharded. Between two steps every parameter's place has the shard: free "
                "puts it back, also after backward.")
    return ("k is the number of rows divided by the number of ranks, rounded up; the last ranks "
            "may have fewer rows, or none.")


def _whole_parameters(module, model) -> dict[str, torch.Tensor]:
    """On a rank: the full parameters, joined from the rows of all ranks."""
    raise_on_all_ranks(_judge_shards, module, model, False)
    shards = {name: models.local_shard(parameter).detach()
              for name, parameter in strategy_checks.named_parameters(module).items()}
    by_rank = [None] * dist.get_world_size()
    # Objects, not tensors: ranks may hold different numbers of rows, and some hold none.
    dist.all_gather_object(by_rank, shards)
    return {name: torch.cat([one[name] for one in by_rank]) for name in shards}


def _judge_memory(report, unsharded, want):
    """Raises Wrong where a rank holds more after a phase than its shards, and after forward the
    root. unsharded: the same model in bf16 without sharding, for its activations."""
    # After forward the root is gathered, and no block, nor half of one.
    room = BYTES["all_gather"] * (want.root + 0.25 * want.block)
    state = strategy_checks.optimizer_bytes(dist.get_world_size(), dist.get_rank())
    held = {"parameters": want.shard, "gradients": 0, "optimizer_state": state}
    usual = unsharded.phases["forward"]
    forward = held | {"buffers": room, "rest": usual.activations + usual.other + room}
    built = held | {"optimizer_state": 0, "rest": SMALL}
    # Between steps there are only shards: gathered units, kept anywhere, are seen here, and the
    # full gradients of one.
    step = held | {"gradients": want.shard, "rest": SMALL}
    hints = dict.fromkeys(("parameters", "buffers", "rest"), "Unsharded parameters are freed after "
                          "a block's forward and after each backward; shards are copies of rows, "
                          "and nothing holds the model's own parameters any more.")
    judge_memory(report, {"build": built, "forward": forward, "backward": step, "step": step},
                 "under full sharding", hints | {
                     "gradients": "Set the .grad of unsharded parameters to None.",
                     "optimizer_state": "Make the optimizer from the shards."})

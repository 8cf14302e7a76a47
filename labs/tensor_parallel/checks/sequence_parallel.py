"""Exercise 7.7: a Llama whose hidden states are pieces of the sequence between attention and MLP
trains as the whole one does, sends what tensor parallelism sends, and keeps less."""

import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs.exercises.on_ranks import close, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.reference import Reference, Step
from labs.exercises.verdicts import Wrong, check
from labs.tensor_parallel.checks.division import require_value_error
from labs.tensor_parallel.checks.explanations import Cause
from labs.tensor_parallel.checks.groups import every_second_rank, groups_to_try
from labs.tensor_parallel.checks.invariants import (
    BYTES,
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
from labs.tensor_parallel.checks.sequence_regions import judge_regions
from labs.tensor_parallel.checks.tensor_parallel import sharded_names
from labs.tensor_parallel.sequence.activations import activation_bytes, predicted
from labs.training import models

# No parameter has as many elements as an activation or a piece of it, so that a collective tells
# what it sends.
SIZES = {"hidden": 48, "heads": 8, "kv_heads": 4, "intermediate": 92, "context": 16}
LAYERS = 4  # where collectives are counted: one more in each layer is more than what is outside
BATCH, SEQUENCE = 3, 12
PER_LAYER = 4  # all-gathers of b·s·h, and reduce-scatters: forward and backward, attention and MLP
_OUTSIDE = 2  # gathers of b·s·h in a step outside the layers: after the last norm, and in backward
HINTS = {"one of the variables needed for gradient computation": "A hook on a gradient returns a "
         "new tensor, it does not change the one that it gets: clone it first.",
         "must match the size of tensor": "The residual stream is a piece of s/t tokens from the "
         "first layer to the last norm; attention and the MLP take and give back such pieces."}
COLLECTIVE_HINTS = {
    "all_reduce": "A row-parallel layer ends in ReduceScatterFromRegion now, an all-reduce gives "
                  "every rank all tokens. Only the gradients of norms and biases are all-reduced.",
    "all_gather": "Gather once at the entry of attention and once at that of the MLP, not for each "
                  "matrix: lab.map_input.",
    "reduce_scatter": "One at the exit of attention and one at that of the MLP; in backward one at "
                      "each entry."}
_PARTS_HINT = ("Each rank's norms see s/t tokens, so their gradients are parts of a sum; so are "
               "those of biases that are added to a piece. Sum them over the group, once: "
               "parameter.register_hook(function).")
CAUSES = (
    Cause("it is the gradient of this rank's tokens only: those of all ranks add up to the "
          "reference's", _PARTS_HINT,
          lambda found: _is_replicated(found.name) and close(found.total, found.want)),
    Cause("it is the gradient of this rank's tokens only: those of all ranks add up to the "
          "reference's", "The embedding is whole on each rank: lab.split_sequence gathers the "
          "gradients of all pieces.",
          lambda found: "embed" in found.name and close(found.total, found.want)),
    Cause("it is {ranks} times the reference's",
          "After the last norm all ranks compute the same, so a sum over the ranks counts it once "
          "for each: lab.join_sequence. Gradients of norms are summed once.",
          lambda found: close(found.got, found.ranks * found.want)),
    Cause("it is the mean over the ranks", "Parts are summed, not averaged.",
          lambda found: close(found.got * found.ranks, found.want)))


@dataclass(frozen=True)
class Case:
    """A training. pairs: on two groups of every second rank. parts: backward passes for a step."""

    optimizer: tuple[type, dict]
    bias: bool
    steps: int = STEPS
    pairs: bool = False
    parts: int = 1


CASES = {2: (Case(SGD, bias=True, parts=2),),
         4: (Case(ADAMW, bias=False), Case(SGD, bias=True, steps=1, pairs=True))}


@check("7.7", hints=HINTS)
def check_sequence_parallel(GatherToRegion, ReduceScatterFromRegion, sequence_parallel):
    """The conjugate pair along the sequence, and sequence_parallel(model, optimizer_class,
    group=None, **settings) -> (module, optimizer) for a Llama of Hugging Face's."""
    on_ranks(_try_regions, GatherToRegion, ReduceScatterFromRegion, world_sizes=(3,))
    difference = max(on_ranks(_try_all, GatherToRegion, ReduceScatterFromRegion, sequence_parallel,
                              world_sizes=(2, 4), timeout=60))
    return (f"equals the reference over {STEPS} steps on 2 and 4 ranks and on a group of 2 of them "
            f"(to {difference:.0e}); a layer sends {PER_LAYER} all-gathers and {PER_LAYER} "
            "reduce-scatters of b·s·h elements a step, its norms see s/t tokens, and their "
            "gradients are sums over the group")


def _try_regions(gather, reduce_scatter):
    for _, group in groups_to_try():
        judge_regions(gather, reduce_scatter, group)


def _try_all(gather, reduce_scatter, strategy) -> float:
    _try_regions(gather, reduce_scatter)
    ranks = dist.get_world_size()
    with torchs_own_refused():
        difference = max(_train(strategy, case) for case in CASES[ranks])
        _judge_tokens(strategy, ranks)
        _judge_traffic(strategy)
        if ranks == 2:
            _judge_memory(strategy, ranks)
        _judge_refused(strategy, ranks)
    return difference


def small_llama(layers: int = 2, bias: bool = False) -> nn.Module:
    """The whole model, on the rank's device."""
    return models.move_to_rank(models.llama(layers, bias=bias, **SIZES))


def _train(strategy, case: Case) -> float:
    group = every_second_rank() if case.pairs else None
    model = small_llama(bias=case.bias)
    reference = Reference(copy.deepcopy(model), make_optimizer(*case.optimizer))
    options = {"group": group} if case.pairs else {}
    module, optimizer = raise_on_all_ranks(build, partial(strategy, **options), model,
                                           *case.optimizer)
    steps = [Step(step.batch, parts=case.parts, whole=True)
             for step in whole_steps(case.steps, BATCH, SEQUENCE)]
    return train_on_whole_batch(module, optimizer, reference, steps, group, causes=CAUSES)


def _is_replicated(name: str) -> bool:
    return "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))


def _judge_tokens(strategy, ranks):
    """What each norm reads has s/t tokens, and what attention's matrices read has all."""
    model, seen = small_llama(), {}
    module, _ = raise_on_all_ranks(build, strategy, model, torch.optim.SGD, {"lr": 0.1})
    wanted = {name: SEQUENCE // ranks if "norm" in name else SEQUENCE
              for name, _ in module.named_modules() if name.endswith(("norm", "q_proj", "up_proj"))}

    def keep(name, _, inputs):
        seen[name] = tuple(inputs[0].shape)

    for name in wanted:
        module.get_submodule(name).register_forward_pre_hook(partial(keep, name))
    with torch.no_grad():
        module(**token_batches(1, BATCH, SEQUENCE)[0])
    raise_on_all_ranks(_judge_shapes, seen, wanted)


def _judge_shapes(seen, wanted):
    # Catches tensor parallelism, whose norms see all tokens, and a split or a gather in one layer
    # only.
    for name, tokens in wanted.items():
        want = (BATCH, tokens, SIZES["hidden"])
        if seen.get(name) != want:
            raise Wrong(f"rank {dist.get_rank()}: {name!r} reads hidden states of shape "
                        f"{list(seen.get(name, ()))}, not {list(want)} (b, "
                        f"{'s/t' if tokens != SEQUENCE else 's'}, h)",
                        "Split before the first layer, join after the last norm; in between, only "
                        "attention and the MLP have all tokens.")


def _judge_traffic(strategy):
    make = partial(build, strategy, optimizer_class=torch.optim.AdamW, settings={"lr": 1e-3})
    traffic = record_last_step(lambda model: raise_on_all_ranks(make, model), small_llama(LAYERS),
                               token_batches(2, BATCH, SEQUENCE))
    sizes = Activations(LAYERS, BATCH, SEQUENCE, SIZES["hidden"])
    replicated = sum(p.numel() for name, p in small_llama(LAYERS).named_parameters()
                     if _is_replicated(name))
    judge_collectives(traffic, {"all_gather": PER_LAYER, "reduce_scatter": PER_LAYER}, sizes,
                      small=_OUTSIDE * sizes.elements + 2 * replicated, hints=COLLECTIVE_HINTS)


def _judge_memory(strategy, ranks):
    batches, whole = token_batches(2, BATCH, SEQUENCE), small_llama()
    make = partial(build, strategy, optimizer_class=torch.optim.AdamW, settings={"lr": 1e-3})
    judge_resident_bytes(lambda: make(small_llama()), batches,
                         ResidentBytes.of(whole, sharded_names(whole), ranks),
                         "under sequence parallelism")
    module, _ = raise_on_all_ranks(make, small_llama())
    raise_on_all_ranks(_judge_saved, activation_bytes(module, batches[0]), whole.config, ranks)


def _judge_saved(found, config, ranks):
    """What the layers save for backward, by part: whole memory, of which a piece may be a view."""
    unit = BYTES * BATCH * SEQUENCE * SIZES["hidden"] * config.num_hidden_layers
    limits = predicted(config, ranks)["sequence parallel"]
    for part, most in limits.by_part().items():
        # Half a unit for what one layer keeps for all, such as the rotary angles. Catches pieces
        # that are views of whole hidden states, and hidden states that are gathered for a norm.
        if found[part] > (most + 0.5) * unit:
            raise Wrong(f"rank {dist.get_rank()} keeps {found[part] / unit:.2f} b·s·h numbers a "
                        f"layer for backward, {part}; under sequence parallelism on {ranks} ranks "
                        f"it is {most:.2f}", "Is a piece a view of the whole hidden states? Then "
                        "all of them stay in memory.")


def _judge_refused(strategy, ranks):
    """A sequence that the ranks do not divide."""
    module, _ = raise_on_all_ranks(build, strategy, small_llama(), torch.optim.SGD, {"lr": 0.1})
    [batch] = token_batches(1, BATCH, SEQUENCE - 1)
    with torch.no_grad():
        require_value_error(lambda: module(**batch), f"a sequence of {SEQUENCE - 1} tokens",
                            (SEQUENCE - 1, ranks))

"""Exercise 7.7: a Llama whose hidden states are pieces of the sequence between attention and MLP
trains as the full model does, sends what tensor parallelism sends, and saves less."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labs.checks.explanations import LayerMistake
from labs.checks.guesses import guessed
from labs.checks.invariants import (
    BYTES,
    Activations,
    ResidentBytes,
    judge_collectives,
    judge_resident_bytes,
    record_step,
)
from labs.checks.on_ranks import close, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.checks.reference import Reference, Step
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import marks
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.predictions.communication.traffic import all_reduce
from labs.tensor_parallel import layer_records
from labs.tensor_parallel.groups import every_second_rank, groups_to_try
from labs.tensor_parallel.kept_activations import NORMS, activation_bytes, predicted
from labs.tensor_parallel.sequence_regions import counted_alike, judge_regions
from labs.tensor_parallel.tensor_parallel import sharded_names
from labs.tensor_parallel.whole_batch import (
    ADAMW,
    MEMORY_HINTS,
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
from labs.workers.launcher import launch

# No parameter has as many elements as an activation or a piece of it, so that a collective tells
# what it sends.
SIZES = {"hidden": 48, "heads": 8, "kv_heads": 4, "intermediate": 92, "context": 16}
LAYERS = 4  # where collectives are counted
BATCH, SEQUENCE = 3, 12
PER_LAYER = 4  # all-gathers of b·s·h, and reduce-scatters: forward and backward, attention and MLP
# b·s·h elements in a step outside the layers: after the last norm, and before the first layer in
# backward
_OUTSIDE = {"all_gather": 2}
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
               "sum_gradient(parameter, group).")
LAYER_MISTAKES = (
    # first: means, too, add up to the reference's
    LayerMistake(
        "averaged", "it is the mean over the ranks", "Parts are summed, not averaged.",
        lambda found: close(found.got * found.ranks, found.want)),
    LayerMistake(
        "gradient_not_summed", "it is the gradient of this rank's tokens only: those of all ranks "
        "add up to the reference's", _PARTS_HINT,
        lambda found: _is_replicated(found.name) and close(found.total, found.want)),
    LayerMistake(
        "gradient_not_summed", "it is the gradient of this rank's tokens only: those of all ranks "
        "add up to the reference's", "The embedding is replicated: lab.split_hidden_states "
        "gathers the gradients of all pieces before the first layer.",
        lambda found: "embed" in found.name and close(found.total, found.want)),
    LayerMistake(
        "summed_too_often", "it is {ranks} times the reference's",
        "After the last norm all ranks compute the same, so a sum over the ranks counts it once "
        "for each: lab.split_hidden_states. Gradients of norms are summed once.",
        lambda found: close(found.got, found.ranks * found.want)),
    LayerMistake(
        "neither_full_nor_part", "it is neither the reference's nor this rank's part of it",
        "A function that is given to register_hook gets what this backward pass adds. A hook "
        "that reduces .grad itself after each pass reduces the earlier sum once more.",
        lambda found: found.layer is None and _is_replicated(found.name)))


@dataclass(frozen=True)
class Case:
    """A training. pairs: on two groups of every second rank. parts: backward passes for a step."""

    optimizer: tuple[type, dict]
    bias: bool
    tied: bool = False
    steps: int = STEPS
    pairs: bool = False
    parts: int = 1


# Two backward passes for a step: an answer that reduces .grad after each reduces the first part
# twice. On the pairs one step is enough: a wrong group shows in it.
CASES = {2: (Case(SGD, bias=True, parts=2),),
         4: (Case(ADAMW, bias=False, tied=True), Case(SGD, bias=True, steps=1, pairs=True))}


@check("7.7", hints=HINTS)
def check_sequence_parallel(GatherToRegion, ReduceScatterFromRegion, sequence_parallel):
    """The conjugate pair along the sequence, and sequence_parallel(model, optimizer_class,
    group=None, **settings) -> (module, optimizer) for a Llama of Hugging Face's."""
    on_ranks(_try_regions, GatherToRegion, ReduceScatterFromRegion, world_sizes=(3,))
    difference = max(on_ranks(_try_all, GatherToRegion, ReduceScatterFromRegion, sequence_parallel,
                              world_sizes=(2, 4), timeout=60))
    return (f"equals the reference over {STEPS} steps on 2 and 4 ranks and on a group of 2 of them "
            f"({to_within(difference)}); a layer sends {PER_LAYER} all-gathers and {PER_LAYER} "
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
        module, _ = raise_on_all_ranks(build, strategy, small_llama(), torch.optim.SGD, {"lr": 0.1})
        judge_tokens(module, ranks)
        _judge_traffic(strategy)
        if ranks == 2:
            _judge_memory(strategy, ranks)
    return difference


def small_llama(layers: int = 2, **more) -> nn.Module:
    """The full model, on the rank's device."""
    return models.move_to_rank(models.llama(layers, **more, **SIZES))


def _train(strategy, case: Case) -> float:
    group = every_second_rank() if case.pairs else None
    model = small_llama(bias=case.bias, tied=case.tied)
    reference = Reference(copy.deepcopy(model), make_optimizer(*case.optimizer))
    options = {"group": group} if case.pairs else {}
    module, optimizer = raise_on_all_ranks(build, partial(strategy, **options), model,
                                           *case.optimizer)
    # torchs_own_refused knows the wrappers of data parallelism only.
    raise_on_all_ranks(_require_own, module)
    steps = [Step(step.batch, parts=case.parts, whole=True)
             for step in whole_steps(case.steps, BATCH, SEQUENCE)]
    return train_on_whole_batch(module, optimizer, reference, steps, group,
                                layer_mistakes=LAYER_MISTAKES)


def _is_replicated(name: str) -> bool:
    return "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))


def _require_own(module):
    # Exercise 7.9 lets torch do it; its plan would pass here as well.
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise Wrong(f"rank {dist.get_rank()}: parameter {name!r} is a DTensor: torch's own "
                        "parallelize_module does the work", "Build it from your two functions; "
                        "torch's is for exercise 7.9.", code="ready_made")


def judge_tokens(module: nn.Module, ranks: int) -> None:
    """On a rank: raises Wrong on all ranks unless each norm of a `small_llama` that was cut reads
    s/t tokens, and the matrices of attention and the MLP read all. Layers whose forward nobody
    calls are left out."""
    seen: dict[str, tuple[int, ...]] = {}
    wanted = {name: SEQUENCE // ranks if "norm" in name else SEQUENCE
              for name, _ in module.named_modules() if name.endswith(("norm", "q_proj", "up_proj"))}

    def keep(name, _, arguments, named):
        hidden = next(iter((*arguments, *named.values())))
        seen[name] = tuple(models.local_shard(hidden).shape)

    # Registered after the student's hooks, so it sees what these make of the input.
    hooks = [module.get_submodule(name).register_forward_pre_hook(partial(keep, name),
                                                                  with_kwargs=True)
             for name in wanted]
    with torch.no_grad():
        module(**token_batches(1, BATCH, SEQUENCE)[0])
    for hook in hooks:
        hook.remove()
    raise_on_all_ranks(_judge_shapes, seen, wanted)


def _judge_shapes(seen, wanted):
    # Catches tensor parallelism, whose norms see all tokens, and a split or a gather in one layer
    # only.
    for name, tokens in wanted.items():
        want = (BATCH, tokens, SIZES["hidden"])
        if seen.get(name, want) != want:
            raise Wrong(f"rank {dist.get_rank()}: {name!r} reads hidden states of shape "
                        f"{list(seen[name])}, not {list(want)} (b, "
                        f"{'s/t' if tokens != SEQUENCE else 's'}, h)",
                        "Split before the first layer, join after the last norm; in between, only "
                        "attention and the MLP have all tokens.", code="sequence_not_split")


def _judge_traffic(strategy):
    make = partial(build, strategy, optimizer_class=torch.optim.AdamW, settings={"lr": 1e-3})
    traffic = record_step(lambda model: raise_on_all_ranks(make, model), small_llama(LAYERS),
                               token_batches(2, BATCH, SEQUENCE))
    # An all-to-all or a scatter from each rank counts as the reduce-scatter that it stands for.
    traffic.events = [counted_alike(call) for call in traffic.calls]
    sizes = Activations(LAYERS, BATCH, SEQUENCE, SIZES["hidden"])
    replicated = sum(p.numel() for name, p in small_llama(LAYERS).named_parameters()
                     if _is_replicated(name))
    # The invariant: each all-reduce of tensor parallelism becomes one all-gather and one
    # reduce-scatter, and so the same bytes; beside them only the gradients of norms and biases are
    # summed.
    judge_collectives(traffic, {"all_gather": PER_LAYER, "reduce_scatter": PER_LAYER}, sizes,
                      small=2 * replicated, hints=COLLECTIVE_HINTS, outside=_OUTSIDE)


def _judge_memory(strategy, ranks):
    batches, whole = token_batches(2, BATCH, SEQUENCE), small_llama()
    make = partial(build, strategy, optimizer_class=torch.optim.AdamW, settings={"lr": 1e-3})
    judge_resident_bytes(lambda: make(small_llama()), batches,
                         ResidentBytes.of(whole, sharded_names(whole), ranks),
                         "under sequence parallelism", MEMORY_HINTS)
    module, _ = raise_on_all_ranks(make, small_llama())
    raise_on_all_ranks(_judge_saved, activation_bytes(module, batches[0]), whole.config, ranks)


def _judge_saved(found, config, ranks):
    """What the layers save for backward: all of its memory, of which a piece may be a view."""
    unit = BYTES * BATCH * SEQUENCE * SIZES["hidden"] * config.num_hidden_layers
    limits = predicted(config, ranks)["sequence parallel"]
    # Catches pieces that are views of whole hidden states, and hidden states that are gathered for
    # a norm; the total, where the norms are computed in another module's forward. Half a unit is
    # for what one layer keeps for all, such as the rotary angles.
    kept = {NORMS: (found[NORMS], limits.norms + 0.1),
            "in all": (sum(found.values()), limits.total + 0.5)}
    for part, (nbytes, most) in kept.items():
        if nbytes > most * unit:
            raise Wrong(f"rank {dist.get_rank()} keeps {nbytes / unit:.2f} b·s·h numbers a "
                        f"layer for backward, {part}; under sequence parallelism on {ranks} ranks "
                        f"it is at most {most:.2f}", "Is a piece a view of the whole hidden "
                        "states? Then all of them stay in memory.", code="activations_kept")


RANKS = 4
_OURS = ("tensor parallel, yours", "sequence parallel, yours")


@shows("7.7")
def show_activations(tensor_parallel: Callable, sequence_parallel: Callable) -> Picture:
    """Draws what a layer keeps for backward on one of 4 ranks, in b·s·h numbers, by part, with what
    the formula says; at last what the formula says if the inputs are gathered again."""
    strategies = [layer_records.whole, tensor_parallel, sequence_parallel]
    found = launch(layer_records.layer_memory, strategies, ranks=RANKS, quiet=True)[0]
    unit = layer_records.unit_bytes()
    config = models.llama(1, **layer_records.SIZES).config
    formulas = list(predicted(config, RANKS).values())
    totals = " · ".join(f"{each.total / unit:.2f}" for each in found)
    panel = Panel("kept by a layer", f"b·s·h numbers, on one of {RANKS} ranks",
                  [*(each.parts for each in found),
                   {name: unit * value for name, value in formulas[-1].by_part().items()}],
                  size=unit, predicted=[*(unit * each.total for each in formulas[:-1]), None],
                  pale=(len(found),))
    sizes = [f"{sum(each.parts.values()) / unit:.3g}" for each in found]
    return side_by_side(["nothing sharded", *_OURS, "inputs gathered again"], [panel],
                        f"total by the memory meter at the end of forward: {totals}",
                        f"A layer keeps {sizes[0]} b·s·h numbers; tensor parallel {sizes[1]}, "
                        f"sequence parallel {sizes[2]}")


@shows("7.7")
def show_layer_collectives(tensor_parallel: Callable, sequence_parallel: Callable) -> Picture:
    """Draws calls and bytes of a layer's collectives in one step, by kind, with what the formula
    says: two all-reduces of b·s·h in forward and two in backward, or as many pairs of an all-gather
    and a reduce-scatter."""
    return _collectives([tensor_parallel, sequence_parallel], _OURS)


@shows("7.9")
def show_collectives_of_plan(tensor_parallel: Callable, sequence_parallel: Callable,
                             torchs_parallel: Callable) -> Picture:
    """Draws the same, with torch's plan in a third row."""
    return _collectives([tensor_parallel, sequence_parallel, torchs_parallel],
                        (*_OURS, "torch's plan"))


def _collectives(strategies, names) -> Picture:
    found = launch(layer_records.layer_traffic, strategies, ranks=RANKS, quiet=True)[0]
    sent = 4 * all_reduce(layer_records.unit_bytes(), RANKS)
    guess = guessed("7.7")
    guesses = [None, guess and guess * sum(found[0].sent.values()), *[None] * (len(found) - 2)]
    panels = [Panel("calls of a layer and step", "collectives", [each.calls for each in found],
                    predicted=[4, *[8] * (len(found) - 1)]),
              Panel("sent by a rank, of a layer and step", "kB", [each.sent for each in found],
                    size=1e3, predicted=[sent] * len(found), guessed=guesses)]
    calls, sizes = ([sum(getattr(each, what).values()) for each in found[:2]]
                    for what in ("calls", "sent"))
    return side_by_side([*names], panels, _note(found[1:]), "Sequence parallelism against tensor "
                        f"parallelism: {calls[1] / calls[0]:.2g} times the calls, "
                        f"{sizes[1] / sizes[0]:.2f} times the bytes",
                        marks.answered(guess, sizes[1] / sizes[0], "times the bytes"))


def _note(found) -> str:
    small = " and ".join(f"{each.calls.get('all_reduce', 0):g}" for each in found)
    return (f"all-reduces for the gradients of a layer's 2 norms: {small}; their bytes are too few "
            "to be seen")

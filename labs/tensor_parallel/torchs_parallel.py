"""Exercise 7.9: a plan for torch's parallelize_module trains as the reference does, with 1/t of all
matrices on a rank and the collectives of sequence parallelism."""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from labs.checks.explanations import LayerMistake
from labs.checks.invariants import (
    BYTES,
    Activations,
    ResidentBytes,
    judge_collectives,
    record_step,
)
from labs.checks.on_ranks import close, on_ranks, raise_on_all_ranks
from labs.checks.reference import Reference
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures.tables import Table
from labs.tensor_parallel import layer_records
from labs.tensor_parallel.sequence_parallel import (
    BATCH,
    LAYERS,
    PER_LAYER,
    RANKS,
    SEQUENCE,
    SIZES,
    judge_tokens,
    small_llama,
)
from labs.tensor_parallel.tensor_parallel import sharded_names
from labs.tensor_parallel.whole_batch import (
    ADAMW,
    SGD,
    STEPS,
    build,
    make_optimizer,
    token_batches,
    train_on_whole_batch,
    whole_steps,
)
from labs.words import counted, to_within
from labs.workers.launcher import launch

OPTIMIZERS = {2: ADAMW, 4: SGD}
# b·s·h elements in a step outside the layers: the embedding's sum; in forward all tokens for the
# head; in backward its input's gradients, and those of the pieces that the first layer was given.
_OUTSIDE = {"all_reduce": 1, "all_gather": 2, "reduce_scatter": 1}
_ROWS = ("RowwiseParallel(output_layouts=Shard(1)) ends in a reduce-scatter; without the argument "
         "it is an all-reduce. With use_local_output=True on PrepareModuleInput, each matrix "
         "reduces the gradient of its input alone.")
HINTS = {
    "mixed torch.Tensor and DTensor": "A plain tensor meets a DTensor. Which style turns the input "
    "of each module with parameters into a DTensor? The residual stream is plain: "
    "use_local_output.",
    "must match the size of tensor": "A tensor that is cut meets a whole one. Attention and the "
    "MLP take all tokens and give back pieces, gate and up are cut alike. Which layouts has their "
    "input before and after PrepareModuleInput, and their output?",
    "only be called once on a module": "Two entries of the plan fit one module, or a plan is "
    "applied twice: each module gets one style.",
    "should have same length": "self_attn is called with hidden_states=...: input_kwarg_layouts "
    "and desired_input_kwarg_layouts. mlp is called with one positional argument.",
    "must have same reduction dim": "Query, key and value are cut by columns, what follows by "
    "rows.",
    "is invalid for input of size": "Query, key and value are cut by columns, what follows by "
    "rows."}
COLLECTIVE_HINTS = {
    "all_reduce": _ROWS,
    "all_gather": "Gather once at the entry of attention and of the MLP, by PrepareModuleInput on "
                  "self_attn and mlp.",
    "reduce_scatter": "One at the exit of attention and one at that of the MLP."}
LAYER_MISTAKES = (
    LayerMistake(
        "gradient_not_summed", "it is the gradient of this rank's tokens only: those of all ranks "
        "add up to the reference's", "A norm that sees a piece of the sequence needs "
        "SequenceParallel(): its gradient is then Partial(sum), and what reads it must reduce it; "
        "to_local() does not.", lambda found: "norm" in found.name),)


@check("7.9", hints=HINTS)
def check_torchs_parallel(torchs_parallel: Callable):
    """torchs_parallel(model, optimizer_class, **settings) -> (module, optimizer): a Llama whose
    layers are cut by torch's parallelize_module. Trained under loss_parallel()."""
    difference = max(on_ranks(_try_all, torchs_parallel, world_sizes=(2, 4), timeout=60))
    return (f"equals the reference over {STEPS} steps on 2 and 4 ranks ({to_within(difference)}); "
            f"a rank holds 1/t of every matrix, and a layer sends {PER_LAYER} all-gathers and "
            f"{PER_LAYER} reduce-scatters of b·s·h elements a step")


def _try_all(strategy) -> float:
    ranks = dist.get_world_size()
    make = partial(_parallelized, strategy)
    with loss_parallel():  # forward and backward of a sharded loss
        difference = _train(make, *OPTIMIZERS[ranks])
        module, _ = raise_on_all_ranks(partial(make, lr=0.1), small_llama(), torch.optim.SGD)
        _judge_traffic(make)
        # The invariant: norms read s/t tokens, matrices all. A plan without sequence parallelism
        # trains as well, so the training cannot tell.
        judge_tokens(module, ranks)
        raise_on_all_ranks(_judge_memory, module, ranks)
    return difference


def _parallelized(strategy, model, optimizer_class, **settings):
    """What the strategy returns. torch leaves out an entry of a plan that fits no module, with a
    warning that ranks do not show; here it is an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = build(strategy, model, optimizer_class, settings)
    said = [str(warning.message) for warning in caught]
    for message in said:
        if "could not be resolved" in message:
            key = message.split("'")[1]
            raise Wrong(f"the plan's entry {key!r} fits no module of the model: torch warns, and "
                        "leaves it out", "Names are those of model.named_modules(); * stands for "
                        "all layers.", code="entry_fits_nothing")
    return pair


def _train(make, optimizer_class, settings) -> float:
    model = small_llama()
    reference = Reference(copy.deepcopy(model), make_optimizer(optimizer_class, settings))
    module, optimizer = raise_on_all_ranks(partial(make, **settings), model, optimizer_class)
    raise_on_all_ranks(_require_torchs, module)
    try:
        return train_on_whole_batch(module, optimizer, reference,
                                    whole_steps(STEPS, BATCH, SEQUENCE),
                                    layer_mistakes=LAYER_MISTAKES)
    except Wrong:  # on all ranks alike
        _judge_copies(module)
        raise


def _judge_copies(module):
    """Raises Wrong on all ranks where a replicated parameter is no longer the same on all ranks."""
    own = {name: p.to_local().detach() for name, p in module.named_parameters()
           if isinstance(p, DTensor) and p.placements[0].is_replicate()}
    firsts = {name: tensor.clone() for name, tensor in own.items()}
    for tensor in firsts.values():
        dist.broadcast(tensor, src=0)
    raise_on_all_ranks(_judge_equal, own, firsts)


def _judge_equal(own, firsts):
    # Catches an answer that reads the gradient of a norm by to_local(): no error, but other steps.
    for name, tensor in own.items():
        if not close(tensor, firsts[name]):
            raise Wrong(f"rank {dist.get_rank()}: its copy of {name!r} is another one than rank "
                        "0's: the ranks took different steps",
                        "The gradient of a norm is Partial(sum): to_local() is this rank's part "
                        "of it, full_tensor() the sum.", code="ranks_differ")


def _require_torchs(module):
    # Catches the answer to 7.7 handed in once more, and a plan that is empty.
    own = {name: isinstance(p, DTensor) for name, p in module.named_parameters()}
    plain = [name for name, is_dtensor in own.items() if not is_dtensor]
    if len(plain) == len(own):
        raise Wrong("no parameter is a DTensor: nothing was cut by parallelize_module",
                    "parallelize_module(model, mesh, plan) changes the model in place.",
                    code="not_sharded")
    if plain:
        raise Wrong(f"rank {dist.get_rank()}: {plain[0]!r} is no DTensor: the plan has no style "
                    "for its module", "Each matrix and each norm needs a style of its own.",
                    code="missing_entry")
    for name, parameter in module.named_parameters():
        on = parameter.device_mesh.size()
        if on != dist.get_world_size():
            raise Wrong(f"parameter {name!r} is on {counted(on, 'rank')} of "
                        f"{dist.get_world_size()}", "The mesh has all ranks: "
                        "init_device_mesh(device, (dist.get_world_size(),)).", code="wrong_mesh")


def _judge_traffic(make):
    batches = token_batches(2, BATCH, SEQUENCE)
    traffic = record_step(
        lambda model: raise_on_all_ranks(partial(make, lr=1e-3), model, torch.optim.SGD),
        small_llama(LAYERS), batches)
    sizes = Activations(LAYERS, BATCH, SEQUENCE, SIZES["hidden"])
    norms = sum(p.numel() for name, p in small_llama(LAYERS).named_parameters() if "norm" in name)
    allowed = {"all_gather": PER_LAYER, "reduce_scatter": PER_LAYER}
    # beside these: three numbers for each token, for the loss, and the norms' gradients
    judge_collectives(traffic, allowed, sizes, small=4 * BATCH * SEQUENCE + 4 * norms,
                      hints=COLLECTIVE_HINTS, outside=_OUTSIDE)


def _judge_memory(module, ranks):
    """Parameters only: gradients and optimizer state have their layout, and what torch allocates
    for them may differ between versions."""
    whole = small_llama()
    cut = [*sharded_names(whole), "model.embed_tokens.weight", "lm_head.weight"]
    allowed = ResidentBytes.of(whole, cut, ranks)
    # Private: a DTensor has no storage of its own. The storage, not numel: a view of a whole matrix
    # would keep all of it.
    held = sum(getattr(p, "_local_tensor", p).untyped_storage().nbytes()
               for p in module.parameters())
    if held > BYTES * allowed.elements:
        raise Wrong(f"rank {dist.get_rank()} holds {held:,} bytes of parameters; with every matrix "
                    f"cut it is {BYTES * allowed.elements:,}{allowed.formula}",
                    "Each of the seven matrices of a layer needs ColwiseParallel or "
                    "RowwiseParallel.", code="partly_sharded")


@shows("7.9")
def show_comm_debug(torchs_parallel: Callable, layers: int = 2) -> Table:
    """A table of the collectives of forward and backward: what torch's CommDebugMode counts, and
    what the lab counts."""
    counts = launch(layer_records.both_counts, torchs_parallel, layers, ranks=RANKS, quiet=True)[0]
    return Table(f"collectives of forward and backward, {layers} layers, {RANKS} ranks",
                 ("collective", "by CommDebugMode", "by the lab's Traffic"),
                 [(kind.replace("_", "-"), *numbers) for kind, numbers in counts.items()],
                 note=f"{4 * layers} all-gathers and {4 * layers} reduce-scatters are the layers'; "
                      "the others are those of embedding, head and loss")

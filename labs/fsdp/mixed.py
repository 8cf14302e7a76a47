"""Exercise 4.5: gather and compute in bf16, reduce and update in fp32."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from labs.checks.comparison import compare
from labs.checks.gpu_notes import measured_on_gpus, rounds_of
from labs.checks.guesses import guessed
from labs.checks.invariants import judge_recorded
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.reference import Reference
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp import memory_limits, scaffold, strategy_checks
from labs.fsdp.comparisons import memory_panel
from labs.fsdp.units import judge_collectives, judge_unit_memory
from labs.meters.traffic import CollectiveCall
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.training import models, strategies

GATHERED = 2  # bytes of a bf16 number
TOLERANCE = 0.02  # relative, of a loss in bf16 to the reference's in fp32


@check("4.5", hints={"the same dtype": "Every unit needs the policy, the root too.",
                     "mixed dtype": "What a block returns goes into the next unit: output_dtype, "
                                    "if any, is for the root alone."})
def check_mixed(strategy: Callable) -> str:
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): each block a unit,
    parameters gathered and computed with in bf16, gradients reduced and kept in fp32."""
    on_ranks(_train_and_record, strategy, world_sizes=(2,), timeout=strategy_checks.TIMEOUT)
    return ("keeps fp32 shards, gathers 2 bytes and reduces 4 bytes for each parameter, computes "
            f"in bf16, and its losses are the reference's to {TOLERANCE:.0%}")


def _train_and_record(strategy):
    model = strategy_checks.make_model()
    computed = _record_types(model)
    reference = Reference(strategy_checks.make_model(), strategy_checks.make_optimizer)
    module, optimizer = raise_on_all_ranks(strategy_checks.build, strategy, model)
    strategy_checks.judge_built(module, optimizer)
    losses = []
    for step in strategy_checks.steps():
        loss = module(**step.inputs()).loss
        loss.backward()
        gradients = {name: p.grad for name, p in strategy_checks.named_parameters(module).items()}
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append((mean.item() / dist.get_world_size(), reference.train(step)))
    raise_on_all_ranks(_judge_types, module, computed, gradients)
    want = strategy_checks.one_unit_per_block(dist.get_world_size())
    events = strategy_checks.record_events(strategy)
    raise_on_all_ranks(judge_collectives, events, want)
    raise_on_all_ranks(_judge_bytes, [e for e in events if isinstance(e, CollectiveCall)])
    usual = strategy_checks.record_memory(strategies.fsdp2)
    judge_recorded(partial(strategy_checks.record_memory, strategy), judge_unit_memory, usual, want,
                   GATHERED)
    raise_on_all_ranks(_judge_losses, losses)


def _record_types(model) -> dict[str, torch.dtype]:
    """Returns a dictionary that each forward fills: unit -> type of the parameters it computes
    with. The hook runs inside the unit, after FSDP has gathered and cast."""
    computed = {}
    for number, block in enumerate(models.blocks(model)):
        block.mlp.c_fc.register_forward_pre_hook(
            lambda layer, _, n=number: computed.update({f"block {n}": layer.weight.dtype}))
    model.transformer.ln_f.register_forward_pre_hook(
        lambda layer, _: computed.update({"the root": layer.weight.dtype}))
    return computed


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _judge_types(module, computed, gradients):
    rank = f"rank {dist.get_rank()}"
    # The shards that the optimizer updates stay in fp32: model.bfloat16() gives bf16 ones.
    for name, parameter in strategy_checks.named_parameters(module).items():
        if parameter.dtype != torch.float32:
            raise Wrong(f"{rank} keeps {name!r} in {_name(parameter.dtype)}: small updates are "
                        "rounded away", "Leave the model in fp32; the policy casts what is "
                        "gathered.", code="parameters_not_fp32")
    # Every unit computes in bf16: a unit without the policy, and one with fp16, are found here.
    for unit, dtype in computed.items():
        if dtype != torch.bfloat16:
            raise Wrong(f"{rank}: {unit} computes with parameters in {_name(dtype)}, not bfloat16",
                        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, ...) for every unit, the "
                        "root too.", code="wrong_compute_dtype")
    # The optimizer gets fp32 gradients, to add to fp32 moments.
    for name, gradient in gradients.items():
        if gradient is not None and gradient.dtype != torch.float32:
            raise Wrong(f"{rank}: the gradient of {name!r} is {_name(gradient.dtype)}",
                        code="wrong_dtype")


def _judge_bytes(calls):
    rank = f"rank {dist.get_rank()}"
    # bf16 is gathered and fp32 reduced; without reduce_dtype the sums are made in bf16.
    hints = {"all_gather": "param_dtype=torch.bfloat16", "reduce_scatter":
             "reduce_dtype=torch.float32: by default gradients are reduced in the type that was "
             "computed in, and sums of many ranks lose digits."}
    for kind, each in (("all_gather", GATHERED), ("reduce_scatter", strategy_checks.BYTES)):
        for call in calls:
            if call.kind == kind and call.bytes != each * call.elements:
                raise Wrong(f"{rank}: {kind} carries {call.bytes // call.elements} bytes for each "
                            f"element, not {each}", hints[kind], code="wrong_traffic_dtype")


def _judge_losses(losses):
    # bf16 rounds each loss a little; a larger difference means other training, e.g. another rate.
    for step, (got, want) in enumerate(losses):
        if not abs(got - want) <= TOLERANCE * want:
            raise Wrong(f"step {step}: the mean loss is {got:.3f}, the reference's in fp32 "
                        f"{want:.3f}", "Only the types may differ from exercise 4.1.",
                        code="wrong_loss")


@shows("4.5")
def show_precision(shard: Callable, mixed: Callable) -> Picture:
    """Draws the peak of forward by category (in backward, blocks are freed while others compute),
    and the bytes that are gathered and reduced for each parameter in a step, with the guess."""
    both = partial(scaffold.shard_mixed, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    size = replace(memory_limits.preset(4, ranks=2), batch=2)
    compared = compare({"fp32": shard, "bf16, reduced in fp32": mixed,
                        "bf16, reduced in bf16": both},
                       size, rounds=rounds_of(size), quiet=True)
    found = compared.results
    moved = [{kind: one.bytes[kind] / compared.parameters
              for kind in ("all_gather", "reduce_scatter")} for one in found.values()]
    sent = [sum(kinds.values()) for kinds in moved]
    return side_by_side(list(found), [
        memory_panel("peak of forward", [r.report.peaks["forward"] for r in found.values()]),
        Panel("gathered and reduced", "bytes per parameter", moved,
              guessed=[None, guessed("4.5"), None])], measured_on_gpus(compared),
        f"bf16 sends {1 - sent[1] / sent[0]:.0%} fewer bytes, reduced in bf16 too "
        f"{1 - sent[2] / sent[0]:.0%} fewer")

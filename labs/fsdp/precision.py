"""Mixed precision: the check of exercise 4.5, what each type does to bytes, and what fp16 loses."""

from dataclasses import replace

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Wrong, check, shows
from labs.fsdp import limits, measuring, trained
from labs.pictures import fsdp as pictures
from labs.pictures import palette
from labs.pictures.tables import Table
from labs.training import data, models, strategies
from labs.workers.launcher import launch

CLOSE = 0.02  # of a loss in bf16 to the twin's in fp32


@check("4.5", hints={"the same dtype": "Every unit needs the policy, the root too."})
def check_mixed(strategy):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): each block a unit,
    parameters gathered and computed with in bf16, gradients reduced and kept in fp32."""
    on_ranks(_mixed, strategy, world_sizes=(2,))
    return ("keeps fp32 shards, gathers 2 bytes and reduces 4 bytes for each parameter, computes "
            f"in bf16, and its losses are the twin's to {CLOSE:.0%}")


def _mixed(strategy):
    made, computed = trained.model(), {}
    for number, block in enumerate(models.blocks(made)):
        block.mlp.c_fc.register_forward_pre_hook(
            lambda layer, _, n=number: computed.update({f"block {n}": layer.weight.dtype}))
    made.transformer.ln_f.register_forward_pre_hook(
        lambda layer, _: computed.update({"the root": layer.weight.dtype}))
    twin = trained.Twin(trained.model())
    module, optimizer = raise_on_all_ranks(trained.built, strategy, made)
    losses = []
    for batch in trained.batches():
        loss = module(**trained.share(batch)).loss
        loss.backward()
        gradients = {name: p.grad for name, p in trained.names(module).items()}
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append((mean.item() / dist.get_world_size(), twin.step(batch)))
    raise_on_all_ranks(_judge_types, module, computed, gradients)
    raise_on_all_ranks(_judge_wire, trained.look(strategy, tries=1).calls)
    raise_on_all_ranks(_judge_losses, losses)


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _judge_types(module, computed, gradients):
    rank = f"rank {dist.get_rank()}"
    for name, parameter in trained.names(module).items():
        if parameter.dtype != torch.float32:
            raise Wrong(f"{rank} keeps {name!r} in {_name(parameter.dtype)}: small updates are "
                        "rounded away", "Leave the model in fp32; the policy casts what is "
                        "gathered.")
    for unit, dtype in computed.items():
        if dtype != torch.bfloat16:
            raise Wrong(f"{rank}: {unit} computes with parameters in {_name(dtype)}, not bfloat16",
                        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, ...) for every unit, the "
                        "root too.")
    for name, gradient in gradients.items():
        if gradient is not None and gradient.dtype != torch.float32:
            raise Wrong(f"{rank}: the gradient of {name!r} is {_name(gradient.dtype)}")


def _judge_wire(calls):
    rank = f"rank {dist.get_rank()}"
    wide = next((c for c in calls if c.kind not in ("all_gather", "reduce_scatter")), None)
    if wide is not None:
        raise Wrong(f"{rank}: {wide.kind} carries {wide.elements:,} elements; fully sharded "
                    "training has all-gather and reduce-scatter")
    for kind, each in (("all_gather", 2), ("reduce_scatter", 4)):
        for call in calls:
            if call.kind == kind and call.bytes != each * call.elements:
                hint = {"all_gather": "param_dtype=torch.bfloat16", "reduce_scatter":
                        "reduce_dtype=torch.float32: by default gradients are reduced in the type "
                        "that was computed in, and sums of many ranks lose digits."}[kind]
                raise Wrong(f"{rank}: {kind} carries {call.bytes // call.elements} bytes for each "
                            f"element, not {each}", hint)


def _judge_losses(losses):
    for step, (got, want) in enumerate(losses):
        if not abs(got - want) <= CLOSE * want:
            raise Wrong(f"step {step}: the mean loss is {got:.3f}, the twin's in fp32 {want:.3f}",
                        "Do all settings (**settings) reach the optimizer?")


def with_policy(**types):
    """A strategy: each block a unit, under MixedPrecisionPolicy(**types)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(**types)

    def strategy(model, optimizer_class, **settings):
        return strategies.fsdp2(model, optimizer_class, reshard=None, mp_policy=policy, **settings)

    return strategy


@shows("4.5")
def show_precision(shard, mixed):
    """Peak of forward by category (later, blocks are freed while others compute), and megabytes
    gathered and reduced in a step, of one rank."""
    both = with_policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    found = measuring.measure({"fp32": shard, "bf16, reduced in fp32": mixed,
                               "bf16, reduced in bf16": both},
                              replace(limits.size(4, ranks=2), batch=2), rounds=0, tries=1).results
    panels = [pictures.Panel("peak of forward", "MB",
                             [r.report.peaks["forward"] for r in found.values()], 1e6)]
    panels += [pictures.Panel(title, "MB per step", [_bytes(r, kind) for r in found.values()], 1e6,
                              colour=palette.COLLECTIVES[kind])
               for title, kind in (("gathered", "all_gather"), ("reduced", "reduce_scatter"))]
    return pictures.side_by_side(list(found), panels)


def _bytes(result, kind) -> int:
    return sum(call.bytes for call in result.calls if call.kind == kind)


TOKENS = 262_144  # of a whole batch: usual for language models; this rank takes 256 at a time
MICRO = 256
SCALE = 2.0**16
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@shows("4.5")
def underflow() -> Table:
    """Gradients that became zero in fp16 and in bf16, with the loss as it is and multiplied: one
    micro-batch of a large batch, on 2 ranks with FSDP. A multiplied loss brings back what was too
    small for the type; it does not bring back digits."""
    found = launch(_underflow, ranks=2, quiet=True, verify=False, device="cpu", hang_after=60)
    zeros = {name: [sum(pair) for pair in zip(*(r["zeros"][name] for r in found), strict=True)]
             for name in TYPES}
    numbers = sum(r["numbers"] for r in found)
    rows = [(name, f"{_smallest(TYPES[name]):.0e}", f"{lost:,}", f"{lost / numbers:.2%}",
             f"{scaled:,}") for name, (lost, scaled) in zeros.items()]
    return Table(f"gradients that are zero and should not be: {MICRO} of a batch's {TOKENS:,} "
                 "tokens", ("computed in", "smallest number", "zeros", "share",
                            f"zeros, loss × {SCALE:,.0f}"), rows,
                 note=f"of {numbers:,} numbers that are not zero in fp32")


def _smallest(dtype) -> float:
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def _underflow() -> dict:
    """On a rank: how many numbers its gradients have that fp32 knows not to be zero, and type ->
    (how many of them are zero, how many with the loss multiplied)."""
    torch.set_num_threads(1)
    exact = _gradients(None, 1.0)
    return {"numbers": _count(g != 0 for g in exact),
            "zeros": {name: [_count((g == 0) & (e != 0) for g, e in
                                    zip(_gradients(dtype, scale), exact, strict=True))
                             for scale in (1.0, SCALE)] for name, dtype in TYPES.items()}}


def _count(masks) -> int:
    return sum(int(mask.sum()) for mask in masks)


def _gradients(dtype, scale) -> list:
    """This rank's shards of the gradients of a micro-batch, weighted by its share of the batch."""
    strategy = with_policy(param_dtype=dtype, reduce_dtype=torch.float32)
    module, _ = strategy(models.gpt2(4, 64, 4, 64), torch.optim.SGD, lr=0.1)
    [batch] = data.lm_batches(1, MICRO // 64, 64, seed=dist.get_rank())
    (module(**batch).loss * (MICRO / TOKENS) * scale).backward()
    return [p.grad.to_local() for p in module.parameters()]

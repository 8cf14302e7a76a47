"""FSDP1, FullyShardedDataParallel: its names, what each became in FSDP2, and one step of each."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from labs.checks.comparison import compare, model_of
from labs.checks.gpu_notes import rounds_of
from labs.checks.verdicts import shows
from labs.fsdp import strategy_checks
from labs.fsdp.comparisons import draw_wrappings, few_tokens
from labs.meters.traffic import Mark, Traffic
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.training import models, strategies
from labs.training.presets import Preset
from labs.workers.channel import report
from labs.workers.launcher import launch

RANKS = 2
WITHOUT_GPU = (" Without a GPU there is no memory to pin and no stream to wait for: CPUOffload "
               "does its step here without these two, and saves nothing.")


def _options() -> dict[tuple[str, str], dict]:
    """Returns (name in FSDP1, name in FSDP2) -> options of FullyShardedDataParallel."""
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        ShardingStrategy,
    )

    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        ("ShardingStrategy.FULL_SHARD", "reshard_after_forward=True"):
            {"sharding_strategy": ShardingStrategy.FULL_SHARD},
        ("ShardingStrategy.SHARD_GRAD_OP", "reshard_after_forward=False"):
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        ("ShardingStrategy.NO_SHARD", "none: DDP"):
            {"sharding_strategy": ShardingStrategy.NO_SHARD},
        ("MixedPrecision", "MixedPrecisionPolicy"): {"mixed_precision": half},
        ("BackwardPrefetch.BACKWARD_PRE", "the default"):
            {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
        ("BackwardPrefetch.BACKWARD_POST", "set_modules_to_backward_prefetch"):
            {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        ("CPUOffload(offload_params=True)", "CPUOffloadPolicy()"):
            {"cpu_offload": CPUOffload(offload_params=True)},
    }


@shows("FSDP1's names")
def show_fsdp1_names() -> Table:
    """Returns a table of FSDP1's names, their successors, and what one step of each sent."""
    rows = launch(_run_every_name, ranks=RANKS, quiet=True, verify=False, hang_after=60)[0]
    return Table(f"FSDP1 on {RANKS} ranks, one step of each",
                 ("FSDP1", "FSDP2", "gathers", "reduces", "kB", "next block", "loss"),
                 rows, left=1, note="kB: gathered. Next block: whether its gather is called before "
                 "or after the gradients of this block."
                 + WITHOUT_GPU * (not torch.accelerator.is_available()))


def _run_every_name() -> list[tuple[str, ...]]:
    torch.set_num_threads(1)
    rows, options = [], _options()
    for number, ((old, new), chosen) in enumerate(options.items(), 1):
        report(step=number, total=len(options) + 1)
        with _no_pinning_without_gpu():
            rows.append((old, new, *_run_step(chosen)))
    return [*rows, ("FullStateDictConfig", "StateDictOptions(full_state_dict=True)",
                    *_gather_state_dict())]


@contextlib.contextmanager
def _no_pinning_without_gpu():
    """FSDP1's CPUOffload pins its shards and waits for a stream even where there is no GPU; without
    one, both are made to do nothing."""
    with contextlib.ExitStack() as stack:
        if not torch.accelerator.is_available():
            stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self))
            stack.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", create=True))
        yield


def _run_step(options) -> tuple[str, ...]:
    """Returns (all-gathers, reductions, kB gathered, when the next block is gathered, loss) of one
    step."""
    model, traffic = strategy_checks.make_model(), Traffic()
    for block in models.blocks(model):
        block.mlp.register_forward_hook(functools.partial(strategy_checks.mark_gradients, traffic))
    module, optimizer = strategies.fsdp1(model, torch.optim.AdamW, options)
    [step] = strategy_checks.steps(1)
    with traffic:
        loss = module(**step.inputs()).loss
        traffic.mark("backward begins")
        loss.backward()
    optimizer.step()
    # Gradients only: a collective of one number is none of them.
    reduces = [c for c in traffic.of("reduce_scatter", "all_reduce") if c.elements > 1]
    gathers, kilobytes = _gathers(traffic)
    return gathers, str(len(reduces)), kilobytes, _next_block(traffic), f"{loss.item():.2f}"


def _next_block(traffic) -> str:
    """Returns "before" or "after": where the all-gather of the next block in backward stands, and
    the gradients of this one; "–" where blocks are not gathered in backward."""
    what = [event.what if isinstance(event, Mark) else event.kind for event in traffic.events
            if isinstance(event, Mark) or event.elements]
    backward = what[what.index("backward begins"):]
    if "all_gather" not in backward:
        return "–"
    ahead = []
    for number in range(1, strategy_checks.LAYERS):
        # Where block `number` from the end begins to compute its gradients. More gathers than
        # blocks so far means that the next block's has been called already.
        place = [at for at, one in enumerate(backward) if one == "gradients"][number - 1]
        ahead.append(backward[:place].count("all_gather") > number)
    return {(True,): "before", (False,): "after"}.get(tuple(set(ahead)), "mixed")


def _gather_state_dict() -> tuple[str, ...]:
    """Gathers the full model on rank 0, as FSDP1 does; returns what `_run_step` does."""
    from torch.distributed.fsdp import (
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    module, _ = strategies.fsdp1(strategy_checks.make_model(), torch.optim.AdamW)
    # Offloading to the CPU from the CPU crashes FSDP1 (torch 2.13, signal 11 in state_dict).
    config = FullStateDictConfig(offload_to_cpu=torch.accelerator.is_available(), rank0_only=True)
    with warnings.catch_warnings(), Traffic() as traffic:
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT,
                                                      config):
            module.state_dict()
    dist.barrier()
    gathers, kilobytes = _gathers(traffic)
    return gathers, "0", kilobytes, "–", "–"


def _gathers(traffic) -> tuple[str, str]:
    calls = [call for call in traffic.of("all_gather") if call.elements]
    return str(len(calls)), f"{sum(call.bytes for call in calls) / 1e3:,.0f}"


@shows("FSDP1's wrapping policies")
def show_wrap_policies(by_class: Callable, by_size: Callable, preset: Preset) -> Picture:
    """Draws memory and collectives under FSDP1's two wrapping policies. by_class: a strategy with
    transformer_auto_wrap_policy; by_size: one with size_based_auto_wrap_policy, which also takes
    `parameters`, how many make a module a unit. Drawn with as many as a block has, and with as many
    as its parts have."""
    with torch.device("meta"):
        block = sum(p.numel() for p in models.blocks(model_of(preset))[0].parameters())
    # From the first on a block is a unit, from the second on its two largest linear layers are.
    sizes = [int(float(f"{share * block:.2g}")) for share in (0.76, 0.303)]
    chosen = {"transformer_auto_\nwrap_policy": functools.partial(_without_warning, by_class)}
    chosen |= {f"size_based,\nfrom {smallest:,}":
               functools.partial(_without_warning, by_size, parameters=smallest)
               for smallest in sizes}
    size = few_tokens(preset)
    return draw_wrappings(compare(chosen, size, rounds=rounds_of(size), quiet=True))


def _without_warning(strategy, model, optimizer_class, **settings):
    """The given strategy, without FSDP1's warning that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return strategy(model, optimizer_class, **settings)

"""FSDP1, FullyShardedDataParallel: its names, what each became in FSDP2, and each run once."""

import contextlib
import functools
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from labs.exercises.verdicts import shows
from labs.fsdp import measuring, trained
from labs.fsdp.wrapping import chart
from labs.meters.traffic import Traffic
from labs.pictures.tables import Table
from labs.training import models
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch

RANKS = 2
WITHOUT_GPU = ("Without a GPU there is nothing to pin memory for and no stream to wait for: "
               "CPUOffload does its step here without these two, and saves nothing.")


def wrapped(model, optimizer_class, lr=1e-3, **options):
    """(module, optimizer): FullyShardedDataParallel with these options."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that FSDP2 is to be preferred
        module = FullyShardedDataParallel(model, use_orig_params=True,
                                          device_id=devices.device(), **options)
    return module, optimizer_class(module.parameters(), lr=lr)


def by_block(model):
    """auto_wrap_policy: every module of the blocks' class is a unit."""
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    kinds = {type(block) for block in models.blocks(model)}
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)


def by_size(model, parameters: int):
    """auto_wrap_policy: every module that has at least so many parameters not yet in a unit; never
    the one with the embeddings, whose weight the head shares: a unit holds both or neither."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return functools.partial(size_based_auto_wrap_policy, min_num_params=parameters,
                             exclude_wrap_modules={nn.ModuleList, nn.ModuleDict,
                                                   type(model.transformer)})


def _options() -> dict:
    """(name in FSDP1, name in FSDP2) -> options of FullyShardedDataParallel."""
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
        ("BackwardPrefetch.BACKWARD_PRE", "what it does anyway"):
            {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
        ("BackwardPrefetch.BACKWARD_POST", "set_modules_to_backward_prefetch"):
            {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        ("CPUOffload(offload_params=True)", "CPUOffloadPolicy()"):
            {"cpu_offload": CPUOffload(offload_params=True)},
    }


@shows("4.1")
def fsdp1_names() -> Table:
    """Every name with its successor, and what one step of it sent."""
    found = launch(_every_name, ranks=RANKS, quiet=True, verify=False, device="cpu",
                   hang_after=60)[0]
    return Table(f"FSDP1 on {RANKS} ranks, one step of each",
                 ("FSDP1", "FSDP2", "gathers", "reduces", "kB gathered", "loss"), found, left=1,
                 note="" if torch.accelerator.is_available() else WITHOUT_GPU)


def _every_name() -> list:
    torch.set_num_threads(1)
    rows, every = [], _options()
    for number, ((old, new), options) in enumerate(every.items(), 1):
        report(step=number, total=len(every) + 1)
        with _nothing_to_pin():
            rows.append((old, new, *_one_step(options)))
    return [*rows, ("FullStateDictConfig", "StateDictOptions(full_state_dict=True)",
                    *_full_state_dict())]


@contextlib.contextmanager
def _nothing_to_pin():
    """FSDP1's offload pins its shards and waits for a stream, whether there is a GPU or not."""
    with contextlib.ExitStack() as stack:
        if not torch.accelerator.is_available():
            stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self))
            stack.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", create=True))
        yield


def _one_step(options) -> tuple:
    model = trained.model()
    module, optimizer = wrapped(model, torch.optim.AdamW, auto_wrap_policy=by_block(model),
                                **options)
    with Traffic() as traffic:
        loss = module(**trained.share(trained.batches(1)[0])).loss
        loss.backward()
    optimizer.step()
    gathers = [c for c in traffic.of("all_gather") if c.elements]
    reduces = [c for c in traffic.of("reduce_scatter", "all_reduce") if c.elements > 1]
    return (str(len(gathers)), str(len(reduces)), f"{sum(c.bytes for c in gathers) / 1e3:,.0f}",
            f"{loss.item():.2f}")


def _full_state_dict() -> tuple:
    """Gathers the whole model on rank 0, as FSDP1 does."""
    from torch.distributed.fsdp import (
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    model = trained.model()
    module, _ = wrapped(model, torch.optim.AdamW, auto_wrap_policy=by_block(model))
    # to the CPU from the CPU crashes FSDP1 (torch 2.13, signal 11 in state_dict)
    how = FullStateDictConfig(offload_to_cpu=torch.accelerator.is_available(), rank0_only=True)
    with warnings.catch_warnings(), Traffic() as traffic:
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, how):
            module.state_dict()
    gathers = [c for c in traffic.of("all_gather") if c.elements]
    dist.barrier()
    return str(len(gathers)), "0", f"{sum(c.bytes for c in gathers) / 1e3:,.0f}", "–"


@shows("4.1")
def sweep_fsdp1(preset, sizes=(150_000, 60_000)):
    """FSDP1's two wrapping policies, side by side."""
    def block_strategy(model, optimizer_class, **settings):
        return wrapped(model, optimizer_class, auto_wrap_policy=by_block(model), **settings)

    def size_strategy(smallest, model, optimizer_class, **settings):
        return wrapped(model, optimizer_class, auto_wrap_policy=by_size(model, smallest),
                       **settings)

    variants = {"transformer_auto_\nwrap_policy": block_strategy}
    variants |= {f"size_based,\nfrom {smallest:,}": functools.partial(size_strategy, smallest)
                 for smallest in sizes}
    return chart(measuring.measure(variants, preset, rounds=2, tries=1))

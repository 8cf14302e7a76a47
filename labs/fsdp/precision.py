"""Underflow: gradients too small for fp16, with and without loss scaling, and bf16's range."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from labs.exercises.verdicts import shows
from labs.fsdp.scaffold import shard_mixed
from labs.pictures.tables import Table
from labs.training import data, models
from labs.workers import devices
from labs.workers.launcher import launch

CONTEXT = 64
MICRO_BATCH = 256  # tokens of each rank
BATCH = 262_144  # tokens of the whole batch, as is usual for language models
LOSS_SCALE = 2.0**16
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@shows("Underflow")
def count_underflow() -> Table:
    """Returns a table of the gradients that are zero in fp16 and in bf16 but not in fp32, with the
    loss as it is and multiplied by LOSS_SCALE: one micro-batch of a large batch, FSDP on 2 ranks.
    A scaled loss brings back what was too small for the type, but not what its digits cancel."""
    by_rank = launch(_count_zeros, ranks=2, quiet=True, verify=False, hang_after=60)
    total = sum(nonzero for nonzero, _ in by_rank)
    rows = []
    for name, dtype in TYPES.items():
        zeros, scaled = (sum(counts) for counts in zip(*(found[name] for _, found in by_rank),
                                                       strict=True))
        rows.append((name, f"{_smallest(dtype):.0e}", f"{zeros:,}", f"{zeros / total:.2%}",
                     f"{scaled:,}"))
    return Table(f"gradients that are zero and should not be: {MICRO_BATCH} of a batch's "
                 f"{BATCH:,} tokens", ("computed in", "smallest number", "zeros", "share",
                                       f"zeros, loss × {LOSS_SCALE:,.0f}"), rows,
                 note=f"of {total:,} numbers that are not zero in fp32")


def _smallest(dtype) -> float:
    """Returns the smallest subnormal number, which finfo.tiny is not."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def _count_zeros() -> tuple[int, dict[str, list[int]]]:
    """On a rank: returns (numbers of its gradients that are not zero in fp32, type -> [how many of
    these are zero, how many with the loss scaled])."""
    torch.set_num_threads(1)
    exact = _gradients(None, 1.0)
    return _count(g != 0 for g in exact), {
        name: [_count((g == 0) & (e != 0) for g, e in
                      zip(_gradients(dtype, scale), exact, strict=True))
               for scale in (1.0, LOSS_SCALE)] for name, dtype in TYPES.items()}


def _count(masks: Iterable[torch.Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def _gradients(dtype, scale) -> list[torch.Tensor]:
    """This rank's shards of the gradients of a micro-batch, weighted by its share of the batch."""
    module, _ = shard_mixed(models.gpt2(4, 64, 4, CONTEXT).to(devices.device()), torch.optim.SGD,
                            param_dtype=dtype, reduce_dtype=torch.float32, lr=0.1)
    [batch] = data.lm_batches(1, MICRO_BATCH // CONTEXT, CONTEXT, seed=dist.get_rank())
    batch = {name: value.to(devices.device()) for name, value in batch.items()}
    (module(**batch).loss * (MICRO_BATCH / BATCH) * scale).backward()
    return [p.grad.to_local() for p in module.parameters()]

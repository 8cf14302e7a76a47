"""Real text that is on every machine: the sources of the running Python's standard library."""

import functools
import sysconfig
from pathlib import Path
from typing import Any

import torch

from labs.workers import devices, variant

Batch = dict[str, torch.Tensor]


@functools.cache
def text(nbytes: int = 1_000_000) -> torch.Tensor:
    """The first `nbytes` bytes of the standard library's sources, as a uint8 tensor."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= nbytes:
            break
    return torch.frombuffer(data[:nbytes], dtype=torch.uint8)


def windows(size: int, context: int, seed: int = 0) -> torch.Tensor:
    """`size` random windows of the text, int64, shape (size, context + 1); other ones in each
    variant of the workbook."""
    source = text()
    generator = torch.Generator().manual_seed(variant.seed_of(seed))
    # (size, 1); with arange they broadcast to (size, context + 1) positions of the text
    starts = torch.randint(len(source) - context - 1, (size, 1), generator=generator)
    return source[starts + torch.arange(context + 1)].long()


def lm_batches(steps: int, size: int, context: int, seed: int = 0) -> list[Batch]:
    """Batches for a Hugging Face language model: "input_ids" and "labels", (size, context).
    Both are the same tensor: the model itself shifts the labels by one."""
    return [{"input_ids": window[:, :-1], "labels": window[:, :-1]}
            for window in (windows(size, context, seed + step) for step in range(steps))]


def xy_batches(steps: int, size: int, context: int = 8, seed: int = 0) -> list[Batch]:
    """Batches for `EdgeCaseModel` and `DeepMLP`: "x" and "y", (size, context), on the device; y is
    the byte that follows x."""
    drawn = (windows(size, context, seed + step).to(devices.device()) for step in range(steps))
    return [{"x": window[:, :-1], "y": window[:, 1:]} for window in drawn]


def shard(batch: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Rank `rank`'s equal share of a batch; a value that is no tensor goes to all ranks."""
    return {name: value.chunk(ranks)[rank] if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()}

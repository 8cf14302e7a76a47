"""What a student of notebook 08 calls."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from labs.training import models

MANIFEST = "manifest.json"


def step_folder(folder: str | Path, step: int) -> Path:
    """The folder of a step's checkpoint: folder/step_12."""
    return Path(folder, f"step_{step}")


def shard_file(path: Path, rank: int) -> Path:
    """The file of a rank's part in a step's folder: rank_0.pt."""
    return path / f"rank_{rank}.pt"


def to_bytes(state: Any) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def digest(data: bytes) -> str:
    """The SHA-256 of the bytes, 64 hexadecimal digits: another one with every other content."""
    return hashlib.sha256(data).hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor's elements, in order, whatever its dtype and shape; of a DTensor, those
    of this rank's shard."""
    shard = models.local_shard(tensor.detach()).contiguous().reshape(-1)
    return shard.view(torch.uint8).cpu().numpy().tobytes()


@dataclass(frozen=True)
class StepSeconds:
    """What one rank measured of one step, on its own clock, in seconds. data: until it had its
    batch. compute: forward, backward and optimizer. collectives: from its call of the collectives
    until their end, which is waiting for the other ranks and the transfer together."""

    data: float
    compute: float
    collectives: float


def smooth(values: Sequence[float]) -> list[float]:
    """The median of each value and its two neighbours on either side, or as many as there are: a
    single outlier is gone, and a step stays where it is."""
    return [median(values[max(0, at - 2):at + 3]) for at in range(len(values))]

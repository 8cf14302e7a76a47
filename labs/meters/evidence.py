"""The record of a data-parallel step on each rank: its collectives, and the bytes that are resident
when backward is done, beside those of a full copy."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.meters.traffic import CollectiveCall, Traffic
from labs.training.strategies import resident_tensors
from labs.training.strategies.third_party import EngineOptimizer

PARTS = ("parameters", "gradients", "optimizer_state")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")  # collectives that sum over the ranks


@dataclass(frozen=True)
class RankStepRecord:
    """What one rank did in a step, and its memory when backward was done.

    calls: its collectives. held: bytes by part, this rank's shards or all of it. whole: bytes of
    one full copy of each part. module: the class of what the library returned. library: what it
    calls itself.
    """

    calls: list[CollectiveCall]
    held: dict[str, int]
    whole: dict[str, int]
    module: str = ""
    library: str = ""

    @property
    def resident(self) -> dict[str, float]:
        """Part -> what is resident on this rank, in full copies: about 1/N where it is sharded."""
        return {part: self.held[part] / self.whole[part] for part in PARTS}

    @property
    def reduced(self) -> float:
        """Logical bytes of this rank's collectives that sum over the ranks, in full copies of the
        gradients."""
        return sum(call.bytes for call in self.calls if call.kind in REDUCING) / self.whole[
            "gradients"]

    def __repr__(self):
        sizes = [f"{part}: {self.held[part]:,} of {self.whole[part]:,} bytes resident"
                 for part in PARTS]
        kinds = {call.kind: 0 for call in self.calls}
        for call in self.calls:
            kinds[call.kind] += call.bytes
        sent = ", ".join(f"{kind} {size:,} bytes" for kind, size in kinds.items())
        return "\n".join([f"{self.module}, {self.library}", *sizes, sent or "no collective"])


def whole_bytes(model: nn.Module) -> dict[str, int]:
    """Part -> bytes of one full copy, for AdamW: two moments of the dtype of each trainable
    parameter. Call it before the model is wrapped; a tied parameter counts once."""
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {"parameters": sum(p.nbytes for p in model.parameters()), "gradients": trainable,
            "optimizer_state": 2 * trainable}


def held_bytes(module: nn.Module, optimizer: Any) -> dict[str, int]:
    """Part -> bytes that this rank holds of it at this moment, under any strategy. Each storage
    counts once and completely, so padding counts. DeepSpeed's copy of the parameters in fp32, which
    the optimizer updates, is "master_weights"."""
    found = resident_tensors(module, optimizer)
    sizes = {part: storage_bytes(found[part]) for part in PARTS}
    # resident_tensors counts the model's buffers as parameters; a complete copy here has none.
    sizes["parameters"] -= storage_bytes(module.buffers())
    if isinstance(optimizer, EngineOptimizer):
        moments = [value for state in optimizer.state.values() for value in state.values()
                   if isinstance(value, torch.Tensor)]
        sizes["master_weights"] = sizes["optimizer_state"] - storage_bytes(moments)
        sizes["optimizer_state"] = storage_bytes(moments)
    return sizes


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory below these tensors, on this rank where they are DTensors. What several
    of them share counts once."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)  # of a DTensor
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in local}
    return sum(storage.nbytes() for storage in storages.values())


class StepEvidence:
    """`with evidence:` around a step records its collectives; `evidence.note(module, optimizer)`
    after backward records what is held. The last step counts: libraries set up in the first."""

    def __init__(self, model: nn.Module):
        self._whole, self._held, self._module = whole_bytes(model), {}, ""
        self._traffic = Traffic()

    def __enter__(self):
        self._traffic = Traffic()
        self._traffic.__enter__()
        return self

    def __exit__(self, *exception):
        self._traffic.__exit__(*exception)

    def note(self, module: nn.Module, optimizer: Any) -> None:
        """Records what this rank holds; call it between backward and the optimizer's step."""
        self._held, self._module = held_bytes(module, optimizer), type(module).__name__

    def of_this_rank(self, library: str = "") -> RankStepRecord:
        """What this rank did in the last step."""
        return RankStepRecord(self._traffic.calls, self._held, self._whole, self._module, library)

    def of_all_ranks(self, library: str = "") -> list[RankStepRecord]:
        """What each rank of the process group did; of one process, where there is no group. It does
        not matter how many ranks the library believes in."""
        own = self.of_this_rank(library)
        if not dist.is_initialized():
            return [own]
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return found

    def write(self, path: str | Path, library: str = "", **numbers: Any) -> None:
        """Rank 0 writes a JSON file with these numbers and, as "ranks", what each rank did."""
        ranks = self.of_all_ranks(library)
        if int(os.environ.get("RANK", 0)) == 0:
            Path(path).write_text(json.dumps({**numbers, "ranks": list(map(asdict, ranks))}))


def read_ranks(listed: list[dict[str, Any]]) -> list[RankStepRecord]:
    """The ranks of a JSON file that `StepEvidence.write` has written."""
    return [RankStepRecord(**{**rank, "calls": [CollectiveCall(**call) for call in rank["calls"]]})
            for rank in listed]

"""What all ranks of a job hold together, and what it is that differs between two such."""

import torch
import torch.distributed as dist

from labs.surviving_failure.fingerprints import fingerprint
from labs.surviving_failure.resumable_job import ResumableJob

# What is the same on every rank, and on every number of ranks.
COMMON = ("the optimizer's step", "learning rate", "schedule", "epoch", "position", "step")
MOMENTS = ("exp_avg", "exp_avg_sq")

Tensors = dict[str, torch.Tensor]


def full_tensors(job: ResumableJob) -> Tensors:
    """Name -> parameter, moment or buffer of the full model, without padding; of ZeRO-3, by flat
    parameter. What is missing is left out. All ranks must call it; under DDP, and for what each
    rank keeps in full, each returns its own."""
    units = getattr(job.module, "units", ())
    found = {}
    for unit in units:
        values = {"parameters": unit.shard, **job.optimizer.state.get(unit.shard, {})}
        found |= {f"{name} of {unit.name}": _gathered(unit, values[name])
                  for name in ("parameters", *MOMENTS) if name in values}
    for name, parameter in job.model.named_parameters():
        if parameter.requires_grad and not units:
            values = {"parameters": parameter, **job.optimizer.state.get(parameter, {})}
            found |= {f"{part} of {name}": _full(values[part])
                      for part in ("parameters", *MOMENTS) if part in values}
    found |= {f"frozen parameters, {name}": _full(parameter)
              for name, parameter in job.model.named_parameters() if not parameter.requires_grad}
    for name, buffer in job.model.named_buffers():
        found[f"buffers, {name}"] = _full(buffer)
    return found


def common(job: ResumableJob) -> dict[str, str]:
    """The parts of the fingerprint that are the same on every rank."""
    parts = fingerprint(job)
    return {part: parts[part] for part in COMMON}


def unlike_shards(job: ResumableJob) -> tuple[str, str, str] | None:
    """(code, sentence, hint) on the first shard or moment of ZeRO-3 that is not as long as one of
    this rank, or keeps more memory than it has numbers; None if none does."""
    for unit in getattr(job.module, "units", ()):
        moments = {name: value for name, value in job.optimizer.state.get(unit.shard, {}).items()
                   if name in MOMENTS}
        for name, value in {"parameters": unit.shard, **moments}.items():
            if tuple(value.shape) != (unit.shard_elements,):
                return ("wrong_size",
                        f"{name} of {unit.name}: a shard of shape {list(value.shape)}, one of "
                        f"{dist.get_world_size()} ranks has {unit.shard_elements:,} elements",
                        "An old shard is not a new one: concatenate the old ones without padding, "
                        "then shard again.")
            # A slice of the joined tensor is a view: it keeps the memory of all ranks' shards
            # allocated.
            if value.untyped_storage().nbytes() > value.nbytes:
                return ("memory_kept", f"{name} of {unit.name}: a view, which keeps "
                        f"{value.untyped_storage().nbytes():,} bytes where it has {value.nbytes:,}",
                        "Keep a copy: clone().")
    return None


def difference(found: torch.Tensor, want: torch.Tensor, new: torch.Tensor | None) -> str:
    """In words what stands where `want` should; "" if it is equal to the last bit. new: what stood
    there before it was loaded, if anything did."""
    if found.shape != want.shape:
        return f"shape {list(found.shape)} instead of {list(want.shape)}"
    if torch.equal(found, want):
        return ""
    if new is not None and torch.equal(found, new):
        return "what a new job begins with"
    if not found.any():
        return "all zero"
    wrong = (found != want).view(-1).nonzero().view(-1)
    return (f"{len(wrong):,} of {want.numel():,} elements are not what was saved, the first of "
            f"them is element {int(wrong[0]):,}")


def _gathered(unit, shard) -> torch.Tensor:
    pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]  # (shard_elements,)
    dist.all_gather(pieces, shard.detach().contiguous())
    return torch.cat(pieces)[:unit.elements].cpu()  # padding is at the end


def _full(tensor) -> torch.Tensor:
    # full_tensor of a DTensor is a collective: all ranks go through the names in the same order.
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()

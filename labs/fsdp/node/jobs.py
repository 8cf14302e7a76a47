"""The jobs of the billion-parameter lab, at sizes that follow from the prediction for a card: a DDP
baseline that the card cannot hold, the same model sharded, one that DDP could never hold, then
checkpointed, then offloaded; and one job on 1, 2, ... GPUs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from labs.fsdp.memory_limits import parameters_of, predicted_peak_of, search
from labs.predictions.hardware import GPU
from labs.training import models, strategies
from labs.training.memory_categories import Memory
from labs.training.presets import Preset, preset
from labs.words import counted

USABLE = 0.9  # of a card: the rest is CUDA's context, NCCL's buffers and what lies between tensors
# So that a step takes seconds, and no choice goes on without end where a card is far too large.
MOST_SEQUENCES = {"small": 128, "larger": 8}
MOST_LAYERS = 128


@dataclass(frozen=True)
class Job:
    """One row: a strategy that trains a preset's GPT-2. formula, recipe, checkpointing: what
    labs.predictions.memory.predict calls it. offload: its shards live in the host's memory."""

    name: str
    strategy: Callable
    size: Preset
    formula: str = "fsdp2"
    recipe: str = "fp32"
    checkpointing: str = "none"
    offload: bool = False

    @property
    def bf16(self) -> bool:
        """Whether its matrix products are in 16 bits."""
        return self.recipe != "fp32"

    @property
    def parameters(self) -> int:
        """Ψ of its model."""
        return parameters_of(self.size)


def jobs_for(card: GPU, ranks: int, chosen: dict[str, Callable]) -> list[Job]:
    """Returns the rows before those of scaling. chosen: strategies by name, as the arguments of
    `billion_parameters`."""
    small = first_that_ddp_cannot_hold(card, replace(preset("billion"), ranks=ranks))
    large = never_held_by_ddp(card, replace(preset("larger"), ranks=ranks))
    return [Job("DDP", strategies.ddp, small, "ddp"), Job("FSDP", chosen["shard"], small),
            Job("FSDP1", chosen["fsdp1"], small, "fsdp1"),
            Job("FSDP, bf16", chosen["mixed"], small, recipe="bf16 policy"),
            Job("larger, FSDP", chosen["shard"], large),
            Job("… + checkpointing", chosen["checkpointed"], large, checkpointing="full"),
            Job("… + CPU offload", Checkpointing(chosen["offloaded"]), large,
                checkpointing="full", offload=True)]


def scaling_jobs(ranks: int, checkpointed: Callable) -> list[Job]:
    """Returns one job on 1, 2, 4, ... GPUs of the node, with as many tokens on each."""
    counts = sorted({*(2**n for n in range(ranks.bit_length()) if 2**n <= ranks), ranks})
    return [Job(f"checkpointed, {counted(count, 'GPU')}", checkpointed,
                replace(preset("billion"), ranks=count), checkpointing="full")
            for count in counts]


@dataclass(frozen=True)
class Checkpointing:
    """A strategy: the given one, and each block is computed again in backward."""

    strategy: Callable

    def __call__(self, model: nn.Module, optimizer_class, **settings) -> tuple:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        blocks = models.blocks(model)
        for number, block in enumerate(blocks):
            blocks[number] = checkpoint_wrapper(block)
        return self.strategy(model, optimizer_class, **settings)


def first_that_ddp_cannot_hold(card: GPU, size: Preset) -> Preset:
    """Returns the preset with the smallest batch whose tensors alone are more than the card has
    under DDP. FSDP holds it, unless the card is too small for a billion parameters."""
    def holds(batch):
        job = Job("DDP", strategies.ddp, replace(size, batch=batch), "ddp")
        return batch < MOST_SEQUENCES["small"] and predicted_peak(job).total <= card.usable

    return replace(size, batch=1 + search(holds, size.batch)[0])


def never_held_by_ddp(card: GPU, size: Preset) -> Preset:
    """Returns the preset with so many layers that parameters, gradients and optimizer state in fp32
    are more than the card has, whatever the batch; and with the largest batch that FSDP holds, of 8
    at most."""
    one, two = (parameters_of(replace(size, layers=n)) for n in (1, 2))
    layers = min(MOST_LAYERS, 1 + math.ceil((1.02 * card.usable / 16 - one) / (two - one)))

    def holds(batch):
        peak = predicted_peak(Job("FSDP", strategies.fsdp2,
                                  replace(size, layers=layers, batch=batch)))
        return batch <= MOST_SEQUENCES["larger"] and peak.total <= USABLE * card.usable

    return replace(size, layers=layers, batch=max(1, search(holds, size.batch)[0]))


def predicted_peak(job: Job, device: str = "cuda") -> Memory:
    """Returns the memory of one rank at the peak of a step, under NCCL."""
    size = job.size
    if job.offload:  # no shard is on the device, as if they were divided among very many ranks
        size = replace(size, ranks=min(256, size.hidden))
    return predicted_peak_of(size, strategy=job.formula, recipe=job.recipe,
                             checkpointing=job.checkpointing, device=device, backend="nccl")

"""What the checks of notebook 04 train: a GPT-2 whose sizes do not divide, beside a twin; and what
one step of a strategy holds and sends."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from labs.exercises import on_ranks
from labs.exercises.on_ranks import TOLERANCE, gradients, worst
from labs.exercises.verdicts import Wrong
from labs.meters import memory
from labs.meters.traffic import Traffic
from labs.predictions.memory_shards import owned, padded
from labs.training import data, models, strategies
from labs.workers import devices

LAYERS, HIDDEN, HEADS, CONTEXT = 3, 33, 3, 22  # no width that 2 or 4 ranks divide
# AdamW hides a gradient's scale, and blows up what is zero but for rounding; a large eps does not.
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
STEPS = 3
BYTES = 4  # of one fp32 number


def mesh():
    """On a rank: all ranks as one row, on the kind of device that this rank has."""
    return init_device_mesh(devices.device().type, (dist.get_world_size(),))


def model():
    """The model that every check trains: the same on every rank."""
    return models.gpt2(LAYERS, HIDDEN, HEADS, CONTEXT)


def batches(steps: int = STEPS) -> list:
    """Batches of all ranks together: two sequences for each."""
    return data.lm_batches(steps, 2 * dist.get_world_size(), CONTEXT)


def share(batch: dict) -> dict:
    """This rank's part of a batch."""
    return data.shard(batch, dist.get_rank(), dist.get_world_size())


def built(strategy, made, optimizer_class=torch.optim.AdamW, **settings) -> tuple:
    """(module, optimizer) of a strategy for the model `made`. Raises Wrong where they are none."""
    return on_ranks.built(strategy, made, optimizer_class, settings or SETTINGS)


def whole(tensor) -> torch.Tensor:
    """All of a tensor on every rank, also where each rank has a shard."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def names(module) -> dict:
    """Name without what wrappers put into it -> parameter."""
    added = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
    found = {}
    for name, parameter in module.named_parameters():
        for part in added:
            name = name.replace(part, "")
        found[name] = parameter
    return found


class Twin:
    """The same model on one process, with the batches of all ranks."""

    def __init__(self, made, **settings):
        self.model = copy.deepcopy(made)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **(settings or SETTINGS))

    def step(self, batch) -> float:
        """Trains one step; the loss before it."""
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def gradients(self, batch) -> dict:
        """name -> gradient on this batch, of a copy."""
        alone = copy.deepcopy(self.model)
        alone(**batch).loss.backward()
        return gradients(alone)


def follow(strategy, make=model) -> float:
    """On a rank: trains beside the twin by the plain loop; the largest difference of a parameter.
    Raises Wrong with what became of it."""
    made = make()
    twin = Twin(made)
    module, optimizer = built(strategy, made)
    difference = 0.0
    for step, batch in enumerate(batches()):
        before = {name: p.detach().clone() for name, p in twin.model.named_parameters()}
        loss = module(**share(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        _judge_loss(mean.item() / dist.get_world_size(), twin.step(batch), step)
        difference = max(difference, _judge_parameters(module, twin.model, before, step))
    return difference


def _judge_loss(got, want, step):
    if abs(got - want) > 10 * TOLERANCE * want:
        raise Wrong(f"step {step}: the mean loss over the ranks is {got:.4f}, the twin's "
                    f"{want:.4f}", "Forward must run with whole, updated parameters.")


def _judge_parameters(module, twin, before, step) -> float:
    difference, found = 0.0, names(module)
    for name, want in twin.named_parameters():
        got = whole(found[name])
        if got.shape != want.shape:
            raise Wrong(f"parameter {name!r} has shape {tuple(got.shape)} in the module, and "
                        f"{tuple(want.shape)} in the model",
                        "FSDP1 lays parameters flat; use fully_shard, which does not.")
        apart = worst(got, want.detach())
        if apart > 20 * TOLERANCE:
            _explain(name, found[name], got, before[name], apart, step)
        difference = max(difference, apart)
    return difference


def _explain(name, parameter, got, before, apart, step):
    who = f"rank {dist.get_rank()}, parameter {name!r} after step {step}"
    if torch.equal(got, before):
        raise Wrong(f"{who}: it was not changed by the step",
                    "fully_shard replaces the parameters: make the optimizer afterwards, from "
                    "model.parameters().")
    if not isinstance(parameter, DTensor):
        raise Wrong(f"{who}: it belongs to no unit, so it is whole on every rank and was updated "
                    "with this rank's own gradient",
                    "What is in no block is the root's: fully_shard(model) comes last.")
    raise Wrong(f"{who}: it differs from the twin's by {apart:.2g}",
                "Do all settings (**settings) reach the optimizer?")


@dataclass(frozen=True)
class Units:
    """The units of the model when each block is one: elements of what a collective carries (the
    shards of all ranks with their padding), and bytes of this rank's own shard."""

    block: int
    root: int
    shard: int
    tensors: int


def units(made, ranks: int, rank: int) -> Units:
    """What FSDP2 makes of a model with each block a unit."""
    blocks = models.blocks(made)
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in made.parameters() if id(p) not in inside]
    sizes = [sum(ranks * padded(tuple(p.shape), ranks) for p in group)
             for group in (blocks[0].parameters(), rest)]
    everything = list(made.parameters())
    return Units(*sizes, BYTES * sum(padded(tuple(p.shape), ranks) for p in everything),
                 len(everything))


def optimizer_bytes(made, ranks: int, rank: int) -> int:
    """Bytes of AdamW's two moments of this rank's shard, and of its step counters."""
    return sum(2 * BYTES * owned(tuple(p.shape), rank, ranks) + BYTES for p in made.parameters())


@dataclass(frozen=True)
class Seen:
    """One rank's memory over two steps, its calls in one more, and the module."""

    report: memory.Report
    calls: list
    module: object


def look(strategy, make=model, tries: int = 2) -> Seen:
    """On a rank: what a strategy holds (the least of several runs: a thread of gloo may free a
    tensor unseen) and what it sends."""
    reports, made = [], {}
    mine = [share(batch) for batch in batches()]

    def build():
        made["pair"] = built(strategy, make())
        return made["pair"]

    for _ in range(tries):
        made.clear()
        reports.append(memory.record(build, mine[:2], held=strategies.resident_tensors))
    module, optimizer = made["pair"]
    with Traffic() as traffic:
        module(**mine[2]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Seen(memory.leanest(reports), [c for c in traffic.calls if c.elements], module)

"""The job that is saved and resumed: DDP, FSDP2 or the student's ZeRO-3 trains a small language
model with everything that a checkpoint can forget."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from labs.training import data
from labs.training.loop import ModuleAndOptimizer
from labs.training.models import ModelOutput, local_shard, move_to_rank
from labs.training.strategies.torch_strategies import fsdp2
from labs.workers import devices

VOCABULARY = 101  # a prime number: no world size divides it
WIDTH = 33  # with it, 4 ranks need padding in every flat parameter
BATCH = 12  # rows of all ranks together: 2, 3, 4 and 6 ranks divide it
CONTEXT = 8
EPOCH = 5  # batches
SETTINGS = {"lr": 0.03, "weight_decay": 0.1, "eps": 1e-4}
ZERO3 = "ZeRO-3"
KINDS = ("DDP", "FSDP2", ZERO3)


class Block(nn.Module):
    """A layer with a residual connection and dropout."""

    def __init__(self, dropout: float):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(self.dropout(hidden)))


class TextModel(nn.Module):
    """A small language model with a tied embedding and head, a frozen parameter (scale), a buffer
    (center), and, if it is noisy, dropout, and a center that is the running mean of what comes in.
    forward(x, y): tokens of shape (batch, context) and those that follow."""

    def __init__(self, seed: int, noisy: bool = True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(0.2 if noisy else 0.0) for _ in range(2))
        self.scale = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.register_buffer("center", torch.empty(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight
        self.noisy = noisy
        with torch.no_grad():
            for value in (*self.parameters(), *self.buffers()):
                value.normal_(0, 0.3, generator=generator)  # a tied weight comes once
        move_to_rank(self)

    def forward(self, x, y):
        hidden = self.embedding(x)  # (batch, context, width)
        if self.noisy and self.training:
            # Each rank averages its own rows. FSDP2 does not communicate buffers, so a checkpoint
            # that has those of rank 0 alone restores the wrong ones on the other ranks.
            with torch.no_grad():
                self.center.lerp_(hidden.mean((0, 1)), 0.1)
        hidden = (hidden - self.center) * (1 + self.scale)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)  # (batch, context, vocabulary)
        return ModelOutput(logits, F.cross_entropy(logits.flatten(0, 1), y.flatten()))


class ShuffledText:
    """Batches of one text, of which each rank gets its rows. Every epoch has another order.

    epoch: from 0. position: batches of this epoch that were taken. After the last one the next
    epoch begins, at position 0. If it is noisy, some tokens of each row are replaced by others, by
    Python's `random`.
    """

    def __init__(self, noisy: bool = True):
        self.epoch, self.position, self.noisy = 0, 0, noisy

    def next_batch(self) -> dict[str, torch.Tensor]:
        """This rank's rows of the next batch: x and y, of shape (rows, CONTEXT)."""
        # A generator of its own: the order depends on the epoch alone, not on the random state of a
        # rank.
        shuffle = torch.Generator().manual_seed(1000 + self.epoch)
        order = torch.randperm(EPOCH * BATCH, generator=shuffle).view(EPOCH, BATCH)  # epoch, batch
        rows = order[self.position].chunk(dist.get_world_size())[dist.get_rank()]  # (rows,)
        windows = data.windows(EPOCH * BATCH, CONTEXT)[rows] % VOCABULARY  # (rows, CONTEXT + 1)
        if self.noisy:
            for row in windows:
                row[random.randrange(CONTEXT)] = random.randrange(VOCABULARY)
        self.position += 1
        if self.position == EPOCH:
            self.epoch, self.position = self.epoch + 1, 0
        windows = windows.to(devices.device())
        return {"x": windows[:, :-1], "y": windows[:, 1:]}


@dataclass
class ResumableJob:
    """What a rank trains. kind: "DDP", "FSDP2" or "ZeRO-3". step: the steps that are done."""

    kind: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data: ShuffledText
    model: nn.Module
    step: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """name -> tensor of the model as this rank has it, not a copy: parameters and buffers; a
        tied one once. Under FSDP2 and ZeRO-3 a rank has a shard of each parameter that is trained.
        """
        units = getattr(self.module, "units", ())
        own = {f"shard of {unit.name}": unit.shard for unit in units}
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        found = {name: value for name, value in named if not (units and value.requires_grad)}
        return {name: local_shard(value.detach()) for name, value in {**own, **found}.items()}

    def train(self, steps: int = 1) -> list[float]:
        """Trains so many steps; returns this rank's loss of each."""
        return [self._train_step() for _ in range(steps)]

    def progress_state(self) -> dict[str, Any]:
        """What is the same on all ranks: scheduler, epoch, position in it and step."""
        return {"scheduler": self.scheduler.state_dict(), "epoch": self.data.epoch,
                "position": self.data.position, "step": self.step}

    def load_progress_state(self, progress: dict[str, Any]) -> None:
        """Restores what `progress_state` returned, and the optimizer's learning rate."""
        self.scheduler.load_state_dict(progress["scheduler"])
        # A scheduler's load_state_dict sets its counter and leaves the optimizer's groups as they
        # are.
        rates = self.scheduler.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.data.epoch, self.data.position = progress["epoch"], progress["position"]
        self.step = progress["step"]

    def _train_step(self) -> float:
        loss = self.module(**self.data.next_batch()).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return loss.item()


def new_job(kind: str, seed: int = 0, zero3: Callable | None = None,
            noisy: bool = True) -> ResumableJob:
    """A job at its beginning, on this rank. seed: of the model and, with the rank, of the random
    numbers of torch and Python. zero3: the strategy for "ZeRO-3". noisy: with what no other number
    of ranks could repeat, because it is random on each rank: dropout, and replaced tokens."""
    devices.compute_deterministically()
    model = TextModel(seed, noisy)
    strategy = {"DDP": ddp_in_last_order, "FSDP2": fsdp2, ZERO3: zero3}[kind]
    module, optimizer = strategy(model, torch.optim.AdamW, **SETTINGS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate)
    # After the strategy was built: the two passes of ddp_in_last_order draw masks for dropout.
    torch.manual_seed(100 * seed + dist.get_rank())
    random.seed(100 * seed + dist.get_rank())
    return ResumableJob(kind, module, optimizer, scheduler, ShuffledText(noisy), model)


def ddp_in_last_order(model: nn.Module, optimizer_class: type, **settings) -> ModuleAndOptimizer:
    """torch's DDP whose buckets have the order that they keep. After its first step DDP puts the
    parameters into another one; on 3 ranks gloo then adds up in another order, and a resumed job,
    whose first step comes later, would differ in the last bit."""
    module = DistributedDataParallel(model)
    # The passes move the running mean in the buffer: it is put back below. The optimizer is made
    # last, so that it has no state of them.
    buffers = [buffer.clone() for buffer in model.buffers()]
    nothing = torch.zeros(1, CONTEXT, dtype=torch.long, device=devices.device())
    for _ in range(2):  # the second forward changes the order
        module(nothing, nothing).loss.backward()
    model.zero_grad()
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    return module, optimizer_class(module.parameters(), **settings)


def _learning_rate(step: int) -> float:
    """Rises for four steps, then falls."""
    return min((step + 1) / 4, 4 / (step + 1))

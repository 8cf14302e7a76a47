"""What ranks record for the pictures of exercises 7.3 to 7.6."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labs.checks.invariants import record_step
from labs.checks.numbers import require_number
from labs.checks.on_ranks import module_and_optimizer, raise_on_all_ranks
from labs.meters import memory
from labs.meters.traffic import Traffic
from labs.predictions.communication import traffic
from labs.tensor_parallel.scaffold import map_input
from labs.tensor_parallel.shards import ShardReader
from labs.tensor_parallel.whole_batch import build, token_batches
from labs.training import models
from labs.training.loop import ModuleAndOptimizer
from labs.workers import devices

_ADAMW = {"optimizer_class": torch.optim.AdamW, "settings": {"lr": 1e-3}}

# layers: exercise 7.3

RECORDED_SIZES = {"layers": 2, "hidden": 128, "heads": 8, "kv_heads": 4}
RECORDED_BATCH, RECORDED_SEQUENCE = 2, 32


@dataclass(frozen=True)
class Holding:
    """One parameter: its full shape, and along which dimension the ranks' sizes divide it; None
    where each rank has all of it."""

    name: str
    shape: tuple[int, ...]
    dimension: int | None
    sizes: list[int]


def record_holdings(tensor_parallel: Callable) -> list[Holding]:
    """On a rank: the parameters of the model that the student's function divides."""
    model = _model()
    whole = copy.deepcopy(model)
    module, _ = _built(tensor_parallel, model)
    reader = ShardReader(module, whole)
    return [Holding(name, tuple(p.shape), *reader.cut(name))
            for name, p in whole.named_parameters()]


def f_at_each_layer(copy_to_region: type, column_shard: Callable, row_parallel: Callable,
                    model: nn.Module, optimizer_class: type,
                    **settings) -> ModuleAndOptimizer:
    """A strategy made of the student's parts, with f at the entry of each column-parallel layer."""
    group = dist.group.WORLD
    for layer in models.blocks(model):
        for part, exit_name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            for name, linear in list(part.named_children()):
                if name == exit_name:
                    setattr(part, name, row_parallel(linear, group))
                elif isinstance(linear, nn.Linear):
                    setattr(part, name, column_shard(linear, group))
                    map_input(getattr(part, name), lambda x: copy_to_region.apply(x, group))
    return model, optimizer_class(model.parameters(), **settings)


def record_all_reduces(strategy: Callable) -> float:
    """On a rank: elements of all all-reduces of a step, in b·s·h of each layer."""
    found = record_step(lambda model: _built(strategy, model), _model(),
                        token_batches(2, RECORDED_BATCH, RECORDED_SEQUENCE))
    sent = sum(call.elements for call in found.of("all_reduce"))
    hidden_states = RECORDED_BATCH * RECORDED_SEQUENCE * RECORDED_SIZES["hidden"]
    return sent / (RECORDED_SIZES["layers"] * hidden_states)


def record_resident_bytes(tensor_parallel: Callable) -> tuple[int, int]:
    """On a rank: bytes of parameters, gradients and AdamW's state after two steps, of (attention
    and MLP, all else). Memory that several tensors share, as views do, counts once for each."""
    module, optimizer = _built(tensor_parallel, _model())
    totals = [0, 0]
    for batch in token_batches(2, RECORDED_BATCH, RECORDED_SEQUENCE):
        optimizer.zero_grad()
        module(**batch).loss.backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        tensors = [parameter, parameter.grad, *optimizer.state[parameter].values()]
        # Index 0: attention and MLP, whose matrices are all called ..._proj.
        totals["_proj" not in name] += sum(_bytes(each) for each in tensors if each is not None)
    return tuple(totals)


def _model():
    return models.move_to_rank(models.llama(**RECORDED_SIZES))


def _built(strategy, model):
    return raise_on_all_ranks(lambda: build(strategy, model, **_ADAMW))


def _bytes(tensor: torch.Tensor) -> int:
    # Private: a DTensor has no storage of its own, its local tensor has.
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes()


# the loss: exercise 7.5

LOSS_TOKENS, LOSS_VOCABULARY, HIDDEN = 256, 8192, 16  # hidden states are small beside the logits
SENT = {"all_reduce": traffic.all_reduce, "all_gather": traffic.all_gather,
        "reduce_scatter": traffic.reduce_scatter}


@dataclass(frozen=True)
class LossCost:
    """Of one rank and one step, in bytes. sent: what the loss's collectives send. peak: the highest
    moment of forward and backward, without parameters and their gradients."""

    sent: float
    peak: float


def gathered_cross_entropy(logits, targets, group) -> torch.Tensor:
    """The needless way: every rank gathers the logits of all, and computes the loss of them."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.detach(), group=group)
    # dist.all_gather is not differentiable: the own part is put back with its history. Its gradient
    # is all that this rank needs.
    parts[dist.get_rank(group)] = logits
    return F.cross_entropy(torch.cat(parts, -1).flatten(0, -2), targets.flatten())


class _Head(nn.Module):
    """A column-parallel head and its loss; forward(hidden, targets) returns the loss."""

    def __init__(self, function):
        super().__init__()
        # Other rows of the head on each rank.
        torch.manual_seed(dist.get_rank())
        self.head = nn.Linear(HIDDEN, LOSS_VOCABULARY // dist.get_world_size(), bias=False,
                              device=devices.device())
        self.function = function

    def forward(self, hidden, targets):
        return SimpleNamespace(loss=self.function(self.head(hidden), targets, dist.group.WORLD))


def record_loss_cost(function: Callable) -> LossCost:
    """On a rank: what function(logits, targets, group) sends, and the peak of a step with it."""
    torch.manual_seed(0)
    batch = {"hidden": torch.randn(LOSS_TOKENS, HIDDEN, device=devices.device()),
             "targets": torch.randint(LOSS_VOCABULARY, (LOSS_TOKENS,), device=devices.device())}
    with Traffic() as sent:
        _Head(function)(**batch).loss.backward()

    def make():
        module = _Head(function)
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    held = memory.record(make, [batch] * 2).step_peak
    return LossCost(sum(SENT[call.kind](call.bytes, call.ranks) for call in sent.calls),
                    held.total - held.parameters - held.gradients)


# the norm of the gradients: exercise 7.6

_HUGE = 1e9  # a max_norm at which nothing is scaled


@dataclass(frozen=True)
class Norms:
    """Of one layout. whole: of the model before it was divided. yours: what the student's function
    returns. shards: the sum of squares of each rank's shards; replicated: of all that every rank
    has."""

    whole: float
    yours: float
    shards: list[float]
    replicated: float

    def by_name(self) -> dict[str, float]:
        """Row of the picture -> norm."""
        ranks, total = len(self.shards), sum(self.shards)
        return {"yours": self.yours,
                "rank 0 alone": (self.shards[0] + self.replicated)**0.5,
                "ranks' norms added": sum((own + self.replicated)**0.5 for own in self.shards),
                f"replicated {ranks} times": (total + ranks * self.replicated)**0.5,
                f"all {ranks} times": (ranks * (total + self.replicated))**0.5}


def record_norms(clip_grad_norm: Callable, strategies: dict[str, Callable]) -> dict[str, Norms]:
    """On a rank: name of each strategy -> the norms after one backward."""
    return {name: _norms(clip_grad_norm, strategy) for name, strategy in strategies.items()}


def _norms(clip_grad_norm, strategy) -> Norms:
    [batch] = token_batches(1, size=4, context=32)
    whole = models.move_to_rank(models.llama(layers=2))
    whole(**batch).loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
    module, _ = module_and_optimizer(strategy, models.move_to_rank(models.llama(layers=2)),
                                     torch.optim.SGD, {"lr": 0.1})
    module(**batch).loss.backward()
    reader = ShardReader(module, whole)
    own = reader.local(module)
    sharded, replicated = ([own[name] for name in names]
                           for names in (reader.sharded, reader.replicated))
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, _squares(sharded))
    shared = _squares(replicated)
    # Last, because it may scale the gradients in place.
    yours = clip_grad_norm(sharded, replicated, _HUGE, dist.group.WORLD)
    return Norms(norm, float(require_number(yours, "clip_grad_norm")), by_rank, shared)


def _squares(parameters) -> float:
    return sum(p.grad.square().sum().item() for p in parameters)

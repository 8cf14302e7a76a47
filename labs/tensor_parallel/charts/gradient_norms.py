"""The norm of the gradients of a divided Llama, counted rightly and in the ways that go wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.exercises.numbers import require_number
from labs.exercises.on_ranks import module_and_optimizer
from labs.exercises.verdicts import LAUNCH_SECONDS, shows
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.tensor_parallel.checks.reference import token_batches
from labs.tensor_parallel.checks.shards import ShardReader
from labs.training import models
from labs.workers.launcher import launch

LAYERS, BATCH, TOKENS = 2, 4, 32
HUGE = 1e9  # a max_norm at which nothing is scaled
LAYOUTS = ("only the vocabulary divided", "all matrices divided")


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


@shows("7.6")
def show_norms(clip_grad_norm: Callable, vocabulary_parallel: Callable, strategy: Callable,
               ranks: int = 4) -> Picture:
    """Draws the norm that clip_grad_norm returns for the gradients of a Llama on ranks of this
    machine, beside that of the whole model and those of four wrong counts; where only the
    vocabulary is divided by vocabulary_parallel(model, group), and divided as strategy says."""
    def vocabulary_alone(model, optimizer_class, **settings):
        vocabulary_parallel(model, dist.group.WORLD)
        return model, optimizer_class(model.parameters(), **settings)

    strategies = dict(zip(LAYOUTS, (vocabulary_alone, strategy), strict=True))
    found = launch(_measure, clip_grad_norm, strategies, ranks=ranks, quiet=True,
                   timeout=LAUNCH_SECONDS)[0]
    rows = list(found[LAYOUTS[0]].by_name())
    panels = [Panel(layout, "norm", list(norms.by_name().values()),
                    predicted=[norms.whole] * len(rows), colour=palette.MEMORY["gradients"])
              for layout, norms in found.items()]
    return side_by_side(rows, panels, note="predicted: the norm of the whole model's gradients, in "
                        "one process")


def _measure(clip_grad_norm, strategies) -> dict[str, Norms]:
    """On a rank: layout -> the norms after one backward."""
    return {name: _norms(clip_grad_norm, strategy) for name, strategy in strategies.items()}


def _norms(clip_grad_norm, strategy) -> Norms:
    [batch] = token_batches(1, BATCH, TOKENS)
    whole = models.move_to_rank(models.llama(layers=LAYERS))
    whole(**batch).loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
    module, _ = module_and_optimizer(strategy, models.move_to_rank(models.llama(layers=LAYERS)),
                                     torch.optim.SGD, {"lr": 0.1})
    module(**batch).loss.backward()
    reader = ShardReader(module, whole)
    own = reader.local(module)
    sharded, replicated = ([own[name] for name in names]
                           for names in (reader.sharded, reader.replicated))
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, _squares(sharded))
    shared = _squares(replicated)
    yours = clip_grad_norm(sharded, replicated, HUGE, dist.group.WORLD)
    return Norms(norm, float(require_number(yours, "clip_grad_norm")), by_rank, shared)


def _squares(parameters) -> float:
    return sum(p.grad.square().sum().item() for p in parameters)

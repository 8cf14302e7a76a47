"""Exercise 7.6: clipping by a norm to which each rank has a part, and of which it shares a part:
first by itself, then while a Llama is trained of which everything but the norms is sharded."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.invariants import (
    Activations,
    ResidentBytes,
    judge_collectives,
    judge_resident_bytes,
    record_step,
)
from labs.checks.numbers import Cause, as_number, judge_number
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.reference import Reference
from labs.checks.tolerances import NORM
from labs.checks.verdicts import LAUNCH_SECONDS, Wrong, check, kind_of, shows
from labs.meters.traffic import Traffic, numbers_sent
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.tensor_parallel.groups import groups_to_try, named_rank
from labs.tensor_parallel.picture_records import record_norms
from labs.tensor_parallel.shards import ShardReader
from labs.tensor_parallel.tensor_parallel import BATCH, PER_LAYER, SEQUENCE, SIZES, sharded_names
from labs.tensor_parallel.vocabulary_loss import MOST_PER_TOKEN
from labs.tensor_parallel.vocabulary_parallel import HINTS, LAYER_MISTAKES, MORE, NAMES
from labs.tensor_parallel.whole_batch import (
    SGD,
    build,
    make_optimizer,
    token_batches,
    train_on_whole_batch,
    whole_steps,
)
from labs.training import models
from labs.words import listed
from labs.workers import devices
from labs.workers.launcher import launch

# That may be sent: the norm is one number; all ranks' squares, gathered, are one of each.
_MOST_NUMBERS = 16
_TIED = {2: False, 4: True}  # ranks -> whether embedding and head of the Llama are one weight
_SHARDED, _REPLICATED = ((3, 4), (7,), (2, 1, 5)), ((6,), (4, 2))


@dataclass(frozen=True)
class Case:
    """Which of the two lists are empty, and which parameters have no gradient. max_norm: absolute,
    or, where `relative`, a multiple of the norm."""

    called: str
    max_norm: float = 0.5
    relative: bool = False
    sharded: tuple = _SHARDED
    replicated: tuple = _REPLICATED
    unused: int | None = None  # no gradient for this one of both lists, on every rank
    idle: int | None = None  # the rank of the group whose shards all have no gradient


CASES = (Case("a norm above max_norm"), Case("a norm below max_norm", max_norm=1e6),
         Case("parameters without a gradient", max_norm=1.5, unused=1),
         # Each rank's own norm is smaller than max_norm, the whole one is larger.
         Case("no replicated parameter", 0.95, relative=True, replicated=()),
         Case("no sharded parameter", sharded=()),
         Case("one rank's shards without gradients", idle=1),
         Case("two empty lists", sharded=(), replicated=()))


@check("7.6")
def check_clip_grad_norm(clip_grad_norm: Callable, strategy: Callable):
    """clip_grad_norm(sharded, replicated, max_norm, group): the norm of the full gradient, and
    all gradients scaled in place so that it is at most max_norm. strategy(model, optimizer_class,
    **settings) -> (module, optimizer): exercises 7.3 to 7.5 together, to be trained with it."""
    on_ranks(_try_all, clip_grad_norm, strategy)
    return ("the norm is that of the full gradient on every rank, shards of all ranks and what is "
            "replicated once, and one number is sent; with attention, MLPs, embedding and head "
            "sharded, 5 clipped steps of Llama are the reference's on 2 and 4 ranks")


def _try_all(clip_grad_norm, strategy):
    _try_groups(clip_grad_norm)
    if dist.get_world_size() in _TIED:
        tied = _TIED[dist.get_world_size()]
        train_clipped(clip_grad_norm, strategy, tied)
        judge_traffic_and_memory(strategy, tied)


def _try_groups(clip_grad_norm):
    for called, group in groups_to_try():
        number = dist.get_process_group_ranks(group)[0]  # other groups get other gradients
        for case in CASES:
            gradients = _Gradients(case, group, number)
            with Traffic() as traffic:
                norm = clip_grad_norm(list(gradients.sharded), list(gradients.replicated),
                                      gradients.max_norm, group)
            where = f"{called}, {case.called}: {named_rank(group)}"
            raise_on_all_ranks(_judge, norm, gradients, traffic.calls, where)


class _Gradients:
    """This rank's parameters with gradients: shards, each rank's other ones, and replicated ones,
    the same on all ranks of the group."""

    def __init__(self, case: Case, group, number: int):
        self.case, self.ranks, self.own = case, dist.get_world_size(group), dist.get_rank(group)
        # One seed for the group: every rank draws the shards of all, keeps its own, and knows the
        # norm without communication.
        torch.manual_seed(50 + number)
        shards = [self._parameters(case.sharded, case.idle == rank) for rank in range(self.ranks)]
        self.replicated = self._parameters(case.replicated)
        self.sharded = shards[self.own]
        self.squares_of_ranks = [_squares(each) for each in shards]
        self.shared = _squares(self.replicated)
        self.norm = (sum(self.squares_of_ranks) + self.shared)**0.5
        self.max_norm = case.max_norm * (self.norm if case.relative else 1)
        self.tensors = [p.grad for p in self.parameters]
        self.before = [None if grad is None else grad.clone() for grad in self.tensors]
        self.values = [p.detach().clone() for p in self.parameters]

    def _parameters(self, shapes, without_gradients=False) -> list[nn.Parameter]:
        made = [nn.Parameter(torch.randn(shape, device=devices.device())) for shape in shapes]
        for place, parameter in enumerate(made):
            gradient = torch.randn(parameter.shape, device=devices.device())
            if place != self.case.unused and not without_gradients:
                parameter.grad = gradient
        return made

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of this rank, the sharded ones first."""
        return [*self.sharded, *self.replicated]


def _squares(parameters) -> float:
    return sum(p.grad.square().sum().item() for p in parameters if p.grad is not None)


def _judge(norm, gradients, calls, who):
    # A norm takes one number from each rank.
    sent = numbers_sent(calls)
    if sent > _MOST_NUMBERS:
        raise Wrong(f"{who} communicates {sent:,.0f} numbers to find one number",
                    "Squares add up: all-reduce the sum of the squares, not the gradients.",
                    code="too_much_sent")
    if as_number(norm) is None:
        raise Wrong(f"{who}: clip_grad_norm returned {kind_of(norm)}, not the norm",
                    "As torch.nn.utils.clip_grad_norm_, return the norm from before the clipping.",
                    code="wrong_type")
    judge_number(norm, gradients.norm, _causes(gradients), f"{who}, the norm",
                 rel_tol=NORM, abs_tol=1e-6, source="that of the full gradient is",
                 hint="Norms do not add up, their squares do: sum the squares of the shards over "
                      "the group, add those of the replicated parameters once, take the root.")
    _judge_scale(gradients, who)


def _causes(gradients):
    """What a wrong norm may be."""
    shards, shared, ranks = gradients.squares_of_ranks, gradients.shared, gradients.ranks
    local, whole = shards[gradients.own], gradients.norm
    return [
        Cause("squares_replicated_parameters", (sum(shards) + ranks * shared)**0.5,
              "the squares of the replicated parameters are "
              f"counted {ranks} times",
              "Every rank has all of them: add their squares after the sum over the ranks."),
        Cause("norm_rank_gradients_alone", (local + shared)**0.5,
              "the norm of this rank's gradients alone",
              "The others have shards, too: sum the squares over the group."),
        Cause("sum_all_ranks_norms", sum((each + shared)**0.5 for each in shards),
              "the sum of all ranks' norms",
              "Squares add up, norms do not: take the root after the sum."),
        Cause("all_squares_counted_times", (ranks * (sum(shards) + shared))**0.5,
              f"all squares are counted {ranks} times", "Sum the shards' squares over the ranks "
              "once, and the replicated parameters' never."),
        Cause("squares_shards_counted_times", (ranks * sum(shards) + shared)**0.5,
              f"the squares of the shards are counted {ranks} "
              "times", "Sum them over the ranks once."),
        Cause("replicated_parameters_missing", sum(shards)**0.5,
              "the replicated parameters are missing", "Add their squares, once."),
        Cause("sharded_parameters_missing", shared**0.5, "the sharded parameters are missing",
              "Sum their squares over the group."),
        Cause("mean_shards_squares_over_ranks", (sum(shards) / ranks + shared)**0.5,
              "a mean of the shards' squares over the ranks",
              "The shards together are the full gradient: their squares are summed."),
        Cause("square", whole * whole, "its square", "Take the root after the sum."),
        Cause("norm_after_clipping", min(whole, gradients.max_norm), "the norm after the clipping",
              "Return the one from before.")]


def _judge_scale(gradients, who):
    factor = min(1.0, gradients.max_norm / gradients.norm) if gradients.norm else 1.0
    count = len(gradients.sharded)
    for place, (parameter, tensor, before) in enumerate(
            zip(gradients.parameters, gradients.tensors, gradients.before, strict=True)):
        name = (f"sharded[{place}]" if place < count else f"replicated[{place - count}]")
        if not torch.equal(parameter.detach(), gradients.values[place]):
            raise Wrong(f"{who}: the numbers of {name} have changed; clipping changes gradients "
                        "alone", "Scale parameter.grad.", code="parameters_changed")
        if tensor is None:
            # A gradient of zeros is not none: momentum and weight decay would go on.
            if parameter.grad is not None:
                raise Wrong(f"{who}: {name} had no gradient, and has one now",
                            "Leave out parameters whose .grad is None.", code="gradient_made")
            continue
        # In place: a new tensor leaves the old one as it was for those that hold it.
        if parameter.grad is not tensor:
            raise Wrong(f"{who}: the gradient of {name} was replaced by another tensor, not "
                        "scaled in place", "gradient.mul_(factor) scales it in place.",
                        code="gradient_replaced")
        ratio = ((tensor * before).sum() / before.square().sum()).item()
        # One factor for all: another one on one rank, or for one list, turns the gradient.
        if not abs(ratio - factor) <= NORM:  # also where it is not a number
            raise Wrong(f"{who}: the gradient of {name} is {ratio:.4f}x what it was, instead of "
                        f"{factor:.4f}x", _scale_hint(ratio, factor), code="wrong_scale")
        # A change at right angles to the gradient, as noise is, does not show in the ratio.
        off = (tensor - factor * before).abs().max().item()
        if not off <= NORM * before.abs().max().item():
            raise Wrong(f"{who}: an element of the gradient of {name} differs by {off:.2g} from "
                        f"{factor:.4f}x what it was", "Clipping multiplies all elements by one "
                        "factor and does nothing else.", code="not_one_factor")


def _scale_hint(ratio, factor) -> str:
    if factor == 1.0:
        return "A norm below max_norm is left alone: scale by at most 1."
    if abs(ratio - 1) < NORM:
        return "Scale the gradients of both lists, on every rank."
    return "Scale every gradient by max_norm / norm, the same on all ranks."


MAX_NORM = 0.5  # every step's gradient is larger


def train_clipped(clip_grad_norm: Callable, strategy: Callable, tied: bool) -> None:
    """On a rank: trains strategy(model, optimizer_class, **settings) with clip_grad_norm before
    each step; raises Wrong unless it is the reference that torch's clip_grad_norm_ clips, with 1/t
    of all matrices on each rank and the collectives that these need."""
    model = whole_model(tied)
    norms = []
    reference = Reference(copy.deepcopy(model), _clipped(norms))
    module, optimizer = raise_on_all_ranks(build, strategy, model, *SGD)
    reader = ShardReader(module, reference.model)
    own = reader.local(module)
    sharded, replicated = ([own[name] for name in names]
                           for names in (reader.sharded, reader.replicated))

    # A pre-hook of the step: after the last backward pass, before any parameter changes.
    def clip(*_):
        norm = clip_grad_norm(sharded, replicated, MAX_NORM, dist.group.WORLD)
        raise_on_all_ranks(_judge_norm, norm, norms)

    optimizer.register_step_pre_hook(clip)
    train_on_whole_batch(module, optimizer, reference, whole_steps(5, BATCH, SEQUENCE),
                         layer_mistakes=LAYER_MISTAKES)


def judge_traffic_and_memory(strategy: Callable, tied: bool) -> None:
    """On a rank: raises Wrong unless embedding, attention, MLPs and head are all sharded, for four
    all-reduces of b·s·h in each layer, one after the embedding and one before the head."""
    batches, whole = token_batches(2, BATCH, SEQUENCE), whole_model(tied)

    def make(model):
        return build(strategy, model, torch.optim.AdamW, {"lr": 1e-3})

    traffic = record_step(make, whole_model(tied), batches)
    layers = SIZES["layers"]
    # Allowed is a number for each layer, so the two outside the layers are divided by their number.
    judge_collectives(traffic, {"all_reduce": PER_LAYER + 2 / layers},
                      Activations(layers, BATCH, SEQUENCE, SIZES["hidden"]),
                      small=MOST_PER_TOKEN * BATCH * SEQUENCE, hints=MORE)
    names = sharded_names(whole) + [name for name, _ in models.trainable(whole) if name in NAMES]
    judge_resident_bytes(lambda: make(whole_model(tied)), batches,
                         ResidentBytes.of(whole, names, dist.get_world_size()),
                         "with all matrices sharded", HINTS)


def whole_model(tied: bool) -> nn.Module:
    """The Llama that is trained, the same on every rank."""
    return models.move_to_rank(models.llama(**SIZES, tied=tied))


def _clipped(norms: list[float]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Returns what makes the reference's optimizer, which clips before each step; each norm is
    appended to `norms`. The reference's gradients stay as they are, for who looks at them later."""
    def make(model):
        optimizer = make_optimizer(*SGD)(model)

        def clip(*_):
            parameters = list(model.parameters())
            for parameter in parameters:
                # Clipping is in place, and these tensors are also the reference's list of
                # gradients.
                parameter.grad = parameter.grad.clone()
            norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return make


def _judge_norm(norm, norms):
    if norms[-1] <= MAX_NORM:
        raise AssertionError(f"the reference's norm {norms[-1]} is not clipped at {MAX_NORM}")
    try:
        judge_number(norm, norms[-1], (), f"rank {dist.get_rank()}, the norm",
                     rel_tol=NORM, source="the reference's is")
    except Wrong as wrong:
        raise Wrong(f"Llama, step {len(norms) - 1}: {wrong.sentence}",
                    "Are the gradients right before they are clipped? One that is "
                    "replicated is not summed, and the shard of a tied weight is counted once.",
                    code=wrong.code) from None


LAYOUTS = ("only the vocabulary sharded", "all matrices sharded")


@shows("7.6")
def show_norms(clip_grad_norm: Callable, vocabulary_parallel: Callable, strategy: Callable,
               ranks: int = 4) -> Picture:
    """Draws the norm that clip_grad_norm returns for the gradients of a Llama on ranks of this
    machine, beside that of the full model and those of four wrong counts; where only the
    vocabulary is sharded by vocabulary_parallel(model, group), and sharded as strategy says."""
    def vocabulary_alone(model, optimizer_class, **settings):
        vocabulary_parallel(model, dist.group.WORLD)
        return model, optimizer_class(model.parameters(), **settings)

    strategies = dict(zip(LAYOUTS, (vocabulary_alone, strategy), strict=True))
    found = launch(record_norms, clip_grad_norm, strategies, ranks=ranks, quiet=True,
                   timeout=LAUNCH_SECONDS)[0]
    rows = list(found[LAYOUTS[0]].by_name())
    panels = [Panel(layout, "norm", list(norms.by_name().values()),
                    predicted=[norms.whole] * len(rows), colour=palette.MEMORY["gradients"])
              for layout, norms in found.items()]
    right = [name for name in rows if all(math.isclose(norms.by_name()[name], norms.whole,
                                                       rel_tol=0.01) for norms in found.values())]
    return side_by_side(rows, panels, note="predicted: the norm of the full model's gradients, in "
                        "one process", lesson="Right within 1 % in both layouts: "
                        + (listed(right) or "none"))

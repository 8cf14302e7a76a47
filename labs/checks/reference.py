"""The reference: the same model trained by a single process on the whole batch; and a training that
is held to it, step by step. What a mistake is called is data that each exercise gives."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import TOLERANCE, largest_difference, raise_on_all_ranks
from labs.checks.verdicts import Wrong
from labs.training import data
from labs.training.models import trainable
from labs.words import counted, format_distinct

Tensors = dict[str, torch.Tensor]
UNEXPLAINED = "differs_from_reference"  # the code of a parameter that no mistake explains


@dataclass(frozen=True)
class Step:
    """One optimizer step of all ranks together.

    batch: of all ranks; each trains on its equal share. use_all(rank): whether that rank's forward
    runs the layer `sometimes_unused` of EdgeCaseModel; None for a model without one. parts: the
    number of backward passes from which the gradient accumulates, each of 1/parts of the loss.
    whole: every rank trains on the whole batch, as under tensor parallelism; the reference then
    computes it once, not once for each rank.
    """

    batch: Tensors
    use_all: Callable[[int], bool] | None = None
    parts: int = 1
    whole: bool = False

    def inputs(self, rank: int | None = None) -> dict:
        """What the forward of `rank` takes, by name; None means this rank."""
        rank = dist.get_rank() if rank is None else rank
        share = self.batch if self.whole else data.shard(self.batch, rank, dist.get_world_size())
        return share if self.use_all is None else {**share, "use_all": self.use_all(rank)}


class Reference:
    """A copy of `model` that trains on the shares of all ranks; every rank computes the same.

    unused: what a step does with a parameter that no rank used, "zero" (its gradient is zero, so
    weight decay and momentum go on) or "skip" (it is left alone, as torch's optimizers do).
    schedule(optimizer) makes a learning-rate schedule that is stepped after each step.

    After `train(step)`, of that step: losses and `alone`, by rank, the loss and the gradients that
    its share alone gives; `mean`, the gradients averaged over the ranks. Gradients are lists in the
    order of the trainable parameters, None where there is none.
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable, unused: str = "zero",
                 schedule: Callable | None = None):
        self.model, self.unused = copy.deepcopy(model), unused
        self._make_optimizer = make_optimizer
        self.optimizer = make_optimizer(self.model)
        self.schedule = schedule(self.optimizer) if schedule else None
        # (step, trainable parameter): for the mistake of gradients that are never set to zero
        self.history: list[list] = []  # the mean gradients of every step so far
        self.parts = 1

    def train(self, step: Step) -> float:
        """Trains one step; the mean of the losses before it."""
        self.parts = step.parts
        self.before = _copied(self.model.state_dict()), _copied(self.optimizer.state_dict())
        loss = self.differentiate(step)
        self.history.append(self.mean)
        _update(self.model, self.optimizer, self.mean)
        if self.schedule:
            self.schedule.step()
        return loss

    def differentiate(self, step: Step) -> float:
        """Fills losses, alone and mean without an update; the mean loss."""
        ranks = dist.get_world_size()
        # Every rank computes the shares of all ranks itself, without a collective: a submission
        # that leaves the ranks out of step cannot spoil what it is compared with.
        shares = [self._share(step, rank) for rank in range(1 if step.whole else ranks)]
        self.losses, self.alone = zip(*shares * (ranks if step.whole else 1), strict=True)
        self.mean = [_mean(of_ranks) for of_ranks in
                     zip(*(gradients for _, gradients in shares), strict=True)]
        return sum(self.losses) / len(self.losses)

    def _share(self, step, rank) -> tuple[float, list]:
        self.model.zero_grad()
        loss = self.model(**step.inputs(rank)).loss
        loss.backward()
        # zero_grad() sets .grad to None and does not write into the tensors, so they stay valid.
        gradients = [p.grad for _, p in trainable(self.model)]
        self.model.zero_grad()
        if self.unused == "zero":
            gradients = [torch.zeros_like(p) if g is None else g for g, (_, p) in
                         zip(gradients, trainable(self.model), strict=True)]
        return loss.item(), gradients

    def by_name(self, gradients: Sequence) -> Tensors:
        """Gradients by the names of their parameters; zeros where there is none."""
        return {name: torch.zeros_like(p) if g is None else g
                for g, (name, p) in zip(gradients, trainable(self.model), strict=True)}

    # what the last step would have left behind if it had been done otherwise

    def unchanged(self) -> Tensors:
        """The parameters from before the step."""
        return self.before[0]

    def otherwise(self, gradients: Sequence | None = None, scale: float = 1.0,
                  new_optimizer: bool = False, **group) -> Tensors:
        """The parameters that the step leaves with other gradients (None: the mean), multiplied by
        `scale`, with an optimizer that has no state yet, or with other settings of its group."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.before[0])
        optimizer = self._make_optimizer(model)
        rate = self.before[1]["param_groups"][0]["lr"]
        if not new_optimizer:
            optimizer.load_state_dict(_copied(self.before[1]))
        optimizer.param_groups[0].update({"lr": rate, **group})
        chosen = self.mean if gradients is None else gradients
        _update(model, optimizer, [g if g is None else g * scale for g in chosen])
        return model.state_dict()

    def accumulated(self) -> list:
        """The sum of the mean gradients of every step so far."""
        return [sum(g for g in steps if g is not None) if any(g is not None for g in steps)
                else None for steps in zip(*self.history, strict=True)]


def _copied(state):
    """A copy of a state_dict, in a seventh of copy.deepcopy's time: it is made in every step."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def _mean(gradients):
    # The divisor is the number of ranks, not of those that used the parameter: a rank that did not
    # use it adds a zero to the sum, as in DDP.
    found = [g for g in gradients if g is not None]
    return sum(found) / len(gradients) if found else None


def _update(model, optimizer, gradients):
    for gradient, (_, parameter) in zip(gradients, trainable(model), strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Mistake:
    """A known way to get a training step wrong, told apart by the numbers that it leaves.

    code: see `Wrong`. sentence: goes on after "rank 1, parameter 'w' after step 2: it was"; {parts}
    is filled in. gives(reference): the parameters by name that the mistake leaves; several sets
    where each number may be from any of them; a parameter that is missing in all of them is not
    explained. hint: said with it; hint_if_whole: said instead where every number of the parameter
    is explained so.
    """

    code: str
    sentence: str
    hint: str
    gives: Callable[[Reference], Sequence[Tensors]]
    hint_if_whole: str = ""


@dataclass(frozen=True)
class Hints:
    """What an exercise says where no mistake explains the numbers, or where there are none."""

    loss: str = "Forward must run with whole, updated parameters."
    unexplained: str = ""
    not_finite: str = "Was memory read before it was written?"


def whole_parameters(module: nn.Module) -> Tensors:
    """name -> parameter, as they lie in the module."""
    return {name: p.detach() for name, p in module.named_parameters()}


def train_beside_reference(module: nn.Module, optimizer, references: Sequence[Reference],
                           steps: Sequence[Step], *, mistakes: Sequence[Mistake] = (),
                           hints: Hints = Hints(),
                           parameters_of: Callable[[nn.Module], Tensors | None] = whole_parameters,
                           judge_gradients: Callable[[Reference, int], float] | None = None,
                           schedule=None, during=contextlib.nullcontext,
                           tolerance: float = TOLERANCE) -> float:
    """On a rank: trains `module` by the plain loop and holds it to the references after each step.

    Returns the largest difference of a parameter (or a gradient); raises Wrong on all ranks with
    what broke on the lowest of them. Of several references the nearest counts. parameters_of:
    the module's parameters, gathered where they are sharded, by the names that the reference has;
    None where they cannot be read. judge_gradients(reference, number): called after backward, with
    the number of the step; raises Wrong, or returns the largest difference. schedule: the
    optimizer's, stepped after each step. during: a context manager for forward and backward.
    tolerance: of a parameter and of a loss, absolute below 1 and relative above.
    """
    difference = 0.0
    for number, step in enumerate(steps):
        for reference in references:
            reference.train(step)
        # Invariant: `parts` backward passes without zero_grad between them leave the gradient of
        # one pass over the share. Catches a hook that overwrites .grad, or keeps the last pass
        # only.
        with during():
            for _ in range(step.parts):  # gradients must add up
                loss = module(**step.inputs()).loss
                (loss / step.parts).backward()
        # The loss is judged before the update: a forward with stale parameters is then named as
        # such, and not as the wrong update that follows from it.
        raise_on_all_ranks(_judge_loss, loss.item(), references, number, hints, tolerance)
        # Gradients are judged before optimizer.step() uses them, because AdamW hides a factor that
        # all gradients share: its update divides by their size.
        if judge_gradients:
            difference = max(difference, raise_on_all_ranks(judge_gradients, references[0], number))
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
        found = parameters_of(module)  # outside of the judgement: all ranks gather, or none
        difference = max(difference, raise_on_all_ranks(
            judge_parameters, found, references, f"after step {number}", mistakes, hints,
            tolerance))
    return difference


def _judge_loss(loss, references, number, hints, tolerance):
    # Invariant: each rank's loss is the reference's on the same share, before every update.
    # a forward with stale or partly gathered parameters shows in the loss before any update does
    rank = dist.get_rank()
    want = [reference.losses[rank] for reference in references]
    most = min(tolerance, 10 * TOLERANCE)  # a loss is a mean: rounding shows less than in a weight
    if min(abs(loss - w) for w in want) <= most * max(1.0, abs(want[0])):
        return
    when = f"after {counted(number, 'step')}" if number else "before the first step"
    is_, should_be = format_distinct(loss, want[0], digits=5)
    raise Wrong(f"rank {rank}, {when}: the loss is {is_}, the reference's is {should_be}",
                hints.loss, code="wrong_loss")


def judge_parameters(found: Tensors | None, references: Sequence[Reference], when: str,
                     mistakes: Sequence[Mistake] = (), hints: Hints = Hints(),
                     tolerance: float = TOLERANCE) -> float:
    """The largest difference from the nearest reference's parameters, and from its buffers where
    `found` has them. Raises Wrong, with the mistake that explains the numbers if there is one."""
    if found is None:
        return 0.0
    # Invariant: after each step every parameter is the reference's, in every element, on every
    # rank. Where two results are right (a gradient of zero or none for an unused parameter), one of
    # the references must match in all parameters; a mixture of both is wrong.
    differences = [max(largest_difference(found[name], want)
                       for name, want in _wanted(reference, found)) for reference in references]
    nearest = references[differences.index(min(differences))]
    for name, want in _wanted(nearest, found):
        _judge_one(name, found[name], want, nearest, when, mistakes, hints, tolerance)
    return min(differences)


def _wanted(reference, found):
    """(name, tensor) of the reference's parameters, and of its buffers that are in `found`."""
    yield from ((name, p.detach()) for name, p in reference.model.named_parameters())
    yield from ((name, b) for name, b in reference.model.named_buffers() if name in found)


def _judge_one(name, got, want, reference, when, mistakes, hints, tolerance):
    kind = "parameter" if name in dict(reference.model.named_parameters()) else "buffer"
    who = f"rank {dist.get_rank()}, {kind} {name!r} {when}"
    if got.shape != want.shape:
        raise Wrong(f"{who}: its shape is {tuple(got.shape)}, not {tuple(want.shape)}",
                    hints.unexplained, code="wrong_shape")
    wrong = _differs(got, want, tolerance)
    if not wrong.any():
        return
    if not got.isfinite().all():
        raise Wrong(f"{who}: it is not finite", hints.not_finite, code="not_finite")
    part = f"{int(wrong.sum())} of its {wrong.numel()} numbers were"
    found, whole = _explanations(mistakes, name, got, wrong, reference, tolerance)
    if not found:
        raise Wrong(f"{who}: {'it was' if wrong.all() else part} updated to something else than "
                    f"the reference's, off by up to {largest_difference(got, want):.2g}",
                    hints.unexplained, code=UNEXPLAINED)
    sentences = [mistake.sentence.format(parts=reference.parts) for mistake in found]
    alike = f" (the same on {counted(dist.get_world_size(), 'rank')})" * (len(found) > 1)
    raise Wrong(f"{who}: {'it was' if whole else part} {', or '.join(sentences)}{alike}",
                " Or: ".join(filter(None, (mistake.hint_if_whole if whole and mistake.hint_if_whole
                                           else mistake.hint for mistake in found))),
                code=found[0].code)


def _explanations(mistakes, name, got, wrong, reference, tolerance) -> tuple[list[Mistake], bool]:
    """(the mistakes that leave these numbers, whether they explain all numbers, right ones too).

    Two mistakes may leave the same: on 2 ranks the mean divided once more is the gradient of one of
    two passes. Then both are named. Those that explain all numbers go before those that explain
    only the wrong ones, and those that say what each number is before a mixture.
    """
    found = []
    for mistake in mistakes:
        # unlike: elements that none of the mistake's sets of parameters explains
        given = [parameters[name] for parameters in mistake.gives(reference) if name in parameters]
        unlike = torch.stack([torch.ones_like(got, dtype=torch.bool),
                              *(_differs(got, one, tolerance) for one in given)]).all(0)
        if not (unlike & wrong).any():  # some of what a mistake leaves may happen to be right
            found.append(((bool(unlike.any()), len(given) > 1), mistake))
    # False sorts before True: all numbers before only the wrong ones, one set before several.
    best = min((how for how, _ in found), default=(False, False))
    return [mistake for how, mistake in found if how == best], not best[0]


def _differs(got, want, tolerance):
    # "not close" instead of "far", so that NaN differs too
    return ~((got - want).abs() <= tolerance * want.abs().clamp(min=1.0))

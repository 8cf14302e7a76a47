"""The non-parallel twin of notebook 03: AdamW with weight decay and a schedule on the whole batch,
and a comparison that says what became of a parameter that is not the twin's."""

import copy

import torch
import torch.distributed as dist

from labs.exercises import on_ranks
from labs.exercises.on_ranks import BATCH, TOLERANCE, raise_on_all_ranks, worst
from labs.exercises.verdicts import Wrong
from labs.training import data
from labs.training.models import EdgeCaseModel, trainable
from labs.zero_stages.sharded import Sharded

# AdamW hides a gradient's scale; a large eps shows it, so that a sum is told from a mean.
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
STEPS = 6
PARTS = {4: 3}  # step -> into how many backward passes it is split
_UNCHANGED = "not changed by the step"
_UNTOUCHED = ("Nothing of it was updated here. Does the inner optimizer hold flat.shard, and does "
              "every shard get its gradient before inner.step(), also the unit reduced last?")
_EVERYBODY, _NOBODY = (lambda rank: True), (lambda rank: False)


def schedule(optimizer):
    """A learning rate that falls with every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def adamw(model):
    return torch.optim.AdamW([p for _, p in trainable(model)], **SETTINGS)


def rare_ranks(stage: int) -> list:
    """Which ranks use the layer `sometimes_unused`, step by step. Under ZeRO-3 a layer that is used
    must be gathered by all."""
    some = _EVERYBODY if stage == 3 else lambda rank: rank == 0
    return [_EVERYBODY, some, _NOBODY, _EVERYBODY, some, _EVERYBODY][:STEPS]


class Twin:
    """Trains on all shards of a batch at once. unused: what a step does with a parameter that no
    rank used, "zero" (its gradient is zero: decay and momentum go on) or "skip" (it is left
    alone)."""

    def __init__(self, unused: str):
        self.model, self.unused = EdgeCaseModel(seed=0), unused
        self.optimizer = adamw(self.model)
        self.schedule = schedule(self.optimizer)
        self.all = []  # the mean gradients of every step so far

    def step(self, batch, rare, parts=1, scheduled=True):
        """One step; remembers what it began with, for `candidates`. parts: how many backward passes
        its gradient is summed from elsewhere."""
        ranks, self.parts = dist.get_world_size(), parts
        self.before = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.losses = [_loss(self.model, batch, rank, rare) for rank in range(ranks)]
        self.alone = [self._gradients([loss]) for loss in self.losses]
        self.mean = self._gradients(self.losses)
        self.all.append(self.mean)
        self._update(self.model, self.optimizer, self.mean)
        if scheduled:
            self.schedule.step()

    def _gradients(self, losses) -> list:
        self.model.zero_grad()
        (sum(losses) / len(losses)).backward(retain_graph=True)
        gradients = [p.grad for _, p in trainable(self.model)]
        self.model.zero_grad()
        if self.unused == "skip":
            return gradients
        return [torch.zeros_like(p) if g is None else g
                for g, (_, p) in zip(gradients, trainable(self.model), strict=True)]

    def _update(self, model, optimizer, gradients):
        for gradient, (_, parameter) in zip(gradients, trainable(model), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    def candidates(self):
        """(sentence, hint, [parameters by name]) of what a step could have done instead; several
        where each number may be that of another."""
        n = dist.get_world_size()
        yield (_UNCHANGED, "After the update every rank needs the pieces "
               "that the others updated: gather the parameters, anew in every step.",
               [self.before[0]])
        if self.parts > 1:
            yield from self._candidates_in_parts()
        yield ("updated with the gradient of one rank alone", "Reduce the gradients over the "
               "ranks first, in every step and for every parameter.",
               [self._otherwise(gradients) for gradients in self.alone])
        for sentence, hint, changes in (
                ("updated with the SUM of the gradients over the ranks, not the mean",
                 "Divide by the world size.", {"scale": n}),
                ("updated with the mean divided by the world size once more", "Divide once.",
                 {"scale": 1 / n}),
                ("updated with a learning rate that does not follow the schedule",
                 "The schedule changes optimizer.param_groups: they must be the groups that the "
                 "update reads.", {"lr": SETTINGS["lr"]}),
                ("updated without weight decay", "Hand all settings (**kwargs) to the "
                 "optimizer that updates the shard.", {"weight_decay": 0.0}),
                ("updated as if by a new optimizer: the moments of the earlier steps are lost",
                 "Make the inner optimizer once, in __init__.", {"fresh": True}),
                ("updated with the gradients of all steps so far", "zero_grad must forget the "
                 "parameters' gradients, not only those of the shards.", {"accumulated": True}),
                ("updated with a gradient of zero",
                 "Where did the gradient go before the update?", {"scale": 0})):
            yield sentence, hint, [self._otherwise(self.mean, **changes)]

    def _candidates_in_parts(self):
        """For a step whose gradient is the sum of several backward passes."""
        n = self.parts
        yield (f"updated with the gradient of one of {n} backward passes", "A new gradient is "
               "added to the one that is there.", [self._otherwise(self.mean, scale=1 / n)])
        yield ("updated with gradients that had been reduced before, in an earlier backward pass",
               "Once they are reduced, free them: set the parameters' .grad to None. A hook that "
               "returns None frees nothing.", [self._otherwise(self.mean, scale=(n + 1) / 2)])

    def _otherwise(self, gradients, scale=1.0, fresh=False, accumulated=False, **group):
        model = EdgeCaseModel(seed=0)
        model.load_state_dict(self.before[0])
        optimizer = adamw(model)
        lr = self.before[1]["param_groups"][0]["lr"]
        if not fresh:
            optimizer.load_state_dict(copy.deepcopy(self.before[1]))
        optimizer.param_groups[0].update({"lr": lr, **group})
        if accumulated:
            gradients = [sum(g for g in every if g is not None)
                         for every in zip(*self.all, strict=True)]
        self._update(model, optimizer, [g if g is None else g * scale for g in gradients])
        return model.state_dict()


def _loss(model, batch, rank, rare):
    return model(**data.shard(batch, rank, dist.get_world_size()), use_all=rare(rank)).loss


def parameters_of(module, model) -> dict:
    """name -> whole parameter, gathered where the module can; None where they cannot be read."""
    if isinstance(module, Sharded):
        return module.whole_parameters()
    found = {name: p.detach() for name, p in model.named_parameters()}
    readable = all(p.untyped_storage().nbytes() >= p.numel() * p.element_size() > 0
                   for p in found.values())
    return found if readable else None


def follow(strategy, stage: int) -> float:
    """On a rank: trains what `strategy` returns beside the twins, by the plain loop; the largest
    difference of a parameter. Raises Wrong."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, twins = EdgeCaseModel(seed=0), [Twin("zero"), Twin("skip")]
    module, optimizer = raise_on_all_ranks(built, strategy, model, SETTINGS)
    schedules, difference = schedule(optimizer), 0.0
    for step, (batch, rare) in enumerate(zip(data.xy_batches(STEPS, BATCH), rare_ranks(stage),
                                             strict=True)):
        for twin in twins:
            twin.step(batch, rare, PARTS.get(step, 1))
        for _ in range(PARTS.get(step, 1)):  # gradients must add up
            loss = module(**data.shard(batch, rank, ranks), use_all=rare(rank)).loss
            (loss / PARTS.get(step, 1)).backward()
        raise_on_all_ranks(_judge_loss, loss.detach(), twins, step)
        optimizer.step()
        schedules.step()
        optimizer.zero_grad()
        found = parameters_of(module, model)
        difference = max(difference, raise_on_all_ranks(_judge_parameters, found, twins, step))
    return difference


def built(strategy, model, settings):
    """(module, optimizer) of the strategy. Raises Wrong where they are none."""
    pair = on_ranks.built(strategy, model, torch.optim.AdamW, settings)
    for thing in pair:
        if type(thing).__module__.startswith(("torch.distributed", "torch.nn.parallel",
                                              "deepspeed")):
            raise Wrong(f"{type(thing).__module__.split('.')[0]}'s own {type(thing).__name__} does "
                        "the work", "Build it from the pieces of the lab; theirs is for comparing.")
    return pair


def _judge_loss(loss, twins, step):
    want = [twin.losses[dist.get_rank()].detach() for twin in twins]
    if min(worst(loss, w) for w in want) <= TOLERANCE * max(1.0, want[0].item()):
        return
    before = f"after {step} step{'s' * (step != 1)}" if step else "before the first step"
    raise Wrong(f"rank {dist.get_rank()}, {before}: the loss is {loss.item():.4f}, the twin's is "
                f"{want[0].item():.4f}", "Forward does not run with the parameters that it should: "
                "are all of them gathered, whole and new?")


def _judge_parameters(found, twins, step) -> float:
    if found is None:
        return 0.0
    differences = [max(worst(found[name], p.detach()) for name, p in twin.model.named_parameters())
                   for twin in twins]
    twin = twins[differences.index(min(differences))]
    for name, parameter in twin.model.named_parameters():
        wrong = _differs(found[name], parameter.detach())
        if wrong.any():
            _explain(name, found[name], wrong, twin, step)
    return min(differences)


def _differs(got, want):
    return (got - want).abs() > TOLERANCE * want.abs().clamp(min=1.0)


def _explain(name, got, wrong, twin, step):
    rank, count, numel = dist.get_rank(), int(wrong.sum()), wrong.numel()
    who = f"rank {rank}, parameter {name!r} after step {step}"
    if not got.isfinite().all():
        raise Wrong(f"{who}: it is not finite", "Was memory read before it was written?")
    subject = "it was" if count == numel else f"{count} of its {numel} numbers were"
    for sentence, hint, alternatives in twin.candidates():
        unlike = [_differs(got, parameters[name]) for parameters in alternatives]
        if not (torch.stack(unlike).all(0) & wrong).any():
            untouched = sentence == _UNCHANGED and count == numel
            raise Wrong(f"{who}: {subject} {sentence}", _UNTOUCHED if untouched else hint)
    raise Wrong(f"{who}: {subject} updated to something else than the twin's, off by up to "
                f"{worst(got, twin.model.get_parameter(name).detach()):.2g}",
                "Is every gradient reduced, every shard updated, and every piece put back in its "
                "place?")

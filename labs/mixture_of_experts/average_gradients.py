"""Exercise 9.4: with experts divided over ranks, every gradient is the mean over all ranks' losses.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from labs.checks.on_ranks import on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.checks.reference import Reference, Step, Tensors
from labs.checks.training import train_and_compare
from labs.checks.verdicts import check
from labs.checks.waits import WaitTraffic
from labs.mixture_of_experts.gradient_mistakes import Probe, judge_probes
from labs.mixture_of_experts.reference_parallel import Layout, divide_experts, gathered
from labs.training import data
from labs.training.mixtures import Mixture
from labs.training.models import move_to_rank, trainable
from labs.words import to_within
from labs.workers import devices

STEPS = 5
SEQUENCE, PER_RANK = 8, 2
# With a large eps AdamW shows a factor that it hides otherwise.
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2})
SGD = (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9})
_SIZES = {"layers": 1, "hidden": 8, "ffn": 4, "experts": 8, "heads": 2, "context": SEQUENCE}


@dataclass(frozen=True)
class Case:
    """A model, `expert` ranks that divide its experts, an optimizer. frozen: parts of names of
    parameters that are not trained. parts: micro-batches of a step. uneven: the first half of the
    ranks sends all tokens to the first expert, the second half to one in the middle; all others
    get none."""

    expert: int
    optimizer: tuple[type, dict]
    k: int = 2
    shared: bool = True
    frozen: tuple[str, ...] = ()
    parts: int = 1
    uneven: bool = False

    def model(self) -> Mixture:
        """The full model on the rank's device, the same on all ranks."""
        model = Mixture(**_SIZES, k=self.k, shared=self.shared)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        if self.uneven:
            _route_by_byte(model)
        return move_to_rank(model)

    def steps(self, count: int) -> list[Step]:
        """Steps of all ranks together."""
        ranks = dist.get_world_size()
        batches = data.lm_batches(count, PER_RANK * ranks, SEQUENCE)
        found = []
        for tokens in (batch["input_ids"] for batch in batches):
            if self.uneven:  # below 128 for the first half of the ranks, 128 or more for the others
                tokens = tokens % 128
                tokens[len(tokens) // 2:] += 128
            found.append(Step({"input_ids": tokens.to(devices.device())}, parts=self.parts))
        return found

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        kind, settings = self.optimizer
        return kind([parameter for _, parameter in trainable(model)], **settings)


def _route_by_byte(model):
    """Lets the byte alone choose the expert: the first, or from 128 on the one in the middle."""
    with torch.no_grad():
        model.embedding.weight[:, 0] = torch.arange(256).div(128).floor() * 40 - 20
        for block in model.layers:
            block.mlp.router.weight *= 1e-2
            block.mlp.router.weight[0, 0], middle = -4, len(block.mlp.router.weight) // 2
            block.mlp.router.weight[middle, 0] = 4


# Ranks -> cases, EP × replicas of 4 × 1, 2 × 2, 2 × 1 and 1 × 2. Trained for STEPS steps.
TRAINED = {4: (Case(4, ADAMW), Case(2, SGD, frozen=("places", "experts.down"), parts=2)),
           2: (Case(2, ADAMW, shared=False, parts=2), Case(1, SGD))}
# One backward of these, too.
PROBED = {4: (Case(1, SGD, k=8, shared=False), Case(2, SGD, k=1, uneven=True)), 2: ()}


@check("9.4", hints={
    "collectives_differ": "All ranks call the same collectives in the same order: whether one is "
                          "called must not depend on a gradient's values, which differ by rank.",
    "deadlock": "An all-reduce over a group is called by all of its ranks, in the same order.",
    "'NoneType' object has no attribute": "A frozen parameter has no gradient: skip it.",
    "Expected parameter `tensor`": "A frozen parameter has no gradient: skip it."})
def check_average_gradients(average_gradients: Callable):
    """average_gradients(model, replicas), after backward, makes every gradient the mean over all
    ranks' losses. The experts are divided by a layer of ours."""
    difference = max(on_ranks(_try_all, average_gradients, world_sizes=tuple(TRAINED), timeout=60))
    return (f"equals one process for {STEPS} steps with SGD and AdamW, for EP × replicas of 2 × 1, "
            f"1 × 2, 2 × 2 and 4 × 1 ({to_within(difference)})")


def _try_all(average_gradients) -> float:
    ranks = dist.get_world_size()
    with torchs_own_refused("DistributedDataParallel"):
        # One backward of each case first, judged together: with several layouts on the same ranks
        # a factor says what was divided by.
        raise_on_all_ranks(judge_probes, [_probe(average_gradients, case)
                                          for case in (*TRAINED[ranks], *PROBED[ranks])])
        return max(_train(average_gradients, case) for case in TRAINED[ranks])


class _Run:
    """A case's model with its experts divided, and the student's function beside it."""

    def __init__(self, average_gradients, case: Case):
        self.layout = Layout(dist.get_world_size(), case.expert)
        self.expert_group, self.replicas = self.layout.groups()
        model = case.model()
        self.reference = Reference(model, case.optimizer_of)
        self.model = divide_experts(model, self.expert_group)
        self.average_gradients, self.probe = average_gradients, None

    def average(self):
        """Calls the student's function, and keeps what it did for the judgement."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        # of before the call: a frozen parameter may be made trainable in it
        due = dict(trainable(self.model))
        with WaitTraffic() as traffic:
            self.average_gradients(self.model, self.replicas)
            # Reading a functional collective's result counts as its wait.
            found = {name: p.grad.detach().clone() for name, p in self.model.named_parameters()
                     if p.grad is not None}
        moved = [name for name, p in self.model.named_parameters()
                 if not torch.equal(p.detach(), before[name]) or p.requires_grad != (name in due)]
        self.probe = Probe(self.layout, found, due, moved, traffic)

    def judged(self) -> Probe:
        """The last call, with the gradients of all ranks' shares beside it."""
        reference = self.reference
        self.probe.alone = [reference.by_name(alone) for alone in reference.alone]
        return self.probe


def _probe(average_gradients, case) -> Probe:
    run, [step] = _Run(average_gradients, case), case.steps(1)
    run.reference.differentiate(step)
    run.model(**step.inputs()).loss.backward()
    run.average()
    return run.judged()


def _train(average_gradients, case) -> float:
    run = _Run(average_gradients, case)

    @contextlib.contextmanager
    def averaged():
        yield  # forward and backward, of all micro-batches
        run.average()

    # Invariant: loss, gradients and parameters of 5 steps are those of one process. Later steps
    # catch what a function keeps from one call to the next.
    return train_and_compare(
        run.model, case.optimizer_of(run.model), [run.reference], case.steps(STEPS),
        parameters_of=partial(_parameters, group=run.expert_group), during=averaged,
        judge_gradients=lambda _, number: judge_probes([run.judged()], f"step {number}, "))


def _parameters(model, group) -> Tensors:
    return gathered(model, group)

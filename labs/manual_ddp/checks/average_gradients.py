"""Checks of exercises 2.3 and 2.4: gradients averaged by a function, and by a module."""

import contextlib
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from labs.exercises.on_ranks import BATCH, on_ranks, raise_on_all_ranks, torchs_own_refused
from labs.exercises.reference import (
    Hints,
    Mistake,
    Reference,
    Step,
    judge_parameters,
    train_beside_reference,
)
from labs.exercises.verdicts import Wrong, check
from labs.manual_ddp.gradients import judge_gradients, mean_and_own, reference_model, sgd
from labs.meters.traffic import Traffic
from labs.training import data
from labs.training.models import EdgeCaseModel, count_trainable
from labs.training.strategies.torch_strategies import torch_ddp

# Which ranks use the layer `sometimes_unused`; on the others its gradient is None.
EVERY_RANK, ONLY_RANK_0 = (lambda rank: True), (lambda rank: rank == 0)
_START_HINT = "The ranks must begin with the same state: call broadcast_state in __init__."
_OWN_START = Mistake("left as this rank built it", _START_HINT,
                     lambda _: [EdgeCaseModel(seed=dist.get_rank()).state_dict()])


@check("2.3", hints={"not in the same collective":
                     "A rank that did not use a parameter takes part with zeros."})
def check_average_gradients(average_gradients):
    """average_gradients(model), after backward, turns every gradient into the mean over ranks."""
    def work():
        [batch] = data.xy_batches(1, BATCH)
        step, reference, model = Step(batch, ONLY_RANK_0), reference_model(), EdgeCaseModel(seed=0)
        reference.differentiate(step)
        model(**step.inputs()).loss.backward()
        with torchs_own_refused("DistributedDataParallel"), Traffic() as traffic:
            average_gradients(model)
        return raise_on_all_ranks(_judge_average, model, reference, traffic)

    return (f"gradients equal the full batch's on 2, 3 and 4 ranks "
            f"(to {max(on_ranks(work)):.0e})")


def _judge_average(model, reference, traffic) -> float:
    # averaging the parameters instead also makes ranks equal, but trains on wrong gradients
    judge_parameters(model.state_dict(), [reference], "after averaging the gradients")
    difference = judge_gradients(model, *mean_and_own(reference))
    judge_bytes(traffic, 4 * count_trainable(model))
    return difference


def judge_bytes(traffic: Traffic, want: int) -> None:
    """Raises Wrong where a rank's collectives carried other than `want` bytes of gradients."""
    # right numbers at twice the traffic: all gradients gathered, or each averaged twice
    if traffic.bytes > want:
        raise Wrong(f"rank {dist.get_rank()} communicated {traffic.bytes:,} bytes, "
                    f"{traffic.bytes / want:.1f}x the {want:,} bytes of its gradients",
                    "One all-reduce of each gradient is enough.")
    if traffic.bytes < want:
        raise Wrong(f"rank {dist.get_rank()} communicated {traffic.bytes:,} bytes; its gradients "
                    f"have {want:,}", "Every trainable parameter's gradient must travel.")


@check("2.4")
def check_manual_ddp(wrap):
    """wrap(model), for example the class ManualDDP, returns a module that trains as the reference
    does."""
    def work():
        difference, traffics = train_wrapped(wrap)
        for traffic in traffics:
            raise_on_all_ranks(judge_bytes, traffic, 4 * count_trainable(EdgeCaseModel()))
        return max(difference, _difference_from_torchs(wrap))

    return (f"equals the full-batch reference and torch's DDP over 4 steps on 2, 3 and 4 ranks "
            f"(to {max(on_ranks(work)):.0e})")


def train_wrapped(wrap: Callable[[nn.Module], nn.Module], steps: int = 4,
                  use_all: Callable[[int], bool] = EVERY_RANK) -> tuple[float, list[Traffic]]:
    """On a rank: trains `wrap(model)` and compares it with the reference after every backward and
    every step. Returns the largest difference and the traffic of each step's backward."""
    reference, model, traffics = reference_model(), EdgeCaseModel(seed=dist.get_rank()), []
    with torchs_own_refused("DistributedDataParallel"):
        module = wrap(model)
    # each rank built the model with a seed of its own: only a broadcast makes them equal
    raise_on_all_ranks(judge_parameters, model.state_dict(), [reference], "after wrapping",
                       [_OWN_START], Hints(unexplained=_START_HINT))

    @contextlib.contextmanager
    def recorded():
        with Traffic() as traffic, torchs_own_refused("DistributedDataParallel"):
            yield
        traffics.append(traffic)

    difference = train_beside_reference(
        module, sgd(model), [reference],
        [Step(batch, use_all) for batch in data.xy_batches(steps, BATCH)],
        parameters_of=lambda _: model.state_dict(), during=recorded,
        judge_gradients=lambda reference, number: judge_gradients(
            model, *mean_and_own(reference), f"step {number}, "))
    return difference, traffics


def _difference_from_torchs(wrap) -> float:
    """Trains the student's module and torch's DDP on the same batches."""
    models = [EdgeCaseModel(seed=5), EdgeCaseModel(seed=5)]
    modules = [wrap(models[0]), torch_ddp(models[1])]
    optimizers = [sgd(model) for model in models]
    for batch in data.xy_batches(3, BATCH, seed=50):
        for module, optimizer in zip(modules, optimizers, strict=True):
            module(**Step(batch, EVERY_RANK).inputs()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return raise_on_all_ranks(judge_parameters, models[0].state_dict(),
                              [Reference(models[1], sgd)], "after 3 steps, with torch's DDP as the "
                              "reference")

"""Exercise 2.4, and the training that exercises 2.4 to 2.8 share: a module that averages
gradients by itself is compared with the reference in every step."""

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch.distributed as dist
from torch import nn

from labs.checks.explanations import TrainingMistake
from labs.checks.on_ranks import (
    BATCH,
    gradients,
    on_ranks,
    raise_on_all_ranks,
    torchs_own_refused,
)
from labs.checks.reference import Reference, Step
from labs.checks.training import Hints, judge_parameters, train_and_compare
from labs.checks.verdicts import Wrong, check, kind_of
from labs.checks.waits import WaitTraffic
from labs.faults.delayed_rank import delay_rank
from labs.manual_ddp.api_hints import API_HINTS, HOOK
from labs.manual_ddp.edge_cases import EVERY_RANK, WORLD_SIZES, NestedModel, UseAll
from labs.manual_ddp.gradients import (
    floats_of,
    judge_bytes,
    judge_gradients,
    mean_and_alone,
    reference_model,
    sgd,
)
from labs.meters.traffic import Traffic
from labs.training import data
from labs.training.models import EdgeCaseModel
from labs.training.strategies.torch_strategies import torch_ddp
from labs.words import to_within

_START_HINT = "The ranks must begin with the same state: call broadcast_state in __init__."
_FORWARD_HINT = ("forward returns what the wrapped module returns. Scale the gradients, not the "
                 "loss: the loop prints it.")
_OWN_HINT = "Wrap the module that you are given: super().__init__(module)."


@check("2.4", hints=API_HINTS | {"takes 1 positional argument but 2 were given": HOOK,
                                 "missing 1 required positional argument": HOOK})
def check_manual_ddp(wrap):
    """wrap(model), for example the class ManualDDP, returns a module that trains as the reference
    does."""
    def work():
        difference = 0.0
        for make, steps in ((EdgeCaseModel, 3), (NestedModel, 1)):
            reached, traffics = train_wrapped(wrap, [EVERY_RANK] * steps, make)
            for traffic in traffics:
                raise_on_all_ranks(judge_bytes, traffic.calls, make())
            difference = max(difference, reached)
        return max(difference, _difference_from_torchs(wrap))

    return (f"equals the full-batch reference and torch's DDP, step by step, on 2, 3 and 4 ranks "
            f"({to_within(max(on_ranks(work, world_sizes=WORLD_SIZES)))})")


def train_wrapped(wrap: Callable[[nn.Module], nn.Module], uses: Sequence[UseAll],
                  make: Callable[..., nn.Module] = EdgeCaseModel) -> tuple[float, list[Traffic]]:
    """On a rank: trains `wrap(make(seed))` and compares it with the reference after every backward
    and every step. Returns the largest difference and the traffic of each step's forward and
    backward.

    uses: for each step, which ranks use the optional layers. A step in which no rank does comes
    last: whether momentum continues there is left open, so the numbers differ from then on.
    """
    # Both ways to treat a parameter that no rank used are right, so the nearer reference counts.
    references = [reference_model(make, unused) for unused in ("skip", "zero")]
    model, seen = make(seed=dist.get_rank()), SimpleNamespace(traffics=[], gradients={})
    with torchs_own_refused("DistributedDataParallel"):
        module = wrap(model)
    # each rank built the model with a seed of its own: only a broadcast makes them equal
    own = TrainingMistake("not_broadcast", "left as this rank built it", _START_HINT,
                          lambda _: [floats_of(make(seed=dist.get_rank()))])
    raise_on_all_ranks(judge_parameters, floats_of(model), references, "after wrapping", [own],
                       Hints(unexplained=_START_HINT))
    raise_on_all_ranks(_judge_module, module, model)

    @contextlib.contextmanager
    def recorded():
        if not seen.traffics:
            # One rank is late in the first step: a gradient that is read before its sum has arrived
            # lacks that rank's part.
            delay_rank(dist.get_world_size() - 1, WORLD_SIZES[0])
        with WaitTraffic() as traffic, torchs_own_refused("DistributedDataParallel"):
            yield
            # now, before the ranks meet to judge: an all-reduce that nobody waits for arrives then;
            # and inside, where reading a functional collective's result counts as its wait
            seen.gradients = gradients(model)
        seen.traffics.append(traffic)

    difference = train_and_compare(
        module, sgd(model), references,
        [Step(batch, use_all) for batch, use_all in
         zip(data.xy_batches(len(uses), BATCH), uses, strict=True)],
        parameters_of=lambda _: floats_of(model), during=recorded, hints=Hints(_FORWARD_HINT),
        judge_gradients=lambda reference, number: judge_gradients(
            model, *mean_and_alone(reference), f"step {number}, ", seen.traffics[-1],
            seen.gradients))
    return difference, seen.traffics


def _judge_module(module, model):
    if not isinstance(module, nn.Module):
        raise Wrong(f"it returned {kind_of(module)}, not a module", "return the wrapped module",
                    code="wrong_type")
    # an optimizer that gets module.parameters() would update nothing, or a copy
    found = {id(parameter) for parameter in module.parameters()}
    missing = [name for name, p in model.named_parameters() if id(p) not in found]
    if missing:
        raise Wrong(f"{missing[0]!r} of the model is not among module.parameters(): an optimizer "
                    "would not update it", _OWN_HINT, code="parameters_hidden")


def _difference_from_torchs(wrap) -> float:
    """Trains the student's module and torch's DDP on the same batches."""
    models = [EdgeCaseModel(seed=5), EdgeCaseModel(seed=5)]
    modules = [wrap(models[0]), torch_ddp(models[1])]
    optimizers = [sgd(model) for model in models]
    for batch in data.xy_batches(2, BATCH, seed=50):
        for module, optimizer in zip(modules, optimizers, strict=True):
            module(**Step(batch, EVERY_RANK).inputs()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return raise_on_all_ranks(judge_parameters, floats_of(models[0]),
                              # This reference trains nothing: it only carries the numbers of
                              # torch's module.
                              [Reference(models[1], sgd)], "after 2 steps, with torch's DDP as the "
                              "reference")

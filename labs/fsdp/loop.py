"""Exercise 4.8: a training loop as it is found, made right."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.checks.on_ranks import largest_difference, on_ranks, raise_on_all_ranks
from labs.checks.tolerances import TRAINED
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp import strategy_checks
from labs.pictures.tables import Table
from labs.training import strategies
from labs.words import counted
from labs.workers import devices
from labs.workers.launcher import launch

MAX_NORM = 0.5  # below the norm of every step, so that each one is clipped
STEPS = 4
SETTINGS = {"lr": 0.3, "momentum": 0.5}  # of SGD: unlike AdamW it shows a gradient's scale
RANKS = 2


@check("4.8")
def check_loop(loop: Callable) -> str:
    """loop(module, optimizer, batches): one step on each batch, under FSDP; gradients are clipped
    to a global norm of MAX_NORM."""
    difference = max(on_ranks(_train, loop, world_sizes=(RANKS,)))
    return (f"every step uses its own gradient, clipped to {MAX_NORM} over all shards: parameters "
            f"equal the reference's after {STEPS} steps ({strategy_checks.closeness(difference)})")


def _build() -> tuple:
    return strategies.fsdp2(strategy_checks.make_model(), torch.optim.SGD, **SETTINGS)


def _train(loop) -> float:
    module, optimizer = _build()
    norms = _record_norms(module, optimizer)
    loop(module, optimizer, [step.inputs() for step in strategy_checks.steps(STEPS)])
    return raise_on_all_ranks(_judge, strategy_checks.whole_parameters(module), norms)


def _record_norms(module, optimizer) -> list[float]:
    """Returns a list to which every step appends the global norm of the gradient that it uses."""
    norms = []

    def remember(*_):
        # Squares of this rank's shards: all ranks' shards together are the whole gradient.
        own = sum((p.grad.to_local().square().sum() for p in module.parameters()
                   if p.grad is not None), torch.zeros((), device=devices.device()))
        dist.all_reduce(own)
        norms.append(own.sqrt().item())

    optimizer.register_step_pre_hook(remember)
    return norms


@dataclass(frozen=True)
class _Trained:
    """What one process does on the full batches. norms: of each gradient before it is clipped;
    parameters: by name, after each step."""

    norms: list[float]
    parameters: list[dict[str, torch.Tensor]]


def _train_alone(cleared: bool = True) -> _Trained:
    """cleared: whether each step's gradient is its own, or is added to those before it."""
    model, norms, parameters = strategy_checks.make_model(), [], []
    optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
    for step in strategy_checks.steps(STEPS):
        if cleared:
            model.zero_grad()
        # The batch of all ranks: under FSDP each rank has a share of it.
        model(**step.batch).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return _Trained(norms, parameters)


def _apart(found, want) -> float:
    return max(largest_difference(found[name], value) for name, value in want.items())


def _judge(found, norms) -> float:
    rank, want = f"rank {dist.get_rank()}", _train_alone()
    # One step for each batch: a loop that leaves some out, or repeats them, is another training.
    if len(norms) != STEPS:
        raise Wrong(f"{rank}: {STEPS} batches, and {counted(len(norms), 'step')} of the optimizer",
                    "backward and step, once for each batch.", code="missing_step")
    # A step without a gradient changes nothing: zero_grad stands between backward and step.
    if min(norms) == 0:
        raise Wrong(f"{rank}: step {norms.index(0)} has no gradient left",
                    "Clear gradients before backward, or after the step.", code="gradient_missing")
    # The norm is that of all shards: each rank's own is smaller, so its gradient is clipped less.
    for number, norm in enumerate(norms):
        if not abs(norm / MAX_NORM - 1) < 0.001:
            raise Wrong(f"{rank}: the gradient of step {number} has a norm of {norm:.3g}, not "
                        f"{MAX_NORM}; alone it would be {want.norms[number]:.3g} before clipping",
                        "Clip between backward and step, over all ranks' shards.",
                        code="not_clipped")
    # Gradients that are never cleared add up: after clipping their norm is right, and their
    # direction is that of all batches so far.
    difference = _apart(found, want.parameters[-1])
    if difference > TRAINED:
        added = _apart(found, _train_alone(cleared=False).parameters[-1]) < TRAINED
        raise Wrong(f"{rank}: every gradient is clipped to {MAX_NORM}, and after {STEPS} steps a "
                    f"parameter is {difference:.2g} off the reference's"
                    + ": each gradient is added to those of the steps before it" * added,
                    "backward adds to what is in .grad: optimizer.zero_grad() once for each step."
                    if added else "Is each gradient that of its own batch, and nothing else?",
                    code="gradients_not_cleared" if added else "differs_from_reference")
    return difference


@shows("4.8")
def show_loop(loop: Callable) -> Table:
    """Returns a table of the steps that a loop makes under FSDP: the norm of the gradient that each
    uses, and how far the parameters are from those of a single process afterwards."""
    steps = launch(_try, loop, ranks=RANKS, quiet=True)[0]
    rows = [(f"step {number}", f"{norm:.3f}", f"{MAX_NORM:.3f}", f"{apart:.0e}")
            for number, (norm, apart) in enumerate(steps)]
    return Table(f"{RANKS} ranks; gradients should be clipped to a norm of {MAX_NORM}",
                 ("", "norm used", "norm wanted", "parameters off by"), rows)


def _try(loop) -> list[tuple[float, float]]:
    module, optimizer = _build()
    norms, apart, want = _record_norms(module, optimizer), [], _train_alone().parameters
    optimizer.register_step_post_hook(lambda *_: apart.append(
        _apart(strategy_checks.whole_parameters(module), want[min(len(apart), STEPS - 1)])))
    loop(module, optimizer, [step.inputs() for step in strategy_checks.steps(STEPS)])
    return list(zip(norms, apart, strict=True))

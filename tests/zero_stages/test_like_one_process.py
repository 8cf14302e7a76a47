"""Every stage trains as one process does, in the manner of torch's, DeepSpeed's and picotron's own
tests: every architecture, every habit of a training loop, on 1 to 4 ranks."""

import copy
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from torch import nn

from labs.training import data
from labs.training.presets import preset
from labs.workers.launcher import launch
from labs.zero_stages.architectures import ARCHITECTURES, make
from labs.zero_stages.scaffold import ShardedModule

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("03_zero_stages", PRESET=preset("laptop"))
STAGES = {name: getattr(right, name) for name in ("zero1", "zero2", "zero3", "zero3_prefetch")}
ADAMW = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
BATCH, STEPS = 12, 3


class OneProcess:
    """The reference behind the interface of a stage: the gradients of the whole batch."""

    def clip(self, optimizer, norm):
        shared = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(shared, norm)

    def inputs(self, batch):
        return batch

    def parameters(self, module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


class Sharded:
    """A stage: gradients of this rank's share, whole parameters gathered to be compared."""

    def clip(self, optimizer, norm):
        return right.clip_grad_norm(optimizer, norm)

    def inputs(self, batch):
        return data.shard(batch, dist.get_rank(), dist.get_world_size())

    def parameters(self, module):
        if isinstance(module, ShardedModule):
            return {k: v.clone() for k, v in module.full_parameters().items()}
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def plain(model, optimizer_class, **settings):
    return model, optimizer_class(model.parameters(), **settings)


# habits of a training loop: (module, optimizer, how, batches) -> what to compare besides


def backward(module, how, batch, scale=1.0):
    loss = module(**how.inputs(batch)).loss
    (loss * scale).backward()
    return loss.item()


def adamw(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    for batch in batches:
        backward(module, how, batch)
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def with_sgd(**settings):
    def habit(strategy, how, model, batches):
        module, optimizer = strategy(model, torch.optim.SGD, lr=0.1, **settings)
        for batch in batches:
            backward(module, how, batch)
            optimizer.step()
            optimizer.zero_grad()
        return how.parameters(module)
    return habit


def accumulation(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    for _ in range(2):
        for batch in batches:
            backward(module, how, batch, 1 / len(batches))
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def one_backward_for_two_forwards(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    for first, second in zip(batches, batches[1:], strict=False):
        (module(**how.inputs(first)).loss + module(**how.inputs(second)).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def clipped(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.SGD, lr=0.5, momentum=0.9)
    norms = []
    for batch in batches:
        backward(module, how, batch)
        norms.append(float(how.clip(optimizer, 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return {**how.parameters(module), "norms": torch.tensor(norms)}


def clipped_after_accumulation(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.SGD, lr=0.5)
    for _ in range(2):
        for batch in batches:
            backward(module, how, batch)
        how.clip(optimizer, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def clipped_and_skipped(strategy, how, model, batches):
    """Every other step is left out after clipping, as where a norm is not finite."""
    module, optimizer = strategy(model, torch.optim.SGD, lr=0.5)
    for number, batch in enumerate(batches):
        backward(module, how, batch)
        how.clip(optimizer, 0.05)
        if number % 2:
            optimizer.step()
        module.zero_grad()
        if hasattr(optimizer, "zero_grad") and number == 0:
            optimizer.zero_grad()
    return how.parameters(module)


def scheduled(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10)
    for batch in batches:
        backward(module, how, batch)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return how.parameters(module)


def zeros_kept(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    for batch in batches:
        backward(module, how, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return how.parameters(module)


def never_forgotten(strategy, how, model, batches):
    """Without zero_grad gradients add up over the steps."""
    module, optimizer = strategy(model, torch.optim.SGD, lr=0.05)
    for batch in batches:
        backward(module, how, batch)
        optimizer.step()
    return how.parameters(module)


def forgotten_by_the_module(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.SGD, lr=0.05)
    for batch in batches:
        module.zero_grad()
        backward(module, how, batch)
        optimizer.step()
    return how.parameters(module)


def by_closure(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    for batch in batches:
        def closure(batch=batch):
            optimizer.zero_grad()
            loss = module(**how.inputs(batch)).loss
            loss.backward()
            return loss
        assert optimizer.step(closure) is not None
    return how.parameters(module)


def evaluated_between(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    losses = []
    for batch in batches:
        module.eval()
        with torch.no_grad():
            losses.append(module(**batch).loss.item())
        module.train()
        backward(module, how, batch)
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            losses.append(module(**batch).loss.item())
    return {**how.parameters(module), "losses": torch.tensor(losses)}


def settings_changed(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + number)
            group["weight_decay"] = number * ADAMW["weight_decay"]
        backward(module, how, batch)
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def resumed(strategy, how, model, batches):
    """The optimizer's state goes to a new one around a new model with the old parameters."""
    fresh = copy.deepcopy(model)
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    for batch in batches[:2]:
        backward(module, how, batch)
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    module, optimizer = strategy(fresh, torch.optim.AdamW, **ADAMW)
    module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for batch in batches[2:]:
        backward(module, how, batch)
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def in_bfloat16_autocast(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.SGD, lr=0.1)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(**how.inputs(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def after_a_failed_backward(strategy, how, model, batches):
    module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
    output = module(**how.inputs(batches[0]))
    output.logits.register_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        output.loss.backward()
    optimizer.zero_grad()
    del output
    for batch in batches:
        backward(module, how, batch)
        optimizer.step()
        optimizer.zero_grad()
    return how.parameters(module)


def _raise(_):
    raise ZeroDivisionError


def checkpointed(reentrant, early_stop=True, inside=True):
    """Each layer's forward is computed again in backward."""
    from torch.utils import checkpoint as ckpt

    def wrap(layer):
        original = layer.forward
        def forward(*inputs, **named):
            return ckpt.checkpoint(original, *inputs, use_reentrant=reentrant, **named)
        layer.forward = forward

    class Outside(nn.Module):
        """Calls a layer, its hooks included, in a checkpoint."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            if isinstance(layer, nn.Linear):
                self.in_features = layer.in_features

        def forward(self, *inputs, **named):
            return ckpt.checkpoint(self.layer, *inputs, use_reentrant=reentrant, **named)

    def habit(strategy, how, model, batches):
        done = {}
        layers = model.layers if hasattr(model, "layers") else model
        module, optimizer = strategy(model, torch.optim.AdamW, **ADAMW)
        for number, layer in enumerate(layers):
            if inside and id(layer) not in done:
                wrap(layer)
            elif not inside:
                layers[number] = done.get(id(layer)) or Outside(layer)
            done[id(layer)] = layers[number]
        stop = nullcontext() if early_stop else ckpt.set_checkpoint_early_stop(False)
        inputs = [{**batch, "x": batch["x"].float().requires_grad_()} for batch in batches]
        with stop:
            for batch in inputs:
                backward(module, how, batch)
                optimizer.step()
                optimizer.zero_grad()
        return {name.replace("layer.", ""): p for name, p in how.parameters(module).items()}

    return habit


HABITS: dict[str, Callable] = {
    "SGD": with_sgd(), "SGD with momentum": with_sgd(momentum=0.9, nesterov=True),
    "accumulation": accumulation, "two forwards": one_backward_for_two_forwards,
    "clipped": clipped, "clipped after accumulation": clipped_after_accumulation,
    "clipped and skipped": clipped_and_skipped,
    "scheduled": scheduled, "zeros kept": zeros_kept, "never forgotten": never_forgotten,
    "forgotten by the module": forgotten_by_the_module, "closure": by_closure,
    "evaluated between": evaluated_between, "settings changed": settings_changed,
    "resumed": resumed, "autocast": in_bfloat16_autocast,
    "a failed backward": after_a_failed_backward,
    **{f"checkpointed, {'reentrant' if reentrant else 'non-reentrant'}, "
       f"{'inside' if inside else 'outside'}, early stop {stop}":
       checkpointed(reentrant, stop, inside)
       for reentrant in (False, True) for inside in (True, False)
       for stop in (True, False) if stop or not reentrant},
}
TOLERANCE, ROUGH = 1e-5, 5e-3  # relative above 1; bfloat16 rounds another sum on each rank


def differences(chosen):
    """On a rank: (stage, habit, architecture) -> the largest difference from one process, or the
    exception that was raised."""
    found, batches = {}, data.xy_batches(STEPS, BATCH, seed=5)
    for name, habit, architecture in chosen:
        # Of a parameter that nobody used torch's gradient is None, a reduced one is zero: both are
        # right, and the same where weights do not decay.
        ADAMW["weight_decay"] = 0.0 if "never used" in architecture else 0.1
        want = habit(plain, OneProcess(), make(architecture), batches)
        for stage, strategy in STAGES.items():
            try:
                got = habit(strategy, Sharded(), make(architecture), batches)
                found[stage, name, architecture] = max(map(_difference, want.values(),
                                                           (got[key] for key in want)))
            except RuntimeError as error:
                found[stage, name, architecture] = str(error)
    return found


def _difference(want, got):
    worst = ((got.float() - want.float()).abs().max() / want.abs().max().clamp(min=1.0)).item()
    return math.inf if math.isnan(worst) else worst


def differing(ranks, chosen):
    """What differs from one process, or was refused."""
    wrong = {}
    for found in launch(differences, chosen, ranks=ranks, quiet=True, device="cpu"):
        for (stage, habit, architecture), result in found.items():
            tolerance = ROUGH if habit == "autocast" else TOLERANCE
            if isinstance(result, str) or result > tolerance:
                wrong[stage, habit, architecture] = result
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_architecture(ranks):
    assert not differing(ranks, [("adamw", adamw, name) for name in ARCHITECTURES])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "structure"), [
    (1, "an nn.Sequential"), (2, "a layer used twice"), (3, "a layer never used"),
    (4, "an nn.Sequential")])
def test_every_habit(ranks, structure):
    wrong = differing(ranks, [(name, habit, structure) for name, habit in HABITS.items()])
    refused = {key: result for key, result in wrong.items() if " reentrant" in key[1]
               and structure == "a layer used twice" and key[0] != "zero1"}
    assert all("Checkpoint with use_reentrant=False" in result for result in refused.values())
    assert wrong == refused

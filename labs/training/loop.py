"""The plain training loop. Every strategy runs under it, unchanged."""

import functools

import torch
from torch import nn
from torch.profiler import record_function

ModuleAndOptimizer = tuple[nn.Module, torch.optim.Optimizer]  # what a strategy returns


def train(module, optimizer, batches) -> list[float]:
    """Trains one step on each batch; returns the loss of each, before its update."""
    losses = []
    for batch in batches:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def labelled_step(module, optimizer, batch) -> None:
    """Runs one step of the same loop with a label around each phase, for torch.profiler."""
    with record_function("labs::forward"):
        loss = module(**batch).loss
    with record_function("labs::backward"):
        loss.backward()
    with record_function("labs::optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def mark_gradients(model) -> None:
    """Puts a label "labs::ready NAME" into later traces where each gradient is complete. Call it
    before the model is wrapped: hooks run in the order in which they were registered."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(_mark, name))


def _mark(name, parameter):
    with record_function(f"labs::ready {name}"):
        pass

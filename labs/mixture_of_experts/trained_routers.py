"""Small mixtures that are trained on real text without balance, with an auxiliary loss and with a
bias: how uneven their counts are at each step, and what their routers say in the end."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.mixture_of_experts import balance_rules
from labs.training import data
from labs.training.mixtures import ExpertLayer, Mixture
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch

EXPERTS, K, CONTEXT, SEQUENCES = 8, 2, 64, 16
STEPS, RATE = 120, 3e-3
COEFFICIENT = 0.01  # of the auxiliary loss: Switch Transformer, section 2.2
SPEED = 0.01  # of a bias; ten times DeepSeek-V3's, because there are so few steps
NONE, LOSS, BIAS = "no balance", "auxiliary loss", "bias"
_HELD_OUT = 10_000  # seed of text that is not trained on


@dataclass(frozen=True)
class Run:
    """One training. largest: at each step the largest count divided by the mean, the mean of both
    layers. losses: of the language model alone, nats per byte. untrained, trained: logits of the
    last layer's router, (sequences, tokens, experts), on text that is not trained on; bias: that
    layer's."""

    largest: list[float]
    losses: list[float]
    untrained: torch.Tensor
    trained: torch.Tensor
    bias: torch.Tensor


class BalancedLayer(nn.Module):
    """An expert layer that is routed by `route_with_bias`; after a forward it has the `logits` of
    its router, the `chosen` experts and the `counts`."""

    def __init__(self, layer: ExpertLayer, route_with_bias: Callable):
        super().__init__()
        self.k, self.router, self.experts = layer.k, layer.router, layer.experts
        self.route = route_with_bias
        self.register_buffer("bias", torch.zeros(layer.router.out_features))

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (tokens, hidden)
        self.logits = self.router(tokens)
        weights, self.chosen = self.route(self.logits, self.bias, self.k)
        order = self.chosen.flatten().argsort(stable=True)
        self.counts = self.chosen.flatten().bincount(minlength=len(self.bias))
        outputs = self.experts(tokens[order // self.k], self.counts.tolist())
        by_token = outputs[order.argsort()].unflatten(0, weights.shape)  # (tokens, k, hidden)
        return (weights[..., None] * by_token).sum(1).view_as(x)


def train_mixtures(auxiliary_loss: Callable, route_with_bias: Callable, new_bias: Callable
                   ) -> dict[str, Run]:
    """Trains the same mixture on the same text without balance, with the loss and with the bias,
    one of them on each of three ranks, which do not communicate. By name: NONE, LOSS, BIAS."""
    names = (NONE, LOSS, BIAS)
    found = launch(_train, names, auxiliary_loss, route_with_bias, new_bias, ranks=len(names),
                   quiet=True)
    return dict(zip(names, found, strict=True))


@functools.cache
def reference_runs() -> dict[str, Run]:
    """The same by the right rules; trained once in a process, and the same each time."""
    return train_mixtures(balance_rules.auxiliary_loss, balance_rules.route_with_bias,
                          balance_rules.new_bias)


def chosen_by_routers() -> dict[str, torch.Tensor]:
    """The experts, (tokens, k), that three routers choose for the same text."""
    runs = reference_runs()

    def choose(logits, bias=None):
        logits = logits.flatten(0, 1)
        bias = torch.zeros(logits.shape[1]) if bias is None else bias
        return balance_rules.route_with_bias(logits, bias, K)[1]

    return {"untrained": choose(runs[NONE].untrained),
            "trained without balance": choose(runs[NONE].trained),
            "trained with a bias": choose(runs[BIAS].trained, runs[BIAS].bias)}


def _train(names, auxiliary_loss, route_with_bias, new_bias) -> Run:
    """On a rank: the training of the rank's number."""
    torch.set_num_threads(1)  # three ranks share the cores, and a sum has one order
    name = names[dist.get_rank()]
    model = Mixture(layers=2, hidden=32, experts=EXPERTS, ffn=32, k=K, context=CONTEXT)
    for block in model.layers:
        block.mlp = BalancedLayer(block.mlp, route_with_bias)
    model.to(devices.device())
    layers = [block.mlp for block in model.layers]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    held_out = _windows(2, _HELD_OUT).flatten(0, 1)
    untrained, largest, losses = _logits(model, held_out), [], []
    for step, batch in enumerate(_windows(STEPS, 0)):
        loss = model(batch).loss
        losses.append(loss.item())
        if name == LOSS:
            loss = loss + COEFFICIENT * sum(
                auxiliary_loss(layer.logits, layer.chosen) for layer in layers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        largest.append(sum((layer.counts.max() / layer.counts.float().mean()).item()
                           for layer in layers) / len(layers))
        if name == BIAS:
            for layer in layers:
                layer.bias = new_bias(layer.bias, layer.counts, SPEED)
        report(step=step, total=STEPS)
    return Run(largest, losses, untrained, _logits(model, held_out), layers[-1].bias.cpu())


def _windows(steps, seed) -> torch.Tensor:
    """(steps, sequences, tokens) of real text on the rank's device."""
    found = data.windows(steps * SEQUENCES, CONTEXT - 1, seed)
    return found.view(steps, SEQUENCES, CONTEXT).to(devices.device())


@torch.no_grad()
def _logits(model, windows) -> torch.Tensor:
    model(windows)
    return model.layers[-1].mlp.logits.unflatten(0, windows.shape).cpu()

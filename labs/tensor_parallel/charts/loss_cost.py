"""What the loss costs where the logits are gathered, and where they stay divided: bytes that a rank
sends, and its memory at the peak, measured on ranks beside formulas."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labs.exercises.verdicts import LAUNCH_SECONDS, shows
from labs.meters import memory
from labs.meters.traffic import Traffic
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.predictions import traffic
from labs.workers import devices
from labs.workers.launcher import launch

TOKENS, VOCABULARY, HIDDEN = 256, 8192, 16  # hidden states are small beside the logits
NAMES = ("gathered", "divided")
_SENT = {"all_reduce": traffic.all_reduce, "all_gather": traffic.all_gather,
         "reduce_scatter": traffic.reduce_scatter}
_ALIVE = 3  # fp32 numbers for each logit at the peak: the log-softmax or exp, and two gradients


@dataclass(frozen=True)
class LossCost:
    """Of one rank and one step, in bytes. sent: what the loss's collectives send. peak: the highest
    moment of forward and backward, without parameters and their gradients."""

    sent: float
    peak: float


@shows("7.5")
def show_loss_cost(vocabulary_parallel_cross_entropy: Callable, ranks: int = 4) -> Picture:
    """Draws both costs of the loss with gathered logits and with the student's function, on ranks
    of this machine; a note has what the formulas give for Llama-3's vocabulary."""
    functions = {"gathered": gathered_cross_entropy, "divided": vocabulary_parallel_cross_entropy}
    measured = {name: launch(_measure, function, ranks=ranks, quiet=True,
                             timeout=LAUNCH_SECONDS)[0] for name, function in functions.items()}
    predicted = {name: predict_loss_cost(name, TOKENS, VOCABULARY, ranks) for name in NAMES}
    panels = [Panel("a rank sends", "MB", [measured[name].sent for name in NAMES], 1e6,
                    [predicted[name].sent for name in NAMES],
                    colour=palette.PHASES["communication"]),
              Panel("memory at the peak", "MB", [measured[name].peak for name in NAMES], 1e6,
                    [predicted[name].peak for name in NAMES],
                    colour=palette.MEMORY["activations"])]
    rows = ["logits\ngathered", "logits\ndivided"]
    return side_by_side(rows, panels, note=_of_llama_3(ranks))


def predict_loss_cost(name: str, tokens: int, vocabulary: int, ranks: int) -> LossCost:
    """By formula: gathered logits send (t-1)/t · b·s·v numbers, divided ones an all-reduce of three
    for each token; at the peak `_ALIVE` fp32 numbers for each logit that the loss sees are alive.
    """
    logits = tokens * vocabulary
    sent = (traffic.all_gather(4 * logits, ranks) if name == "gathered"
            else traffic.all_reduce(3 * 4 * tokens, ranks))
    return LossCost(sent, 4 * _ALIVE * logits / (1 if name == "gathered" else ranks))


def gathered_cross_entropy(logits, targets, group) -> torch.Tensor:
    """The needless way: every rank gathers the logits of all, and computes the loss of them."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[dist.get_rank(group)] = logits
    return F.cross_entropy(torch.cat(parts, -1).flatten(0, -2), targets.flatten())


class _Head(nn.Module):
    """A column-parallel head and its loss; forward(hidden, targets) returns the loss."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.head = nn.Linear(HIDDEN, VOCABULARY // dist.get_world_size(), bias=False,
                              device=devices.device())
        self.function = function

    def forward(self, hidden, targets):
        return SimpleNamespace(loss=self.function(self.head(hidden), targets, dist.group.WORLD))


def _measure(function) -> LossCost:
    """On a rank: what function(logits, targets, group) sends, and the peak of a step with it."""
    torch.manual_seed(0)
    batch = {"hidden": torch.randn(TOKENS, HIDDEN, device=devices.device()),
             "targets": torch.randint(VOCABULARY, (TOKENS,), device=devices.device())}
    with Traffic() as sent:
        _Head(function)(**batch).loss.backward()

    def build():
        module = _Head(function)
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    held = memory.record(build, [batch] * 2).step_peak
    return LossCost(sum(_SENT[call.kind](call.bytes, call.ranks) for call in sent.calls),
                    held.total - held.parameters - held.gradients)


def _of_llama_3(ranks: int, tokens: int = 8192, vocabulary: int = 128_256) -> str:
    gathered, divided = (predict_loss_cost(name, tokens, vocabulary, ranks) for name in NAMES)
    return (f"By the same formulas, {vocabulary:,} rows of Llama-3, {tokens:,} tokens, {ranks} "
            f"ranks:\ngathered {gathered.sent / 1e9:.1f} GB sent, {gathered.peak / 1e9:.1f} GB at "
            f"the peak; divided {divided.sent / 1e6:.2f} MB and {divided.peak / 1e9:.1f} GB")

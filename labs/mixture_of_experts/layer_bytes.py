"""Exercise 9.9: the bytes that a layer of experts receives, of parameters and of tokens."""

import random
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.lines import Line2D
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labs.checks.generator import new_generator
from labs.checks.numbers import Cause, judge_number, require_numbers, require_signature
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.traffic import CollectiveCall, Traffic
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions.memory.parameters import Shape, experts_size
from labs.predictions.plans.models import shape_named
from labs.training.known_models import MIXTURES
from labs.training.mixtures import Experts
from labs.workers import devices
from labs.workers.launcher import launch

_NAMES = ("of parameters and gradients", "of rows")
GB = 1e9


class Layer(NamedTuple):
    """The arguments of `layer_bytes`: of all experts of a layer, and of a micro-batch and a plan.
    tokens: of one rank."""

    parameters: int
    hidden: int
    k: int
    tokens: int
    ranks: int
    expert: int

    def __str__(self):
        return (f"{self.parameters:,} parameters, hidden {self.hidden:,}, k = {self.k}, "
                f"{self.tokens:,} tokens, {self.ranks} ranks, EP {self.expert}")


def received(layer: Layer) -> tuple[float, float]:
    """Bytes that a rank receives for one layer and micro-batch: (of parameters and gradients, of
    rows). A ring's all-gather and reduce-scatter over R ranks receive (R − 1)/R of what they
    gather or reduce (Rajbhandari et al., "ZeRO", SC 2020, section 7); an all-to-all receives
    (N − 1)/N of its rows, if they are spread evenly."""
    replicas = layer.ranks // layer.expert
    rows = 2 * layer.k * layer.tokens * layer.hidden
    return (3 * 2 * layer.parameters / layer.expert * (replicas - 1) / replicas,
            4 * rows * (layer.expert - 1) / layer.expert)


@check("9.9")
def check_layer_bytes(layer_bytes: Callable):
    """layer_bytes(parameters, hidden, k, tokens, ranks, expert) -> (bytes of parameters and
    gradients, bytes of rows) for random layers, and three models with all sizes of groups."""
    require_signature(layer_bytes, Layer._fields)
    cases = _cases(new_generator())
    for name, layer in cases:
        # A known mistake shows in the first case: what is right there and wrong later is not one.
        _judge(layer_bytes, name, layer, is_first=layer is cases[0][1])
    return (f"exact for layers of random sizes, and for {', '.join(MIXTURES)} on 64 ranks in "
            "groups of 1 to 64")


def _cases(rng: random.Random) -> list[tuple[str, Layer]]:
    """(name, Layer). The first have replicas and groups of different sizes, so that a mistake's
    number is no other's."""
    drawn = [Layer(expert * rng.randint(100, 10**6), rng.randint(50, 9000), rng.choice((3, 5, 6)),
                   rng.randint(1, 10**5), expert * replicas, expert)
             for expert, replicas in ((8, 5), (8, 2), (2, 32), (rng.randint(2, 9),
                                                               rng.randint(2, 9)),
                                      (1, rng.randint(2, 99)), (rng.randint(2, 99), 1), (1, 1))]
    drawn.append(drawn[0]._replace(k=1, tokens=0))
    known = [(name, _layer(shape_named(name), rng.randint(1, 10**5), 64, 2**power))
             for name in MIXTURES for power in range(7)
             if shape_named(name).experts % 2**power == 0]
    return [*(("a random layer", layer) for layer in drawn), *known]


def _layer(shape: Shape, tokens: int, ranks: int, expert: int) -> Layer:
    return Layer(experts_size(shape), shape.hidden, shape.active_experts, tokens, ranks, expert)


def _judge(layer_bytes, name, layer, is_first) -> None:
    found = require_numbers(layer_bytes(*layer), _NAMES, f"{name}: layer_bytes")
    want = received(layer)
    if [*found] == [*want][::-1] and want[0] != want[1]:
        raise Wrong(f"{name}: the bytes of rows come first",
                    "Return those of parameters and gradients, then those of rows.", code="swapped")
    causes = ((_parameter_causes(layer), _row_causes(layer)) if is_first else
              ([], [_always_sent(layer)] if layer.expert == 1 else []))
    hints = ("FSDP gathers a rank's experts in forward and in backward and reduce-scatters their "
             "gradients, over the ranks with the same experts.",
             "Each token is sent to k experts. There are four all-to-alls: to the experts and "
             "back, and the gradients of both.")
    for got, right, of, what, hint in zip(found, want, causes, _NAMES, hints, strict=True):
        # Invariant: exact for any sizes, so no table of known models passes.
        judge_number(got, right, of, f"{name} ({layer}): bytes {what}", "", hint)


def _parameter_causes(layer) -> list[Cause]:
    ranks, expert = layer.ranks, layer.expert
    replicas, want = ranks // expert, received(layer)[0]
    mine, share = 2 * layer.parameters / expert, (replicas - 1) / replicas
    over = "Of its experts a rank has 1/replicas already, and receives the rest."
    return [
        Cause("own_shard_received", 3 * mine, "its own shard is counted as received", over),
        Cause("gathered_once", 2 * mine * share, "that is two collectives",
              "Forward gathers, backward gathers again and reduce-scatters."),
        Cause("no_gradients", mine * share, "that is one collective",
              "Forward gathers, backward gathers again and reduce-scatters."),
        Cause("gradients_all_reduced", 4 * mine * share, "that is four collectives",
              "A reduce-scatter receives half of what an all-reduce does."),
        Cause("all_experts_gathered", expert * want, "all experts of the layer are gathered",
              "A rank gathers only the experts that it computes with: 1/EP."),
        Cause("sharded_over_all_ranks", 3 * mine * (ranks - 1) / ranks,
              "experts are sharded over all ranks",
              "Only the ranks // expert replicas have the same experts."),
        Cause("shard_received", 3 * mine / replicas, "that is what a rank keeps", over),
        Cause("sharded_over_experts", 3 * mine * (expert - 1) / expert,
              "experts are sharded over the group that divides them",
              "The ranks of a group have different experts: FSDP gathers over the replicas."),
        Cause("divided_by_ranks", want * expert / ranks, "the experts are divided by all ranks",
              "A rank computes with 1/EP of the experts."),
        Cause("four_bytes", 2 * want, "numbers have 4 bytes there", "All numbers have 2 bytes."),
        Cause("elements", want / 2, "those are numbers, not bytes", "A number has 2 bytes."),
        Cause("all_ranks_together", ranks * want, "that is what all ranks receive",
              "Return the bytes of one rank."),
        Cause("from_each_replica", want * replicas, "each replica is asked for all of it",
              "A shard comes from one rank only.")]


def _row_causes(layer) -> list[Cause]:
    ranks, expert, k = layer.ranks, layer.expert, layer.k
    want = received(layer)[1]
    every = 4 * 2 * k * layer.tokens * layer.hidden
    return [
        Cause("own_rows_received", every, "rows for the rank's own experts are counted",
              "1/EP of the rows stay where they are, if they are spread evenly."),
        Cause("one_all_to_all", want / 4, "that is one all-to-all",
              "Rows go to the experts and back, and so do their gradients."),
        Cause("only_forward", want / 2, "those are two all-to-alls",
              "Backward sends gradients the same ways."),
        Cause("one_copy", want / k, "each token is sent once",
              "A token has k copies, one for each of its experts."),
        Cause("over_all_ranks", every * (ranks - 1) / ranks, "rows are sent to all ranks",
              "An all-to-all is among the EP ranks that divide the experts."),
        Cause("over_replicas", every * (1 - expert / ranks), "rows are sent to replicas",
              "An all-to-all is among the EP ranks that divide the experts."),
        Cause("share_that_stays", every / expert, "those are the rows that stay",
              "1/EP of the rows stay where they are."),
        Cause("other_ranks_too", want * expert, "all ranks' rows are counted",
              "Each rank sends as much as it receives: its own tokens' rows."),
        Cause("four_bytes", 2 * want, "numbers have 4 bytes there", "All numbers have 2 bytes."),
        Cause("elements", want / 2, "those are numbers, not bytes", "A number has 2 bytes.")]


def _always_sent(layer) -> Cause:
    return Cause("always_sent", 8 * layer.k * layer.tokens * layer.hidden,
                 "without expert parallelism no row is sent", "Multiply by (EP − 1)/EP.")


# --- measured on real ranks -----------------------------------------------------------------------

RANKS, _MEASURED = 8, Layer(16 * 3 * 24 * 20, 24, 2, 64, 8, 1)  # 16 experts of width 20


class AllToAll(torch.autograd.Function):
    """An all-to-all of equal parts, and of their gradients back."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return _exchanged(rows, group)

    @staticmethod
    def backward(ctx, gradient):
        return _exchanged(gradient, ctx.group), None


def _exchanged(rows, group) -> torch.Tensor:
    arrived = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, rows.contiguous(), group=group)
    return arrived


class _EvenLayer(nn.Module):
    """A layer whose tokens are spread evenly: the i-th of the copies is for expert i mod 16."""

    def __init__(self, experts, mesh):
        super().__init__()
        hidden, ffn = _MEASURED.hidden, _MEASURED.parameters // (3 * _MEASURED.hidden * experts)
        self.group = mesh["expert"].get_group()
        self.own = experts // mesh["expert"].size()
        self.experts = fully_shard(Experts(self.own, hidden, ffn), mesh=mesh["replicate"],
                                   reshard_after_forward=True)

    def forward(self, tokens):
        parts = dist.get_world_size(self.group)
        rows = tokens.repeat_interleave(_MEASURED.k, dim=0)
        # (copies of an expert, ranks, experts of a rank, hidden) -> by rank
        rows = rows.unflatten(0, (-1, parts, self.own)).transpose(0, 1)
        if parts > 1:
            rows = AllToAll.apply(rows, self.group)
        by_expert = rows.permute(2, 0, 1, 3)
        outputs = self.experts(by_expert.flatten(0, 2), [by_expert[0, ..., 0].numel()] * self.own)
        outputs = outputs.view(by_expert.shape).permute(1, 2, 0, 3)
        return AllToAll.apply(outputs, self.group) if parts > 1 else outputs


@dataclass(frozen=True)
class Received:
    """Bytes that a rank received of a layer, in 4-byte numbers."""

    parameters: float
    rows: float


def measured_layer(ranks: int = RANKS) -> dict[int, Received]:
    """Expert-parallel size -> bytes that rank 0 receives of a small layer, forward and backward:
    real FSDP2 over the replicas, and real all-to-alls."""
    with devices.send_recv_device(ranks):  # the bytes are the same on a CPU
        return launch(_received_by_size, ranks=ranks, quiet=True)[0]


def _received_by_size() -> dict[int, Received]:
    ranks, found = dist.get_world_size(), {}
    for expert in (2**power for power in range(ranks.bit_length()) if ranks % 2**power == 0):
        mesh = init_device_mesh(devices.device().type, (ranks // expert, expert),
                                mesh_dim_names=("replicate", "expert"))
        layer = _EvenLayer(16, mesh).to(devices.device())
        tokens = torch.randn(_MEASURED.tokens, _MEASURED.hidden, device=devices.device(),
                             requires_grad=True)
        with Traffic() as traffic:
            layer(tokens).sum().backward()
        found[expert] = Received(sum(map(_from_others, traffic.of("all_gather", "reduce_scatter"))),
                                 sum(map(_from_others, traffic.of("all_to_all"))))
    return found


def _from_others(call: CollectiveCall) -> float:
    """Bytes that come from other ranks, of what a collective gathers, reduces or exchanges."""
    return call.bytes * (call.ranks - 1) / call.ranks


@shows("9.9")
def show_measured_bytes(layer_bytes: Callable) -> Table:
    """Returns a table for a small layer on 8 ranks: bytes that a rank received under real FSDP2 and
    in real all-to-alls, beside the student's."""
    rows = []
    for expert, found in measured_layer().items():
        said = require_numbers(layer_bytes(*_MEASURED._replace(expert=expert)), _NAMES,
                               f"EP {expert}: layer_bytes")
        # measured in 4 bytes, said for 2
        rows.append((f"EP {expert}", *(f"{number:,.0f}" for pair in zip(
            astuple(found), said, strict=True) for number in (pair[0], 2 * pair[1]))))
    return Table(f"bytes that a rank of {RANKS} receives, in 4-byte numbers",
                 ("", "parameters, measured", "predicted", "rows, measured", "predicted"), rows,
                 note=f"A layer of 16 experts, hidden {_MEASURED.hidden}, k = {_MEASURED.k}, "
                      f"{_MEASURED.tokens} tokens a rank, spread evenly. Predicted: twice what "
                      "your function returns for 2-byte numbers.")


# --- the picture ----------------------------------------------------------------------------------

_SIZES = {1: (palette.RUNS[2], "-"), 8: (palette.RUNS[1], "--"), 64: (palette.RUNS[3], "-.")}
_TOKENS = [2**power for power in range(9, 20)]
MICRO_BATCH = 8192  # tokens of a rank that are usual: one or two sequences


@shows("9.9")
def show_layer_bytes(layer_bytes: Callable) -> Picture:
    """Draws the bytes of a layer over the tokens of a rank, for three models on 64 ranks in groups
    of 1, 8 and 64, and where the lines cross."""
    figure, axes = canvas(WIDTH, 3.9 + marks.HEADLINE, ncols=len(MIXTURES), sharey=True)
    words, crossings = [], {}
    for ax, name in zip(axes, MIXTURES, strict=True):
        shape = shape_named(name)
        lines = {size: [_total(layer_bytes, _layer(shape, tokens, 64, size)) / GB
                        for tokens in _TOKENS] for size in _SIZES if shape.experts % size == 0}
        for size, line in lines.items():
            colour, style = _SIZES[size]
            ax.plot(_TOKENS, line, color=colour, linestyle=style, linewidth=2)
        crossings[name] = _crossing(lines[1], lines[8])
        _mark_crossing(ax, crossings[name], lines[1][0])
        at = [f"EP {size} {_total(layer_bytes, _layer(shape, MICRO_BATCH, 64, size)) / GB:.3g} GB"
              for size in lines]
        words.append(f"{name}: {', '.join(at)} with {MICRO_BATCH:,} tokens a rank; equal at "
                     f"{_rounded(crossings[name])} tokens")
        ax.set_title(name, fontsize=10, loc="left", color=palette.INK)
        ax.set(xscale="log", yscale="log", xlabel="tokens of a rank and micro-batch")
        for axis in (ax.xaxis, ax.yaxis):
            marks.plain_numbers(axis)
        ax.axvline(MICRO_BATCH, color=palette.MUTED, linestyle=(0, (1, 2)), linewidth=1.1)
    axes[0].set_ylabel("GB received for one layer")
    fewest, most = min(crossings.values()), max(crossings.values())
    is_less = f"With {MICRO_BATCH:,} tokens a rank, sending is less: " * (fewest > MICRO_BATCH)
    lesson = f"{is_less}the lines cross at {_rounded(fewest)} to {_rounded(most)} tokens"
    marks.headline(figure, lesson)
    marks.legend_above(figure, [
        *(Line2D([], [], color=colour, linestyle=style, linewidth=2,
                 label="FSDP alone" if size == 1 else f"EP {size}")
          for size, (colour, style) in _SIZES.items()),
        Line2D([], [], color=palette.INK, marker="o", linestyle="none", label="equal"),
        Line2D([], [], color=palette.MUTED, linestyle=(0, (1, 2)),
               label=f"{MICRO_BATCH:,} tokens")])
    return Picture(figure, "\n".join([lesson, *words]), data=crossings)


def _total(layer_bytes, layer) -> float:
    return sum(require_numbers(layer_bytes(*layer), _NAMES, "layer_bytes"))


def _crossing(gathered, sent) -> float:
    """Tokens at which two lines over _TOKENS meet: straight lines between their ends."""
    (first, last), (low, high) = ((line[0], line[-1]) for line in (gathered, sent))
    slope = ((high - low) - (last - first)) / (_TOKENS[-1] - _TOKENS[0])
    if slope <= 0:
        raise Wrong("the bytes of EP 8 do not grow with the tokens",
                    "Rows are sent for each token.", code="not_drawn")
    return _TOKENS[0] + (first - low) / slope


def _mark_crossing(ax, tokens, gigabytes) -> None:
    ax.plot(tokens, gigabytes, "o", color=palette.INK, zorder=5)
    ax.annotate(_rounded(tokens), (tokens, gigabytes), xytext=(4, -16), ha="left",
                textcoords="offset points", color=palette.INK, **marks.ON_PAPER)


def _rounded(tokens) -> str:
    return f"{round(tokens, -3):,.0f}"

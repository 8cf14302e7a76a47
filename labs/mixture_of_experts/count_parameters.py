"""Exercise 9.1: all parameters of a mixture, and those that one token uses."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Cause,
    judge_number,
    require_numbers,
    require_signature,
)
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import marks, palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.predictions.memory.parameters import active_count, count
from labs.predictions.memory.recipes import recipe_of
from labs.predictions.plans.models import shape_named
from labs.predictions.step_time.efficiency import attention_flops, six_nd
from labs.training import hf_configs
from labs.training.known_models import MIXTURES

DENSE = "Llama-3-70B"  # beside which the mixtures are drawn
SEQUENCE = 4096  # tokens, of the FLOPs that 6 for each parameter leaves out
_NUMBERS = ("all parameters", "active parameters")
_CHOSEN = "A token uses k of the experts: this share of all parameters with `.experts.` in their " \
          "names, and all parameters without it."


@functools.cache  # with transformers 4, DeepSeek-V3's 45,000 modules take a minute
def on_meta(name: str) -> nn.Module:
    """The model with this name, with shapes and no memory: the same one at each call. Raises
    ValueError where none has this name."""
    return hf_configs.on_meta(hf_configs.config(name))


@dataclass(frozen=True)
class Case:
    """A model of which k of `experts` experts are chosen in each layer, and what is known of it, in
    parameters. chosen: of the experts that the router chooses among, of all layers; layers: those
    with experts; buffers, frozen, tied: of what is no parameter, has no gradient, or has two
    names."""

    name: str
    model: nn.Module
    experts: int
    k: int
    total: int
    chosen: int
    shared: int
    router: int
    layers: int
    buffers: int
    frozen: int = 0
    tied: int = 0

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.chosen + self.chosen * self.k // self.experts


@check("9.1")
def check_count_parameters(count_parameters: Callable):
    """count_parameters(model, experts, k) -> (all parameters, those that one token uses), exact for
    three published models, whose numbers the closed form gives, and for small ones of random
    sizes."""
    require_signature(count_parameters, ("model", "experts", "k"))
    rng = new_generator()
    for case in (*map(_published, MIXTURES), *_random_cases(rng)):
        _judge(count_parameters, case)
    return (f"exact for {', '.join(MIXTURES)}, and for small models of random sizes, with and "
            "without shared experts and dense layers")


def _judge(count_parameters, case) -> None:
    # Invariant: both numbers are exact. The total comes first: an active count that is too large
    # because of what is no parameter should be named as that.
    found = require_numbers(count_parameters(case.model, case.experts, case.k), _NUMBERS,
                            f"{case.name}: count_parameters")
    if [*found] == [case.active, case.total] != [case.total, case.active]:
        raise Wrong(f"{case.name}: the active parameters come first",
                    "Return all parameters, then the active ones.", code="swapped")
    for got, want, causes, name in zip(found, (case.total, case.active),
                                       (_total_causes(case), _active_causes(case)), _NUMBERS,
                                       strict=True):
        judge_number(got, want, causes, f"{case.name}, {case.k} of {case.experts} experts: {name}",
                     "parameters", _CHOSEN, rel_tol=1e-13)


def _total_causes(case) -> list[Cause]:
    tensors = len(list(case.model.parameters()))
    # state_dict() has both names of a parameter, and of buffers those that are saved
    saved = sum(tensor.numel() for tensor in case.model.state_dict().values())
    return [
        Cause("tensors_counted", tensors, "those are tensors",
              "parameter.numel() is the number of elements."),
        Cause("buffers_counted", case.total + case.buffers, "buffers are counted",
              "model.named_parameters() leaves out what is not trained by an optimizer."),
        Cause("tied_counted_twice", case.total + case.tied,
              "a parameter with two names is counted twice",
              "Head and embedding are one tensor here. model.named_parameters() has it once."),
        *[Cause("buffers_counted", saved, "buffers are counted, and what has two names twice",
                "model.named_parameters() has each parameter once, and no buffer.")] * (
                    saved - case.total not in (0, case.tied)),
        Cause("frozen_left_out", case.total - case.frozen, "frozen parameters are left out",
              "A parameter without a gradient is one all the same."),
        Cause("experts_left_out", case.total - case.chosen, "the experts are left out",
              "All experts count, whether a token uses them or not."),
        Cause("only_active", case.active, "those are the active parameters",
              "Return all parameters, then the active ones.")]


def _active_causes(case) -> list[Cause]:
    experts, k, total, chosen = case.experts, case.k, case.total, case.chosen
    rest, used = total - chosen, chosen * k // experts
    each = (parameter.numel() for name, parameter in case.model.named_parameters()
            if ".experts." in name)
    rounded = sum(size * k // experts for size in each)
    return [
        Cause("all_active", total, "all experts are counted", _CHOSEN),
        Cause("share_of_everything", total * k // experts,
              "the share k / experts is taken of everything",
              "Attention, embedding, router and norms are used by every token."),
        Cause("share_of_everything", total * k / experts,
              "the share k / experts is taken of everything",
              "Attention, embedding, router and norms are used by every token."),
        Cause("shared_as_chosen", rest - case.shared + (chosen + case.shared) * k // experts,
              "shared experts are counted like those that the router chooses",
              "Their names have `.shared_experts.`, which contains `experts` too."),
        Cause("shared_as_chosen", rest - case.shared + (chosen + case.shared) * k / experts,
              "shared experts are counted like those that the router chooses",
              "Their names have `.shared_experts.`, which contains `experts` too."),
        Cause("shared_left_out", rest - case.shared + used, "shared experts are left out",
              "Every token uses them."),
        Cause("divided_first", rest + chosen * (k // experts),
              "no expert is counted that the router chooses",
              "A token uses k of them. (k // experts is 0: multiply by k first, then divide.)"),
        Cause("one_expert", rest + chosen // experts, "one expert of each layer is counted",
              "A token uses k of them."),
        Cause("one_layer", rest + used // case.layers,
              "the experts of one layer are counted", "Each layer has experts of its own."),
        Cause("twice", rest + 2 * used, "the chosen experts are counted twice",
              "Parameters of experts are no part of the rest."),
        Cause("experts_not_chosen", total - used, "the experts that are not chosen are counted",
              _CHOSEN),
        Cause("only_experts", used, "only experts are counted", "A token uses all else too."),
        Cause("router_left_out", rest - case.router + used, "the router is left out",
              "It computes a logit for every expert, so a token uses all of it."),
        Cause("router_like_experts", rest - case.router + (chosen + case.router) * k // experts,
              "the router is counted like the experts",
              "It computes a logit for every expert, so a token uses all of it."),
        Cause("rounded_each", rest + rounded, "each parameter is rounded by itself",
              "Where experts have parameters of their own, k / experts of one is no whole number: "
              "add them up first.")]


@functools.cache
def _published(name) -> Case:
    """A published model. Its numbers are those of the closed form, which tests hold against the
    published ones."""
    shape, model = shape_named(name), on_meta(name)
    layers = shape.layers - len(shape.dense_blocks)
    # of experts that are not used; so all are (experts / (experts - k)) times as many
    unused = count(shape) - active_count(shape)
    return Case(name, model, shape.experts, shape.active_experts, count(shape),
                unused * shape.experts // (shape.experts - shape.active_experts),
                _size(model, ".shared_experts."), layers * shape.router, layers,
                sum(buffer.numel() for buffer in model.buffers()))


def _size(model, part) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if part in name)


def _random_cases(rng: random.Random) -> list[Case]:
    """Small models; of the first a token uses one expert, of the second all of them."""
    experts = [rng.randint(5, 12) for _ in range(6)]
    chosen = [1, experts[1], *(rng.randint(2, each - 2) for each in experts[2:])]
    shared, stacked = rng.sample((0, 1, 2), 3) * 2, rng.sample((True, False), 2) * 3
    return [_random_case(rng, *each) for each in zip(experts, chosen, shared, stacked, strict=True)]


def _random_case(rng, experts, k, shared, stacked) -> Case:
    hidden, ffn = 2 * rng.randint(3, 20) + 1, 2 * rng.randint(3, 20) + 1
    dense, layers = rng.randint(0, 2), rng.randint(2, 4)
    with torch.device("meta"):
        model = _SmallMixture(hidden, ffn, experts, shared, stacked, dense, layers)
    expert = 3 * hidden * ffn
    own = {"chosen": layers * experts * expert, "shared": layers * shared * expert,
           "router": layers * hidden * experts, "tied": hidden * _WORDS,
           "buffers": layers * experts, "frozen": hidden}
    total = (own["tied"] + hidden + own["router"] + own["chosen"] + own["shared"]
             + (dense + layers) * (4 * hidden ** 2 + hidden) + dense * expert)
    return Case("a small model", model, experts, k, total, layers=layers, **own)


_WORDS = 29


class _SmallMixture(nn.Module):
    """A decoder's parameters, named as transformers names them. stacked: all experts of a layer in
    one tensor, as in transformers 5; else a module for each, as in 4. Head and embedding are tied,
    and the last norm is frozen."""

    def __init__(self, hidden, ffn, experts, shared, stacked, dense, layers):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(_WORDS, hidden), nn.RMSNorm(hidden)
        self.norm.requires_grad_(False)
        self.layers = nn.ModuleList()
        for number in range(dense + layers):
            layer = nn.Module()
            layer.norm, layer.attention = nn.RMSNorm(hidden), nn.ModuleList(
                nn.Linear(hidden, hidden, bias=False) for _ in range(4))
            layer.mlp = _mlp(hidden, ffn) if number < dense else nn.Module()
            if number >= dense:
                layer.mlp.gate = nn.Linear(hidden, experts, bias=False)
                layer.mlp.gate.register_buffer("bias_of_choice", torch.empty(experts))
                if stacked:
                    layer.mlp.experts = nn.Module()
                    layer.mlp.experts.gate_up_proj = nn.Parameter(
                        torch.empty(experts, 2 * ffn, hidden))
                    layer.mlp.experts.down_proj = nn.Parameter(torch.empty(experts, hidden, ffn))
                else:
                    layer.mlp.experts = nn.ModuleList(_mlp(hidden, ffn) for _ in range(experts))
                if shared:
                    layer.mlp.shared_experts = _mlp(hidden, shared * ffn)
            self.layers.append(layer)
        self.lm_head = nn.Linear(hidden, _WORDS, bias=False)
        self.lm_head.weight = self.embedding.weight


def _mlp(hidden, ffn) -> nn.Module:
    found = nn.Module()
    found.gate_proj, found.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
    found.down_proj = nn.Linear(ffn, hidden, bias=False)
    return found


@shows("9.1")
def show_parameters(count_parameters: Callable) -> Picture:
    """Draws all parameters of three mixtures and a dense model, the active ones, the states of
    training, and the FLOPs of a token."""
    names = (*MIXTURES, DENSE)
    shapes = {name: shape_named(name) for name in names}
    # a dense model has one MLP in a layer, which every token uses
    found = [require_numbers(count_parameters(on_meta(name), shape.experts or 1,
                                              shape.active_experts or 1), _NUMBERS, name)
             for name, shape in shapes.items()]
    totals, active = ([row[column] for row in found] for column in (0, 1))
    states = recipe_of("bf16 policy")
    each = states.parameters + states.gradients + states.optimizer_state
    panels = [Panel("all parameters", "billions", totals, 1e9,
                    colour=palette.MEMORY["parameters"]),
              Panel("active ones", "billions", active, 1e9, colour=palette.PLAIN),
              Panel("states of training", "TB", [each * total for total in totals], 1e12,
                    colour=palette.MEMORY["optimizer state"]),
              Panel("FLOPs of a token", "billions", [six_nd(each, 1) for each in active], 1e9,
                    colour=palette.STEP["computing"])]
    largest = names.index("DeepSeek-V3")
    share = 100 * active[largest] / totals[largest]
    return side_by_side(
        names, panels, note=_left_out(shapes["DeepSeek-V3"], each),
        lesson=f"DeepSeek-V3 computes with {share:.1f} % of its parameters, and all of them need "
               "memory", answer=marks.answered(guessed("9.1"), share, "%"))


def _left_out(shape, each) -> str:
    """What the picture's numbers are, and what they leave out, of DeepSeek-V3."""
    products = six_nd(active_count(shape), 1)
    attention = attention_flops(shape.layers, shape.query, SEQUENCE) / products
    words = six_nd(shape.vocabulary * shape.hidden, 1) / products
    return (f"States: {each:g} bytes a parameter, for it, its gradient and AdamW. FLOPs: 6 for "
            "each active parameter, forward and backward. Of DeepSeek-V3 that leaves out "
            f"attention's scores, {100 * attention:.0f} % more with {SEQUENCE:,} tokens (half of "
            f"it if causal), and counts the embedding, {100 * words:.1f} %, which is looked up "
            "and not multiplied.")

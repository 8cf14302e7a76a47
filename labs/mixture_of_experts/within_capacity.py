"""Exercise 9.7: which copies an expert with a capacity takes, and how many are dropped."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from labs.checks.generator import new_generator
from labs.checks.inputs import UnchangedInputs, require_dense
from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.meters.metrics import Metric
from labs.mixture_of_experts.other_rules import OtherRule, rule_of
from labs.mixture_of_experts.trained_routers import EXPERTS, chosen_by_routers
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas

NAMES = ("chosen", "experts", "capacity")
FACTORS = [0.5 + 0.25 * step for step in range(15)]  # 0.5 to 4


@dataclass(frozen=True)
class Case:
    """chosen: (tokens, k), the experts of each token, which differ."""

    name: str
    chosen: torch.Tensor
    experts: int
    capacity: int


def right(case: Case) -> torch.Tensor:
    """bool (tokens, k): the first copies of each expert, copy after copy as the rule says it."""
    taken, kept = [0] * case.experts, []
    for expert in case.chosen.flatten().tolist():
        kept.append(taken[expert] < case.capacity)
        taken[expert] += 1
    return torch.tensor(kept, dtype=torch.bool).view(case.chosen.shape)


def _places(flat, experts) -> torch.Tensor:
    """How many copies of the same expert come before each of these."""
    one_hot = F.one_hot(flat, experts)
    return ((one_hot.cumsum(0) - one_hot) * one_hot).sum(1)


def _with_capacity(change):
    return lambda case: right(Case("", case.chosen, case.experts, change(case)))


def _by_choice(case) -> torch.Tensor:
    flat = case.chosen.t().flatten()
    return (_places(flat, case.experts) < case.capacity).view(case.chosen.t().shape).t()


def _each_choice_alone(case) -> torch.Tensor:
    return torch.stack([_places(column, case.experts) < case.capacity
                        for column in case.chosen.unbind(1)], dim=1)


def _the_last(case) -> torch.Tensor:
    return (_places(case.chosen.flatten().flip(0), case.experts)
            < case.capacity).flip(0).view(case.chosen.shape)


def _all_together(case, most) -> torch.Tensor:
    return (torch.arange(case.chosen.numel()) < most).view(case.chosen.shape)


def _along_experts(case) -> torch.Tensor:
    one_hot = F.one_hot(case.chosen.flatten(), case.experts)
    return (((one_hot.cumsum(1) - one_hot) * one_hot).sum(1) < case.capacity).view(
        case.chosen.shape)


def _dropped_experts(case) -> torch.Tensor:
    counts = case.chosen.flatten().bincount(minlength=case.experts)
    return (counts <= case.capacity)[case.chosen]


_COUNT = "For each copy, count the copies of the same expert that come before it."
RULES = [
    OtherRule("keeps_all", lambda case: torch.ones_like(case.chosen, dtype=torch.bool),
              "it keeps every copy", _COUNT),
    OtherRule("drops_all", lambda case: torch.zeros_like(case.chosen, dtype=torch.bool),
              "it drops every copy", _COUNT),
    OtherRule("inverted", lambda case: ~right(case), "it is True where a copy is dropped",
              "True means: kept."),
    OtherRule("one_too_many", _with_capacity(lambda case: case.capacity + 1),
              "an expert keeps one copy too many",
              "The first copy has none before it: a copy is kept if fewer than `capacity` come "
              "before it."),
    OtherRule("one_too_few", _with_capacity(lambda case: case.capacity - 1),
              "an expert keeps one copy too few",
              "Is the copy itself counted among those before it?"),
    OtherRule("by_choice", _by_choice,
              "all first choices come before any second choice, as in GShard: that rule has been "
              "published too, but here the order is that of the tokens",
              "Flatten `chosen` so that the copies of a token stay together."),
    OtherRule("each_choice_alone", _each_choice_alone,
              "first and second choices are counted apart: an expert may get k times its capacity",
              "An expert has one capacity, for all its copies."),
    OtherRule("drops_the_token", lambda case: right(case).all(1, keepdim=True).expand(
        case.chosen.shape), "a token that loses one copy loses all of them",
        "Each copy is judged by its own expert."),
    OtherRule("keeps_the_token", lambda case: right(case).any(1, keepdim=True).expand(
        case.chosen.shape), "a token that keeps one copy keeps all of them",
        "Each copy is judged by its own expert."),
    OtherRule("keeps_the_last", _the_last, "an expert keeps its last copies, not its first",
              "Count those that come before."),
    OtherRule("experts_together", lambda case: _all_together(case, case.capacity),
              "the capacity is one for all experts together", _COUNT),
    OtherRule("experts_together", lambda case: _all_together(
        case, case.capacity * case.experts), "the capacities of all experts are added up",
        "An expert cannot use what another leaves free."),
    OtherRule("along_experts", _along_experts,
              "the copies are counted over the experts, not over the copies",
              "cumsum(0) adds up over the first dimension, the copies."),
    OtherRule("drops_the_expert", _dropped_experts,
              "an expert with more copies than its capacity keeps none",
              "It keeps the first ones.")]


@check("9.7")
def check_within_capacity(within_capacity: Callable):
    """within_capacity(chosen, experts, capacity): which copies are kept, for random choices."""
    require_signature(within_capacity, NAMES)
    cases = random_cases()
    kept = UnchangedInputs("within_capacity", chosen=[case.chosen for case in cases])
    answers = [_require_mask(within_capacity(case.chosen, case.experts, case.capacity), case)
               for case in cases]
    kept.judge()
    for case, answer in zip(cases, answers, strict=True):
        want = right(case)
        if torch.equal(answer, want):
            continue
        if rule := rule_of(RULES, cases, answers, torch.equal):
            raise rule.wrong(case.name)
        _judge_counts(case, answer, want)
    return ("the first copies of each expert, for k = 1, 2 and all experts, with a capacity of "
            "none, of all, and between")


def _require_mask(returned, case) -> torch.Tensor:
    if not isinstance(returned, torch.Tensor) or returned.shape != case.chosen.shape:
        raise Wrong(f"{case.name}: it returned {kind_of(returned)}, not a tensor of the shape of "
                    "`chosen`", "Return one bool for each copy: (tokens, k).", code="wrong_shape")
    require_dense(returned, f"{case.name}: it")
    if returned.dtype != torch.bool:
        raise Wrong(f"{case.name}: it returned {returned.dtype}, not bools",
                    "A comparison (<) returns bools.", code="wrong_dtype")
    return returned


def _judge_counts(case, answer, want):
    """Raises Wrong for a mask that no known rule explains."""
    counts, due = (case.chosen[mask].bincount(minlength=case.experts) for mask in (answer, want))
    # Invariant: an expert keeps min(its copies, capacity). Where that is right, other copies than
    # the first are kept: an unstable sort, a topk of a mask, or an order of its own.
    if (counts > due).any():
        raise Wrong(f"{case.name}: an expert keeps more copies than its capacity", _COUNT,
                    code="beyond_capacity")
    if (counts < due).any():
        raise Wrong(f"{case.name}: an expert drops a copy for which it has room", _COUNT,
                    code="room_left")
    raise Wrong(f"{case.name}: each expert keeps as many copies as it should, but not the first",
                "Sorting needs stable=True; topk has no order among equal values.",
                code="not_the_first")


def random_cases() -> list[Case]:
    """Other random choices at every call. In each some copies are dropped and some are not,
    except where the name says otherwise."""
    rng = new_generator()
    generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def choose(tokens, experts, k, pull=1.0):
        # experts of low numbers are preferred: counts differ
        scores = torch.rand(tokens, experts, generator=generator)
        return (scores - pull * torch.linspace(0, 1, experts)).topk(k).indices

    cases = []
    for k, name in ((1, "k = 1"), (2, "k = 2"), (3, "k = 3")):
        experts, tokens = rng.randint(5, 9), rng.randint(40, 60)
        cases.append(Case(name, choose(tokens, experts, k), experts, tokens * k // experts))
    tokens, experts = rng.randint(20, 30), rng.randint(3, 6)
    cases += [
        Case("k = all experts", choose(tokens, experts, experts), experts, tokens // 2),
        Case("one expert takes all", torch.full((tokens, 1), rng.randrange(experts)), experts,
             rng.randint(3, 9)),
        Case("an expert without a copy", choose(tokens, experts, 2) + 1, experts + 1, tokens // 3),
        Case("capacity 1", choose(tokens, experts, 2), experts, 1),
        Case("capacity 0", choose(tokens, experts, 2), experts, 0),
        Case("more capacity than copies", choose(tokens, experts, 2), experts, 3 * tokens),
        Case("a single token", choose(1, experts, 2), experts, 1),
        # its memory is that of (k, tokens): a view() of it raises
        Case("chosen is not contiguous", choose(tokens, experts, 2).t().contiguous().t(), experts,
             tokens // 3),
        # as many as a rank has; an unstable sort keeps the order of few
        Case("many tokens", choose(2048, 16, 2), 16, 200),
        # more than fp16 and bf16 can count one by one, 2,048 and 256
        Case("many copies for one expert", choose(4096, 2, 1, pull=0.5), 2, 2501)]
    return cases


@shows("9.7")
def show_dropped(within_capacity: Callable) -> Picture:
    """Draws the share of dropped copies over the capacity factor, for three routers on the same
    text: untrained, trained without balance, trained with a bias (`trained_routers`)."""
    by_router = {name: {factor: _dropped(within_capacity, chosen, factor) for factor in FACTORS}
                 for name, chosen in chosen_by_routers().items()}
    at_one = {name: shares[1.0] for name, shares in by_router.items()}
    lesson = "Dropped at a factor of 1: " + ", ".join(
        f"{share:.0%} {name}" for name, share in at_one.items())
    figure, ax = canvas(WIDTH, 3.4 + marks.HEADLINE)
    marks.headline(figure, lesson)
    # as in show_balance: RUNS[1] without balance, RUNS[3] with a bias
    colours = (palette.MUTED, palette.RUNS[1], palette.RUNS[3])
    for colour, (name, shares) in zip(colours, by_router.items(), strict=True):
        ax.plot(list(shares), [100 * share for share in shares.values()], "o-", markersize=3.5,
                linewidth=1.8, color=colour, label=name)
    ax.axvline(1.0, color=palette.MUTED, linestyle=(0, (4, 3)), linewidth=1.1, zorder=0.5)
    ax.set_xlabel("capacity factor")
    ax.set_ylabel("dropped copies, %")
    ax.set_ylim(0, 100)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, loc="upper right")
    words = [f"{name}: " + ", ".join(f"factor {factor:g} {share:.1%}"
                                     for factor, share in shares.items())
             for name, shares in by_router.items()]
    return Picture(figure, "\n".join([lesson, "share of copies that are dropped", *words]),
                   data=by_router, metrics=[Metric(f"{name} dropped at 1", 100 * share, "%")
                                            for name, share in at_one.items()])


def _dropped(within_capacity, chosen, factor) -> float:
    capacity = math.ceil(factor * chosen.numel() / EXPERTS)
    return 1 - within_capacity(chosen, EXPERTS, capacity).float().mean().item()

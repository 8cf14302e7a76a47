"""Exercise 7.10: two partial attentions of the same queries become one."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from labs.checks.generator import new_generator
from labs.checks.inputs import UnchangedInputs, require_dtype
from labs.checks.numbers import as_list
from labs.checks.tolerances import MERGED
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import arrow, box, sheet, write
from labs.tensor_parallel import ring_runs
from labs.tensor_parallel.attention_blocks import block_attention

Partial = tuple[torch.Tensor, torch.Tensor]  # (out, lse) of the attention to some of the keys


@dataclass(frozen=True)
class Case:
    """Two partial attentions of the same queries, and the attention to the keys of both."""

    name: str
    first: Partial
    second: Partial
    whole: Partial


@check("7.10")
def check_merge(merge: Callable):
    """merge(out_a, lse_a, out_b, lse_b) -> (out, lse): the attention to the keys of a and b."""
    for case in cases():
        given = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), (*case.first, *case.second),
                         strict=True))
        kept = UnchangedInputs("merge", **given)
        returned = merge(*given.values())
        merged = as_list(returned)
        kept.judge()
        if merged is None or len(merged) != 2:
            raise Wrong(f"{case.name}: merge returned {kind_of(returned)}, not (out, lse)",
                        "return out, lse: the next block is merged into both.", code="wrong_type")
        for name, got, like in zip(("out", "lse"), merged, case.whole, strict=True):
            _judge_kind(case, name, got, like)
        _judge_values(case, *merged)
    return ("two parts make the attention to all keys, with scores of 2,000 too, and a part in "
            "which a query sees nothing adds nothing")


def cases() -> list[Case]:
    """Cut in the middle and anywhere, with large scores, and with queries that see nothing in one
    part or in both."""
    rows = torch.arange(6)
    before, none = rows[:, None] >= torch.arange(12), torch.zeros(6, 12, dtype=bool)
    everything = ~none
    return [_case("12 keys, cut after 5", everything, 5),
            _case("12 keys in float64, cut after 9", everything, 9, dtype=torch.float64),
            _case("scores up to 2,000", everything, 6, scale=30.0),
            _case("causal: some queries see nothing in b", before, 4),
            _case("no query sees a key of a", everything & (torch.arange(12) >= 6), 6),
            _case("no query sees any key, in a or in b", none, 6)]


def _case(name, visible, cut, scale=1.0, dtype=torch.float32) -> Case:
    # large scores amplify rounding: with some seeds a right answer is further off than others
    seed = len(name) if scale > 1 else new_generator().getrandbits(30)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, size, 8, generator=generator, dtype=dtype) for size in (6, 12, 12))
    q, k = scale * q, scale * k
    first, second = (block_attention(q, k[:, :, part], v[:, :, part], visible[:, part])
                     for part in (slice(cut), slice(cut, None)))
    return Case(name, first, second, block_attention(q, k, v, visible))


def _judge_kind(case, name, got, like):
    if not isinstance(got, torch.Tensor) or got.shape != like.shape:
        raise Wrong(f"{case.name}: {name} is {kind_of(got)}, not a tensor of shape "
                    f"{list(like.shape)}",
                    "out has one dimension more than lse: weight[..., None] has it, too.",
                    code="wrong_type")
    require_dtype(got, like, f"{case.name}: {name}")


def _judge_values(case, out, lse):
    # The invariant: merged parts are the attention to the keys of both, whatever the cut.
    want_out, want_lse = case.whole
    # exp of a large score is infinite, and -inf - -inf is no number: both happen in real runs,
    # with a large logit and with a block that is masked whole.
    if not out.isfinite().all() or lse.isnan().any() or (lse == math.inf).any():
        _raise_not_finite(case, out, lse)
    # lse first: `out` is weighted by it, so a wrong one explains both. A right `out` with a wrong
    # lse would fail at the next block only.
    if not _close(lse, want_lse):
        code, what = _named(lse, _lse_mistakes(case), "wrong_lse")
        raise Wrong(f"{case.name}: lse is not the logarithm of both parts' sum of exponentials"
                    + what, "lse = log(exp(lse_a) + exp(lse_b)).", code=code)
    if not _close(out, want_out):
        code, what = _named(out, _out_mistakes(case), "wrong_out")
        raise Wrong(f"{case.name}: out is not the attention to all keys" + what,
                    "Each part was divided by the sum of its own exponentials, exp of its lse; the "
                    "whole is divided by exp of the new lse.", code=code)


def _raise_not_finite(case, out, lse):
    bad = "NaN" if out.isnan().any() or lse.isnan().any() else "infinite numbers"
    sees_nothing = (case.whole[1] == -math.inf).any() or any(
        (part[1] == -math.inf).any() for part in (case.first, case.second))
    if sees_nothing:
        raise Wrong(f"{case.name}: the result has {bad}; a part that sees nothing has lse = -inf "
                    "and the weight 0", "-inf - -inf is NaN. Where the new lse is -inf, subtract "
                    "0 instead: exp(-inf) is 0.", code="not_finite")
    raise Wrong(f"{case.name}: the result has {bad}, because exp of an lse above 88 overflows",
                "Only differences may go through exp: lse_a - lse. torch.logaddexp takes the "
                "larger of the two out first.", code="overflow")


def _close(got, want) -> bool:
    """Whether the numbers are equal up to rounding; infinities must be the same."""
    return torch.allclose(got, want, rtol=MERGED[want.dtype], atol=MERGED[want.dtype])


def _named(got, mistakes, otherwise) -> tuple[str, str]:
    """The code of the mistake that leads to these numbers, `otherwise` if none does, and how the
    sentence continues."""
    return next(((code, f": it is {what}") for code, what, value in mistakes if _close(got, value)),
                (otherwise, ""))


def _lse_mistakes(case) -> list[tuple[str, str, torch.Tensor]]:
    a, b = case.first[1], case.second[1]
    return [("one_part_alone", "the lse of a alone", a),
            ("one_part_alone", "the lse of b alone", b),
            ("larger_part_alone", "the larger lse", a.maximum(b)),
            ("sum_of_parts", "the sum of both lse", a + b),
            ("mean_of_parts", "the mean of both lse", (a + b) / 2),
            ("logarithm_missing", "the sum of the exponentials, without the logarithm",
             a.exp() + b.exp())]


def _out_mistakes(case) -> list[tuple[str, str, torch.Tensor]]:
    (a, lse_a), (b, lse_b) = case.first, case.second
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((each - lse).exp()[..., None] for each in (lse_a, lse_b))
    share = (lse_a / (lse_a + lse_b))[..., None]
    return [("one_part_alone", "a alone", a), ("one_part_alone", "b alone", b),
            ("mean_of_parts", "the mean of both parts", (a + b) / 2),
            ("sum_of_parts", "the sum of both parts", a + b),
            ("swapped", "the sum with each part's weight given to the other",
             weight_b * a + weight_a * b),
            ("weighted_by_lse", "weighted by lse, not by exp(lse)", share * a + (1 - share) * b),
            ("divided_by_weights", "the sum of both parts, divided by their weights",
             (a + b) / (weight_a + weight_b))]


@shows("The ring")
def show_ring(pass_on: Callable) -> Picture:
    """Draws whose piece each rank has after each pass, as 4 ranks saw it."""
    origins = ring_runs.origins(pass_on)
    ranks, across, down = len(origins[0]), 1.86, 0.44
    figure, ax = sheet(WIDTH, 0.9 + down * ranks)
    seen = min(len({by_rank[rank] for by_rank in origins}) for rank in range(ranks))
    lesson = f"In {len(origins) - 1} passes each rank has had K and V of {seen} of {ranks} ranks"
    write(ax, 0.12, 0.2, lesson, size=11, weight="bold")
    for passed, by_rank in enumerate(origins):
        x = 1.1 + across * passed
        title = "before any pass" if not passed else f"after pass {passed}"
        write(ax, x + 0.72, 0.48, title, ha="center", weight="bold")
        for rank, origin in enumerate(by_rank):
            y = 0.7 + down * rank
            colour = palette.rank(origin)
            box(ax, x, y, 1.44, 0.34, [colour])
            write(ax, x + 0.72, y + 0.17, f"K, V of rank {origin}", size=9.5, ha="center",
                  colour=palette.text_on(colour), weight="bold")
            if passed:
                before = 0.87 + down * ((rank - 1) % ranks)
                arrow(ax, (x - across + 1.46, before), (x - 0.02, y + 0.17), width=1.1)
    for rank in range(ranks):
        write(ax, 0.12, 0.87 + down * rank, f"on rank {rank}", size=9.5)
    words = [f"after pass {passed}: " + ", ".join(
        f"rank {rank} has K and V of rank {origin}" for rank, origin in enumerate(by_rank))
        for passed, by_rank in enumerate(origins)]
    return Picture(figure, "\n".join([lesson, *words]), data=origins)

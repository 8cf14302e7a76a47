"""Exercise 9.2: route, dispatch and combine of an expert layer."""

from collections.abc import Callable

import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import require_several
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.metrics import Metric
from labs.mixture_of_experts.layer_trial import Case, Trial
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training import data
from labs.training.mixtures import Mixture

# k = 2 first, where most mistakes differ from each other: with k = 1 each weight is 1.
_CASES = (Case(20, 8, 2), Case(20, 8, 3, unused=4, dtype=torch.float64), Case(12, 5, 1, 1),
          Case(7, 4, 4, shared=True), Case(0, 4, 2), Case(40, 16, 4, dtype=torch.bfloat16))

_HINTS = {"any value and is ambiguous": "This case has no tokens, as a rank may have none. From no "
          "elements torch cannot infer what -1 stands for: write the size, outputs.shape[-1]."}


@check("9.2", hints=_HINTS)
def check_expert_layer(route: Callable, dispatch: Callable, combine: Callable):
    """route(logits, k) -> (weights, chosen); dispatch(tokens, chosen, experts) -> (copies, counts,
    order); combine(outputs, order, weights) -> the layer's output for each token."""
    # Other numbers in each run, so that no table of answers fits.
    generator = torch.Generator().manual_seed(new_generator().randrange(2 ** 32))
    trials = [Trial(case, generator) for case in _CASES]
    for trial in trials:
        trial.judge(route, dispatch, combine)
    # In bfloat16 the order of a sum decides the last of its two digits: outputs are not compared.
    for trial in trials:
        if trial.case.dtype != torch.bfloat16:
            trial.judge_layer(route, dispatch, combine)
    return ("a layer of your three functions gives the outputs and all gradients of the loop over "
            "experts, with k from 1 to all experts, with experts that get no token, and without "
            "any token; weights of bf16 logits are computed in fp32")


TOKENS, SHOWN, EXPERTS, K = 1024, 10, 8, 2


@shows("9.2")
def show_dispatch(route: Callable, dispatch: Callable) -> Picture:
    """Draws where dispatch puts the copies of a few tokens, and how many copies each expert gets of
    1,024 tokens of text, in a model that has not been trained."""
    logits = _untrained_logits()
    place, experts = _dispatched(route, dispatch, logits[:SHOWN])
    counts = torch.tensor(_dispatched(route, dispatch, logits)[1]).bincount(minlength=EXPERTS)
    mean, most, busiest = TOKENS * K / EXPERTS, int(counts.max()), int(counts.argmax())
    guess = guessed("9.2")
    answer = marks.answered(guess, most, "copies")
    figure, (above, below) = canvas(
        WIDTH, 4.6 + marks.HEADLINE + marks.NOTE_LINE * bool(answer), nrows=2,
        gridspec_kw={"height_ratios": [1, 1.15]})
    lesson = (f"Of {TOKENS:,} tokens, expert {busiest} gets {most} copies: {most / mean:.2f} times "
              "the mean")
    marks.headline(figure, lesson)
    marks.note_below(figure, answer)
    _draw_copies(above, place, experts)
    _draw_counts(below, counts.tolist(), mean, guess)
    line = Line2D([], [], linewidth=3, color=palette.PREDICTED, label=f"the mean, {mean:.0f}")
    marks.legend_above(figure, [line] + [Line2D([], [], linewidth=3, label="your guess",
                                                **marks.GUESS_MARKER)] * (guess is not None))
    words = [lesson, f"the copies of {SHOWN} tokens, by their experts, in dispatch's order: "
             + ", ".join(map(str, experts)), f"copies for each expert, mean {mean:.0f}: "
             + ", ".join(f"{expert}: {count}" for expert, count in enumerate(counts.tolist()))]
    words += [f"your guess: {guess:g}"] if guess is not None else []
    return Picture(figure, "\n".join(filter(None, [*words, answer])), data=(place, counts.tolist()),
                   metrics=[Metric("copies for the expert with the most", most, "copies", mean)])


def _untrained_logits() -> torch.Tensor:
    """The router's logits, (tokens, experts), of the first layer of a model that has read nothing.
    The tokens are text: some bytes are frequent, and equal bytes choose similar experts."""
    model, found = Mixture(layers=1, experts=EXPERTS, k=K), []
    model.layers[0].mlp.router.register_forward_hook(lambda *call: found.append(call[-1]))
    with torch.no_grad():
        model(**data.lm_batches(1, TOKENS // 64, 64)[0])
    return found[0]


def _dispatched(route, dispatch, logits) -> tuple[list[int], list[int]]:
    """By the answer's functions, for each copy in dispatch's order: its place among the copies in
    the order of tokens, and its expert."""
    _, chosen = require_several(route(logits, K), ("weights", "chosen"), "route returned")
    numbers = torch.arange(len(logits), dtype=torch.float32)[:, None]  # each token is its number
    copies, counts, _ = require_several(dispatch(numbers, chosen, EXPERTS),
                                        ("copies", "counts", "order"), "dispatch returned")
    try:
        token = copies[:, 0].long()
        expert = torch.arange(EXPERTS).repeat_interleave(counts)
        place = token * K + (chosen[token] == expert[:, None]).int().argmax(1)
        return place.tolist(), expert.tolist()
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise Wrong("this cannot be drawn with what your code returned",
                    "The check of exercise 9.2 says what is wrong.", code="not_drawn") from error


def _draw_copies(ax, place, experts):
    """Two rows of cells, tokens in order and sorted by expert, and a line from each to its own."""
    for column, (start, expert) in enumerate(zip(place, experts, strict=True)):
        colour = palette.rank(expert)
        # The copies of a token stand close together.
        ends = [start + 0.35 * (start // K), column * (1 + 0.35 / K)]
        ax.plot([end + 0.45 for end in ends], [1.85, 0.95], color=colour, linewidth=1.8)
        for x, y in zip(ends, (1.85, 0.25), strict=True):
            ax.add_patch(Rectangle((x, y), 0.9, 0.7, color=colour, linewidth=0))
            ax.text(x + 0.45, y + 0.33, f"{expert}", ha="center", va="center",
                    color=palette.text_on(colour))
    for token in range(SHOWN):
        ax.text(token * (K + 0.35) + 0.95, 2.65, f"token {token}", ha="center", va="bottom",
                fontsize=9, color=palette.MUTED)
    ax.set_xlim(-0.1, SHOWN * (K + 0.35))
    ax.set_ylim(0, 3.1)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])
    ax.set_yticks([2.2, 0.6], ["their experts", "by expert"])
    ax.tick_params(axis="y", labelcolor=palette.INK)


def _draw_counts(ax, counts, mean, guess):
    for expert, count in enumerate(counts):
        ax.bar(expert, count, width=marks.BAR, color=palette.rank(expert))
        # At the foot of the bar, where neither the mean nor the guess runs through it.
        ax.text(expert, 0.03 * max(counts), f"{count}", ha="center", va="bottom", fontsize=11,
                color=palette.text_on(palette.rank(expert)))
        marks.draw_tick(ax, mean, expert, palette.PREDICTED, upright=True)
    marks.draw_tick(ax, guess, counts.index(max(counts)), palette.GUESSED, upright=True)
    ax.set_xticks(range(len(counts)), [f"expert {expert}" for expert in range(len(counts))])
    ax.tick_params(axis="x", labelcolor=palette.INK)
    ax.set_yticks([])
    ax.set_ylabel("copies")
    ax.set_ylim(0, 1.15 * max(*counts, guess or 0))

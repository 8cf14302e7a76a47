"""Exercise 6.3: efficiency from throughputs, and what a promised speed-up is as one; and the
picture of both kinds of scaling on this machine."""

from collections.abc import Callable, Iterator

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Cause,
    as_number,
    judge_number,
    require_numbers,
    require_signature,
)
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.scaling.release_notes import show_release_note
from labs.scaling.scaling_runs import BYTES, Scaling, efficiencies, measure_scaling
from labs.words import counted
from labs.workers import devices

_RULE = "N ranks could do N times the work of one: divide what they do by what they could do."


@check("6.3")
def check_efficiency(efficiency: Callable, claimed):
    """efficiency(ranks, throughput, alone): of N ranks. claimed: (lowest, highest) efficiency that
    the figure means."""
    require_signature(efficiency, ("ranks", "throughput", "alone"))
    for ranks, throughput, alone in _cases():
        # Invariant: 1 where N ranks do N times the work of one, whatever the units and N are.
        judge_number(efficiency(ranks, throughput, alone), throughput / (ranks * alone),
                     _causes(ranks, throughput, alone), f"{counted(ranks, 'rank')} with "
                     f"{throughput:,.10g} tokens/s, one alone with {alone:,.10g}: the efficiency",
                     "", _RULE)
    note = show_release_note()
    _judge_claim(claimed, note)
    return ("right for 1 to 1,024 ranks; the promised figure is a speed-up, and its "
            f"efficiency {note.lowest / note.gpus:.0%} to {note.highest / note.gpus:.0%}")


def _cases() -> Iterator[tuple[int, float, float]]:
    """(ranks, throughput of all, throughput of one): some that were chosen, and random ones."""
    yield from ((2, 1500.0, 1000.0), (8, 6000, 1000), (4, 4400.0, 1000.0), (1, 730.5, 730.5))
    rng = new_generator()
    for ranks in (3, 7, 64, 1024):
        alone = rng.uniform(100, 5000)
        yield ranks, ranks * alone * rng.uniform(0.4, 0.97), alone


def _causes(ranks, throughput, alone) -> list[Cause]:
    speedup = throughput / alone
    return [
        Cause("speed_up", speedup, "that is the speed-up", "Divide it by the number of ranks."),
        Cause("in_percent", 100 * speedup / ranks, "that is in percent",
              "An efficiency of 80 % is 0.8."),
        Cause("speed_up_in_percent", 100 * speedup, "that is the speed-up in percent", _RULE),
        Cause("share_time_step_takes", 1 / speedup,
              "that is the share of the time that a step takes", _RULE),
        Cause("upside_down", ranks / speedup, "that is upside down",
              "What they do stands above, what they could do below."),
        Cause("lost", 1 - speedup / ranks, "that is what is lost", "Efficiency is what is left."),
        Cause("multiplies_number_ranks", ranks * speedup, "that multiplies by the number of ranks",
              "Take throughput as that of all ranks together, and divide."),
        Cause("throughput_rank", throughput / ranks, "that is the throughput of a rank",
              "Compare it with that of one alone."),
        Cause("gain_over_one_rank", speedup - 1, "that is the gain over one rank", _RULE),
        Cause("leaves_out_one_rank", (speedup - 1) / max(ranks - 1, 1),
              "that leaves out one rank on both sides",
              "All N ranks could do N times the work, the first one too."),
        Cause("hides_efficiency_above_1", min(speedup / ranks, 1),
              "that hides an efficiency above 1", "It can be above 1, if a smaller share fits into "
              "a cache: report what was measured.")]


def _judge_claim(claimed, note) -> None:
    names = ("the lowest", "the highest")
    found = require_numbers(claimed, names, "the promised figure", "`claimed` is")
    speedups = (note.lowest, note.highest)
    want = [each / note.gpus for each in speedups]
    if list(map(as_number, found)) == want[::-1]:
        raise Wrong("the promised figure: the highest efficiency stands first",
                    "Return the lowest, then the highest.", code="wrong_order")
    for name, got, right, speedup in zip(names, found, want, speedups, strict=True):
        # A speed-up of N would be perfect on N GPUs: an efficiency above 1 is impossible there.
        judge_number(got, right, [
            Cause("speed_up", speedup, "that is the speed-up",
                  f"What would {note.gpus} GPUs do at best?"),
            Cause("in_percent", 100 * right, "that is in percent", "An efficiency of 80 % is 0.8."),
            Cause("other_gpus_add", speedup - 1, "that is what the other GPUs add",
                  "Call your function: throughput and alone may be in any unit."),
            Cause("share_time", 1 / speedup, "that is the share of the time",
                  "Call your function: throughput and alone may be in any unit."),
            Cause("upside_down", note.gpus / speedup, "that is upside down",
                  "Call your function: throughput and alone may be in any unit.")],
            f"the promised figure, {name}", "",
            f"Call your function with {note.gpus} ranks: throughput and alone may be in any "
            "unit.")


_BYTES = {0.5: "half"}.get(BYTES, f"{BYTES:.0%}")
_KINDS = {"weak": ("weak: per-rank batch fixed", palette.RUNS[1], "o"),
          "strong": ("strong: global batch fixed", palette.RUNS[2], "s")}


@shows("Scaling efficiency")
def show_scaling(measured: Scaling | None = None) -> Picture:
    """Trains on 1 to N ranks, and draws two panels by number of ranks: the efficiencies, with the
    guess, and the speed-up, with the ideal line. measured: None means that it is measured now."""
    measured = measured or measure_scaling()
    note = _why(measured)
    ranks, words, metrics, handles = list(measured.weak), [], measured.metrics(), []
    weak, strong = (100 * efficiencies(found)[ranks[-1]]
                    for found in (measured.weak, measured.strong))
    lesson = f"On {ranks[-1]} ranks: {weak:.0f} % in weak, {strong:.0f} % in strong scaling"
    answer = _answer(measured)
    note += [answer] * bool(answer)
    figure, [left, right] = canvas(WIDTH, 3.7 + marks.HEADLINE + marks.NOTE_LINE * len(note),
                                   ncols=2)
    marks.headline(figure, lesson)
    for kind, (name, colour, marker) in _KINDS.items():
        found = getattr(measured, kind)
        times = {n: found[n] / found[1] for n in ranks}
        shares = efficiencies(found)
        above = all(measured.weak[n] >= measured.strong[n] for n in ranks) == (kind == "weak")
        handles.append(_draw_by_ranks(left, {n: 100 * share for n, share in shares.items()},
                                      "{:.0f} %", above, colour, marker))
        _draw_by_ranks(right, times, "{:.2f}", above, colour, marker)
        handles[-1].set_label(name)
        metrics += [Metric(f"{kind} scaling on {counted(n, 'rank')}: efficiency", shares[n], "")
                    for n in ranks[1:]]
        words.append(f"{name}: " + ", ".join(
            f"{n} ranks: speed-up {times[n]:.2f}, efficiency {shares[n]:.0%}" for n in ranks[1:]))
    _draw_ideal(left, right, ranks, handles)
    handles += _draw_guess(left, measured.own, words)
    for ax in (left, right):
        _mark_shared(ax, ranks, measured.own)
    left.set_title("efficiency, %", fontsize=10, loc="left", color=palette.INK)
    right.set_title("speed-up", fontsize=10, loc="left",
                    color=palette.INK)
    marks.legend_above(figure, handles)
    marks.note_below(figure, "\n".join(note))
    return Picture(figure, "\n".join([lesson, *words, *note]), data=measured, metrics=metrics)


def _answer(measured) -> str:
    """The guess about weak scaling answered; "" where no two ranks have a core of their own."""
    if measured.own < 2:
        return ""
    return marks.answered(guessed("6.3"), 100 * efficiencies(measured.weak)[measured.own], "%")


def _draw_by_ranks(ax, by_ranks, text, above, colour, marker) -> Line2D:
    """A line over the numbers of ranks, with the values of several."""
    [line] = ax.plot(list(by_ranks), by_ranks.values(), color=colour, marker=marker, linewidth=2)
    for ranks, value in list(by_ranks.items())[1:]:
        ax.annotate(text.format(value), (ranks, value), ha="center",
                    va="bottom" if above else "top", xytext=(0, 7 if above else -8),
                    textcoords="offset points", color=palette.readable(colour), **marks.ON_PAPER)
    most = max(by_ranks)
    ax.set_xticks(list(by_ranks))
    ax.set_xlim(1 - 0.08 * most, 1.12 * most)
    ax.set_xlabel("ranks")
    return line


def _draw_ideal(left, right, ranks, handles):
    """100 % and N times; the throughput's axis ends above what was measured, not above N."""
    style = {"color": palette.MUTED, "linestyle": (0, (4, 3)), "linewidth": 1.2, "zorder": 1}
    shown = right.get_ylim()[1]
    handles.insert(0, left.axhline(100, label="ideal", **style))
    right.plot(ranks, ranks, **style)
    right.set_ylim(0, min(1.5 * shown, 1.15 * ranks[-1]))
    left.set_ylim(min(0, left.get_ylim()[0]), max(112, 1.08 * left.get_ylim()[1]))


def _why(measured) -> list[str]:
    """What the ranks lose it to, in lines below the picture. On a CPU they have a link of the lab's
    own, on GPUs the machine's."""
    lines = []
    if not devices.gpus():
        lines.append("Why below 100 %: on a CPU the ranks send over notebook 05's slow link. All "
                     f"gradients take {_BYTES} of a step of\none rank there, and DDP does not hide "
                     "all of that.")
    if list(measured.weak)[-1] > measured.own:
        lines.append(f"Grey: ranks share a {'GPU' if devices.gpus() else 'core'}, so each of them "
                     "computes more slowly.")
    return [line for text in lines for line in text.splitlines()]


def _draw_guess(ax, ranks, words) -> list[Line2D]:
    """The guess is about weak scaling on as many ranks as have a core of their own, in percent."""
    guess = guessed("6.3")
    if guess is None or ranks < 2:
        return []
    words.append(f"your guess: {guess:g} % on {ranks} ranks")
    return ax.plot([ranks], [guess], linestyle="", label="your guess, weak",
                   **marks.GUESS_MARKER)


def _mark_shared(ax, ranks, own) -> None:
    if ranks[-1] > own:
        ax.axvspan(sum(ranks[-2:]) / 2, 1.12 * ranks[-1], color=palette.SURFACE, zorder=0)

"""The picture of one job on two cards: its memory is the same, its seconds are not."""

import functools
import re
from collections import defaultdict
from typing import NamedTuple

from labs.checks.verdicts import print_in_script
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.gpu_runs.folder import load
from labs.words import counted

CARDS = {"a6000": "RTX A6000", "a100": "A100", "h200": "H200", "b200": "B200"}
_AGAINST = "h100"
NEAR = 0.03  # of the memory on an H100
# Names of the rows: prime-rl's begin with number and card, and name the version of FlashAttention,
# which the card decides; of Megatron's those are taken that one recipe made on both cards.
_PRIME_RL = re.compile(r"benchmark-(?P<gpus>\d+x)(?P<card>[a-z0-9]+)-(?P<job>.*)-"
                       r"flash_attention_\d(?P<rest>.*)")
_MEGATRON = re.compile(r"(?P<job>\S+) dev_dgx_(?P<card>[a-z]+\d+)$")


class Pair(NamedTuple):
    """A job on another card, over the same on an H100: bytes at the peak, and seconds of a step."""

    card: str
    job: str
    memory: float
    seconds: float


@functools.cache
def pairs() -> list[Pair]:
    """Every public job that was measured on an H100 and on another card."""
    found = defaultdict(dict)
    for run in load():
        name = _PRIME_RL.match(run.id) or _MEGATRON.match(run.id)
        if name and run.memory and run.seconds:
            fields = name.groupdict()
            card = fields.pop("card")
            found[tuple(fields.values())][card] = run
    return [Pair(CARDS[card], job[1] if len(job) > 1 else job[0],
                 run.memory / runs[_AGAINST].memory, run.seconds / runs[_AGAINST].seconds)
            for job, runs in found.items() if _AGAINST in runs
            for card, run in runs.items() if card in CARDS]


def show_cards() -> Picture:
    """Draws public jobs on two cards: memory and seconds, each over those on an H100."""
    rows = pairs()
    near = [pair for pair in rows if abs(pair.memory - 1) <= NEAR]
    slowest = max(rows, key=lambda pair: pair.seconds)
    lesson = (f"On another card {len(near)} of {len(rows)} jobs take an H100's bytes within "
              f"{100 * NEAR:g} %, and up to {slowest.seconds:.1f} times its seconds")
    names = [card for card in CARDS.values() if any(pair.card == card for pair in rows)]
    figure, axes = canvas(WIDTH, 0.45 * len(names) + 1.2 + marks.HEADLINE, ncols=2)
    marks.headline(figure, lesson)
    for ax, field, unit in zip(axes, ("memory", "seconds"), ("GB", "seconds"), strict=True):
        ax.axvline(1, color=palette.MUTED, linewidth=0.8, zorder=1)
        for place, card in enumerate(names):
            values = [getattr(pair, field) for pair in rows if pair.card == card]
            ax.plot(values, [place] * len(values), "o", color=palette.RUNS[1], alpha=0.6,
                    markersize=6, markeredgewidth=0)
        marks.name_rows(ax, names if field == "memory" else [""] * len(names))
        ax.set_xscale("log", base=2)
        ax.set_xlim(0.4, 1.3 * slowest.seconds)
        marks.plain_numbers(ax.xaxis)
        ax.set_xlabel(f"{unit} / {unit} on an H100")
    far = [pair for pair in rows if pair not in near]
    contexts = sum("cp2" in pair.job for pair in far)
    note = (f"The other {len(far)}: {min(pair.memory for pair in far):.2f} to "
            f"{max(pair.memory for pair in far):.2f} times; {contexts} of them with context "
            "parallelism, for which the cards have different attention kernels.") if far else ""
    words = [f"{card}: {counted(len(own), 'job')}, memory {min(pair.memory for pair in own):.3f} "
             f"to {max(pair.memory for pair in own):.3f} times, seconds "
             f"{min(pair.seconds for pair in own):.2f} to {max(pair.seconds for pair in own):.2f}"
             for card in names for own in [[pair for pair in rows if pair.card == card]]]
    if note:
        marks.note_below(figure, note)
    return print_in_script(Picture(figure, "\n".join([lesson, *words, note]).strip(), data=rows))

"""What notebook 07a draws of three ways of context parallelism: bytes and peaks measured beside the
formulas, and which way exposes least for the heads of published models."""

from collections.abc import Callable
from dataclasses import replace

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Wrong, shows
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.tensor_parallel.ring import choice
from labs.tensor_parallel.ring.ways import (
    COMPARED,
    GATHER,
    RING,
    ULYSSES,
    WAYS,
    measure,
    predicted_peak,
    predicted_sent,
)

_RANKS = (2, 4, 8)
_HINTS = {GATHER: "GatherToRegion, exercise 7.7: forward gathers the tokens, backward sums the "
                  "gradients over the ranks and keeps this rank's.",
          RING: "Run the check of exercise 7.11.",
          ULYSSES: "A rank gets all tokens of its part of the heads, and gives them back: "
                   "dimension 1 is split and 2 joined, then 2 split and 1 joined."}
_TOLERANCE = 1e-4  # of gradients that are sums over 1,024 tokens, in fp32


@shows("7.11")
def show_three_ways(ring_attention: Callable, gathered_attention: Callable,
                    ulysses_attention: Callable) -> Picture:
    """Draws, for K and V gathered, the ring and Ulysses on 2, 4 and 8 ranks, what a rank sends in
    forward and backward and its peak, with the scores of a block in memory and in tiles; with what
    the formulas say. Raises Wrong where one of the three is not full attention."""
    attentions = {GATHER: gathered_attention, RING: ring_attention, ULYSSES: ulysses_attention}
    found = {ranks: measure(attentions, ranks) for ranks in _RANKS}
    names, measured, sent, peaks, tiled = [], [], [], [], []
    for way in WAYS:
        for ranks in _RANKS:
            shape = replace(COMPARED, tokens=COMPARED.tokens // ranks)
            one = found[ranks][way]
            if one.off > _TOLERANCE:
                raise Wrong(f"{way} on {ranks} ranks: out or a gradient differs by {one.off:.1g} "
                            "from full attention's", _HINTS[way], code="differs_from_reference")
            names.append(f"{way}, {ranks} ranks")
            measured.append(one)
            sent.append(sum(predicted_sent(way, shape, ranks)))
            peaks.append(predicted_peak(way, shape, ranks))
            tiled.append(predicted_peak(way, shape, ranks, tiled=True))
    guess = guessed("7.11b")
    at = names.index(f"{ULYSSES}, 4 ranks")
    gathered = sum(measured[names.index(f"{GATHER}, 4 ranks")].sent.values())
    guesses = [guess * gathered if guess and place == at else None for place in range(len(names))]
    colour = palette.PHASES["communication"]
    panels = [Panel("sent by a rank", "MB", [one.sent for one in measured], 1e6, sent, guesses),
              Panel("peak, scores of a block", "MB", [one.peak for one in measured], 1e6, peaks,
                    colour=colour),
              Panel("peak, in tiles", "MB", [one.peak_in_tiles for one in measured], 1e6, tiled,
                    colour=colour)]
    size = COMPARED
    return side_by_side(names, panels, f"{size.tokens:,} tokens, {size.heads} query heads and "
                        f"{size.kv_heads} key heads of {size.d}; peaks beside a piece of q, k, v")


@shows("Three ways, for published models")
def show_context_parallel_choice() -> Table:
    """A table of what each way sends, what it exposes and what it has of K and V, for one layer of
    published models."""
    rows = []
    for case in choice.CASES:
        found = [cost and (cost.sent / 1e6, 100 * cost.exposed / case.seconds, cost.keys / 1e6)
                 for cost in choice.costs(case).values()]
        cells = [" / ".join(f"{cost[column]:,.0f}" if cost else "–" for cost in found)
                 for column in range(3)]
        rows.append((f"{case.name}: {case.heads} / {case.kv_heads} heads", f"{case.tokens:,}",
                     case.ranks, *cells))
    return Table("One layer, forward and backward, in 16 bits: gathered / ring / Ulysses",
                 ("query / key heads of a rank", "tokens", "ranks", "sent, MB",
                  "exposed, % of attention's seconds", "K, V and gradients, MB"), rows,
                 note=f"By formula: {choice.LINK / 1e9:.0f} GB/s for each GPU, "
                      f"{choice.PACE / 1e12:.0f} TFLOP/s. – : fewer heads than ranks.")

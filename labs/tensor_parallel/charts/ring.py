"""What notebook 07a draws of the ring: who holds which piece, what each rank computes in each
round, the peak of a rank's memory, and a small Llama on pieces of a text."""

from collections.abc import Callable
from dataclasses import replace

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.sheet import arrow, box, sheet, write
from labs.pictures.tables import Table
from labs.tensor_parallel.checks.assign import as_assignment
from labs.tensor_parallel.ring import runs
from labs.tensor_parallel.ring.cases import places_of_chunks
from labs.tensor_parallel.ring.pairs import least_makespan, makespan, pairs_by_round
from labs.tensor_parallel.ring.ways import RING, predicted_peak
from labs.workers import devices
from labs.workers.launcher import launch

_TOKENS = 6  # of a chunk in the picture of rounds
_CHUNK = 32  # tokens of a chunk in the table of assignments
_MEMORY_RANKS = (2, 4, 8)


@shows("The ring")
def show_ring(pass_on: Callable) -> Picture:
    """Draws whose piece each rank has after each pass, as 4 ranks saw it."""
    origins = runs.origins(pass_on)
    ranks, across, down = len(origins[0]), 1.86, 0.44
    figure, ax = sheet(WIDTH, 0.62 + down * ranks)
    for passed, by_rank in enumerate(origins):
        x = 1.1 + across * passed
        title = "before any pass" if not passed else f"after pass {passed}"
        write(ax, x + 0.72, 0.2, title, ha="center", weight="bold")
        for rank, origin in enumerate(by_rank):
            y = 0.42 + down * rank
            colour = palette.rank(origin)
            box(ax, x, y, 1.44, 0.34, [colour])
            write(ax, x + 0.72, y + 0.17, f"K, V of rank {origin}", size=9.5, ha="center",
                  colour=palette.text_on(colour), weight="bold")
            if passed:
                before = 0.59 + down * ((rank - 1) % ranks)
                arrow(ax, (x - across + 1.46, before), (x - 0.02, y + 0.17), width=1.1)
    for rank in range(ranks):
        write(ax, 0.12, 0.59 + down * rank, f"on rank {rank}", size=9.5)
    words = [f"after pass {passed}: " + ", ".join(
        f"rank {rank} has K and V of rank {origin}" for rank, origin in enumerate(by_rank))
        for passed, by_rank in enumerate(origins)]
    return Picture(figure, "\n".join(words), data=origins)


@shows("7.11")
def show_ring_memory(ring_attention: Callable) -> Picture:
    """Draws the peak of the rank with most on 2, 4 and 8 ranks, of one sequence: with the scores of
    a block in memory, and with each block in tiles."""
    found = {ranks: runs.peaks(ring_attention, ranks) for ranks in _MEMORY_RANKS}
    guess, rows = guessed("7.11"), []
    for tiled, name in enumerate(("scores of a block", "in tiles, no scores")):
        for ranks, measured in found.items():
            shape = replace(runs.LONG, tokens=runs.LONG.tokens // ranks)
            is_guessed = guess and not tiled and ranks == _MEMORY_RANKS[-1]
            rows.append(Bar(f"{name}, {ranks} ranks", measured[tiled] / 1e6,
                            predicted_peak(RING, shape, ranks, bool(tiled)) / 1e6,
                            found[_MEMORY_RANKS[0]][0] / guess / 1e6 if is_guessed else None,
                            palette.PHASES["communication"]))
    ratio, other = (found[2][one] / found[8][one] for one in (0, 1))
    size = runs.LONG
    note = (f"{size.tokens:,} tokens, {size.heads} heads of {size.d}. From 2 to 8 ranks the peak "
            f"falls by {ratio:.1f}x, in tiles by {other:.1f}x.")
    return bars(rows, "MB", "at the peak of a rank, beside its piece of Q, K and V", note=note)


@shows("7.12")
def show_rounds(assign: Callable, ring_attention: Callable) -> Picture:
    """Draws the pairs that each rank computes in each round on 4 ranks, of contiguous pieces and of
    the student's assignment, counted while the student's ring runs."""
    ranks, chunks = runs.RANKS, 2 * runs.RANKS
    mine = as_assignment(assign(chunks, ranks), chunks, ranks, f"{chunks} chunks on {ranks} ranks")
    contiguous = [[2 * rank, 2 * rank + 1] for rank in range(ranks)]
    figure, axes = canvas(WIDTH, 6.6, nrows=4, ncols=ranks, height_ratios=[2.1, 1, 2.1, 1])
    lines, data = [], {}
    for number, (title, assignment) in enumerate({"contiguous pieces": contiguous,
                                                  "your assignment": mine}.items()):
        places = places_of_chunks(assignment, _TOKENS)
        rounds = runs.measured_rounds(ring_attention, places)
        data[title] = rounds
        longer = makespan(rounds) / least_makespan(rounds)
        guess = guessed("7.12") if assignment is contiguous else None
        lines.append(f"{title}: {makespan(rounds):,} pairs one after the other, {longer:.2f}x the "
                     "least possible" + (f"; your guess: {guess:g}x" if guess else ""))
        most = max(max(max(by_rank) for by_rank in each) for each in data.values())
        for passed, by_rank in enumerate(rounds):
            _draw_pairs(axes[2 * number][passed], places, passed)
            _draw_counts(axes[2 * number + 1][passed], by_rank, most)
            axes[2 * number][passed].set_title(f"\n\nround {passed}", fontsize=9.5)
        # not in the layout: it is as wide as all columns
        axes[2 * number][0].annotate(lines[-1], (0, 1), (0, 26), "axes fraction", "offset points",
                                     weight="bold", fontsize=10).set_in_layout(False)
        lines += [f"  round {passed}: pairs of ranks 0 to {ranks - 1}: "
                  + ", ".join(map(str, by_rank)) for passed, by_rank in enumerate(rounds)]
    return Picture(figure, "\n".join(lines), data=data)


def _draw_pairs(ax, places, passed):
    """The square of queries (down) and keys (across) in the order of the sequence, with the pairs
    of this round in the colour of the rank that computes them."""
    import numpy as np
    from matplotlib.colors import to_rgb

    ranks, size = len(places), sum(map(len, places))
    image = np.ones((size, size, 3))
    image[np.tril_indices(size)] = to_rgb(palette.GRID)
    for rank, queries in enumerate(places):
        keys = places[(rank - passed) % ranks]
        for query in queries.tolist():
            image[query, [key for key in keys.tolist() if key <= query]] = to_rgb(
                palette.rank(rank))
    ax.imshow(image, interpolation="nearest", extent=(0, size, size, 0), aspect="equal")
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_xticks([])
    ax.set_yticks([])
    if passed == 0:
        ax.set_ylabel("queries", fontsize=9)
        ax.set_xlabel("keys", fontsize=9)


def _draw_counts(ax, by_rank, most):
    """How many pairs each rank computes in a round."""
    for rank, pairs in enumerate(by_rank):
        ax.bar(rank, pairs, width=0.8, color=palette.rank(rank))
        ax.text(rank, pairs, f"{pairs}", ha="center", va="bottom", fontsize=9)
    ax.axhline(max(by_rank), color=palette.MUTED, linewidth=0.8, linestyle=(0, (3, 2)))
    ax.set_ylim(0, 1.3 * most)
    ax.set_yticks([])
    ax.set_xticks(range(len(by_rank)))
    ax.set_xlabel("pairs by rank", fontsize=9)


@shows("7.12")
def show_assignments(assign: Callable) -> Table:
    """How many times as long as equal rounds the ring takes, by who has which tokens."""
    counts = (2, 4, 8, 16)

    def longer(assignment, tokens=_CHUNK):
        rounds = pairs_by_round(places_of_chunks(assignment, tokens))
        return f"{makespan(rounds) / least_makespan(rounds):.2f}"

    rows = {"contiguous pieces": [longer([[2 * r, 2 * r + 1] for r in range(n)]) for n in counts],
            "round robin, 2 chunks a rank": [longer([[r, r + n] for r in range(n)])
                                             for n in counts],
            "round robin, token by token": [
                longer([range(r, 2 * n * _CHUNK, n) for r in range(n)], 1) for n in counts],
            "yours, 2 chunks a rank": [longer(as_assignment(
                assign(2 * n, n), 2 * n, n, f"{2 * n} chunks on {n} ranks")) for n in counts]}
    return Table("Pairs on the critical path, as a multiple of the least possible",
                 ("", *(f"{n} ranks" for n in counts)),
                 [(name, *numbers) for name, numbers in rows.items()])


@shows("7.12")
def show_ring_in_llama(ring_attention: Callable, assign: Callable) -> Table:
    """A small Llama of Hugging Face with the student's attention, each rank on its chunks of a
    text, beside the same model on the whole text."""
    ranks, chunks = runs.RANKS, 2 * runs.RANKS
    mine = as_assignment(assign(chunks, ranks), chunks, ranks, f"{chunks} chunks on {ranks} ranks")
    found = runs.llama_runs(ring_attention, mine)
    rows = [("tokens of the text", f"{runs.CONTEXT}"), ("tokens on a rank", f"{found.tokens}"),
            ("loss, mean over all tokens", f"{found.loss:.4f}"),
            ("largest difference of a logit", f"{found.logits:.0e}"),
            ("largest difference of a gradient", f"{found.gradients:.0e}")]
    return Table("A Llama on 4 ranks, compared with one process", ("", ""), rows,
                 note="The gradients of the weights were summed over ranks, because each rank has "
                      "other tokens.")


@shows("torch's context_parallel")
def show_context_parallel() -> Table:
    """What torch's own context_parallel does on this machine, on 2 ranks."""
    said = launch(runs.torchs_context_parallel, ranks=2, quiet=True)[0]
    where = devices.plan(2)
    title = f"context_parallel on 2 ranks, {where.device} with {where.library}"
    if isinstance(said, str):
        return Table(title, ("it raised",), [(said,)],
                     note="It has implementations for CUDA's flash, efficient and cuDNN attention, "
                          "and none for the CPU's." if where.device == "cpu" else "")
    return Table(title, ("", ""), [("largest difference from full attention", f"{said[1]:.0e}")],
                 note="In bfloat16, so that the flash kernel is used.")

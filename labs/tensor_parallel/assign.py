"""Exercise 7.12: how long the ring takes with the tokens that each rank has, and which chunks of a
causal sequence each rank should get."""

from collections import Counter
from collections.abc import Callable

import torch

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, as_list, as_number, judge_number, require_number
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.tensor_parallel import ring_runs
from labs.tensor_parallel.attention_blocks import (
    Places,
    least_makespan,
    makespan,
    pairs_by_round,
)
from labs.tensor_parallel.ring_cases import places_of_chunks
from labs.words import counted
from labs.workers import devices
from labs.workers.launcher import launch

# (chunks, ranks): two for each rank on every number of ranks, and more on some
CASES = [(2 * ranks, ranks) for ranks in (4, 2, 3, *range(5, 17), 1)]
CASES += [(4 * ranks, ranks) for ranks in (2, 3, 4, 8)] + [(6 * ranks, ranks) for ranks in (3, 5)]
_TOKENS = 3  # of a chunk


@check("7.12")
def check_assign(assign: Callable, critical_path: Callable):
    """critical_path(places): pairs that the ring computes one after the other. assign(chunks,
    ranks): for each rank the numbers of its chunks; all ranks compute the same number of pairs in
    every round."""
    # The measure first: with it a student finds out what is wrong with an assignment.
    for name, places in _placements():
        _judge_path(critical_path([list(each) for each in places]), places, name)
    for chunks, ranks in CASES:
        where = f"{counted(chunks, 'chunk')} on {counted(ranks, 'rank')}"
        require_equal_rounds(as_assignment(assign(chunks, ranks), chunks, ranks, where), where)
    return ("the critical path is that of any assignment; on 1 to 16 ranks each chunk of yours has "
            "one rank, and all ranks compute the same number of pairs in every round")


def _placements() -> list[tuple[str, list[list[int]]]]:
    """(name, positions of each rank's tokens): of pieces as large as each other, because K and V of
    all ranks have one size."""
    rng = new_generator()
    # In the first one each known mistake leads to a number of its own, because the slowest rank is
    # not the same in all rounds.
    found = [("12 tokens on 4 ranks", [[0, 1, 6], [2, 8, 10], [7, 9, 11], [3, 4, 5]]),
             ("6 tokens on 1 rank", [[*range(6)]])]
    for ranks in (2, 3, 4):
        tokens = rng.sample(range(4 * ranks), 4 * ranks)
        found.append((f"{4 * ranks} tokens in random order on {ranks} ranks",
                      [tokens[4 * rank:4 * rank + 4] for rank in range(ranks)]))
    return found


def _judge_path(got, places, name):
    rounds = pairs_by_round(_tensors(places))
    # The invariant: K and V go on when the slowest rank is done, in every round.
    judge_number(got, makespan(rounds), _causes(places, rounds), f"critical_path, {name}", "pairs",
                 "In each round count the pairs with key <= query of every rank, and add the "
                 "largest of these numbers.")


def _causes(places, rounds) -> list[Cause]:
    # Keys after the query in place of those before it would give the same number: round k of rank r
    # is then what round -k of its partner was.
    ranks = len(places)
    strict = [[pairs - len(places[rank]) if passed == 0 else pairs
               for rank, pairs in enumerate(by_rank)] for passed, by_rank in enumerate(rounds)]
    return [
        Cause("rounds_not_synchronized", max(map(sum, zip(*rounds, strict=True))),
              "that is the sum of the rank with the largest sum",
              "Take the maximum over ranks in each round: all ranks wait for it."),
        Cause("ranks_added", sum(map(sum, rounds)), "that is the sum over all ranks",
              "In a round all ranks compute at the same time."),
        Cause("mean_of_ranks", least_makespan(rounds), "that is the mean over ranks",
              "In each round all ranks wait for the slowest."),
        Cause("fastest_rank", sum(map(min, rounds)), "that adds the fastest rank of each round",
              "All ranks wait for the slowest."),
        Cause("mask_missing", ranks * len(places[0]) ** 2, "that counts all keys for each query",
              "A query sees a key only if key <= query."),
        Cause("own_key_missing", makespan(strict), "a query does not see its own key",
              "A query sees a key if key <= query."),
        Cause("one_round", max(rounds[0]), "that is round 0 alone",
              "There are as many rounds as ranks."),
        Cause("keys_stay", ranks * max(rounds[0]), "that counts the rank's own keys in each round",
              "In round k, rank r has the keys of rank (r - k) % N.")]


def _tensors(places) -> Places:
    return [torch.tensor(each) for each in places]


def as_assignment(returned, chunks: int, ranks: int, where: str) -> list[list[int]]:
    """What assign returned, as lists of ints. Raises Wrong unless each rank has equally many chunks
    and each chunk has one rank."""
    by_rank = as_list(returned)
    if by_rank is None or len(by_rank) != ranks:
        raise Wrong(f"{where}: assign returned {kind_of(returned)}, not one list for each rank",
                    "For example, [[0, 1], [2, 3]] for 4 chunks on 2 ranks.", code="wrong_type")
    found = [_numbers(chunk_list, rank, where) for rank, chunk_list in enumerate(by_rank)]
    times = Counter(chunk for each in found for chunk in each)
    # A chunk that nobody has is text that is not trained on; one that two ranks have counts twice.
    for chunk in range(chunks):
        if times[chunk] != 1:
            owners = [rank for rank, each in enumerate(found) if chunk in each]
            raise Wrong(f"{where}: chunk {chunk} is " + (
                "on no rank" if not owners else f"on ranks {owners}" if len(owners) > 1 else
                f"on rank {owners[0]} {times[chunk]} times"), "Each chunk has one rank.",
                        code="chunk_not_assigned_once")
    if stray := sorted(set(times) - set(range(chunks))):
        raise Wrong(f"{where}: there is no chunk {stray[0]}", f"They are 0 to {chunks - 1}.",
                    code="unknown_chunk")
    # What is passed around the ring must have one size: a receive needs to know it.
    for rank, each in enumerate(found):
        if len(each) != chunks // ranks:
            raise Wrong(f"{where}: rank {rank} has {counted(len(each), 'chunk')}, not "
                        f"{chunks // ranks}", "All pieces that go round the ring are equally long.",
                        code="unequal_pieces")
    return found


def _numbers(chunk_list, rank, where) -> list[int]:
    listed = as_list(chunk_list)
    numbers = [None] if listed is None else [as_number(chunk) for chunk in listed]
    if None in numbers or any(number != int(number) for number in numbers):
        raise Wrong(f"{where}: rank {rank} has {kind_of(chunk_list)}, not a list of chunk numbers",
                    code="wrong_type")
    return [int(number) for number in numbers]


def require_equal_rounds(assignment: list[list[int]], where: str) -> None:
    """Raises Wrong where one rank computes more pairs in a round than another."""
    rounds = pairs_by_round(places_of_chunks(assignment, _TOKENS))
    # Both in pairs of tokens: within a chunk on the diagonal a query sees half of the keys, so
    # pairs of chunks would not do.
    longer = makespan(rounds) / least_makespan(rounds)
    # The invariant: in every round, because all wait for the slowest before K and V go on. Equal
    # sums over all rounds are not enough.
    for number, by_rank in enumerate(rounds):
        if max(by_rank) > min(by_rank):
            slow, fast = by_rank.index(max(by_rank)), by_rank.index(min(by_rank))
            raise Wrong(f"{where}{_named(assignment)}: in round {number} rank {slow} computes "
                        f"{max(by_rank)} pairs and rank {fast} {min(by_rank)}; all rounds together "
                        f"take {longer:.3g} times as long as equal ones",
                        "A chunk near the end sees almost all keys, one near the beginning almost "
                        "none: which two together see as many as any other two?",
                        code="not_balanced")


def _named(assignment) -> str:
    ranks, each = len(assignment), len(assignment[0])
    if assignment == [list(range(each * rank, each * (rank + 1))) for rank in range(ranks)]:
        return ", contiguous pieces"
    if [sorted(chunks) for chunks in assignment] == [
            list(range(rank, ranks * each, ranks)) for rank in range(ranks)]:
        return ", round robin"
    return ""


_PICTURE_TOKENS = 6  # of a chunk in the picture of rounds
_CHUNK = 32  # tokens of a chunk in the table of assignments


@shows("7.12")
def show_rounds(assign: Callable, ring_attention: Callable) -> Picture:
    """Draws the pairs that each rank computes in each round on 4 ranks, of contiguous pieces and of
    the student's assignment, counted while the student's ring runs."""
    ranks, chunks = ring_runs.RANKS, 2 * ring_runs.RANKS
    mine = as_assignment(assign(chunks, ranks), chunks, ranks, f"{chunks} chunks on {ranks} ranks")
    contiguous = [[2 * rank, 2 * rank + 1] for rank in range(ranks)]
    guess = guessed("7.12")
    figure, axes = canvas(WIDTH, 6.6 + marks.HEADLINE + marks.NOTE_LINE * (guess is not None),
                          nrows=4, ncols=ranks, height_ratios=[2.1, 1, 2.1, 1])
    lines, data, multiples = [], {}, []
    for number, (title, assignment) in enumerate({"contiguous pieces": contiguous,
                                                  "your assignment": mine}.items()):
        places = places_of_chunks(assignment, _PICTURE_TOKENS)
        rounds = ring_runs.measured_rounds(ring_attention, places)
        data[title] = rounds
        longer = makespan(rounds) / least_makespan(rounds)
        multiples.append(longer)
        lines.append(f"{title}: {makespan(rounds):,} pairs one after the other, {longer:.2f} times "
                     "the minimum")
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
    before, after = (f"{multiple:.2f}" for multiple in multiples)
    lesson = f"Your assignment takes {after} times the minimum, contiguous pieces {before} times"
    marks.headline(figure, lesson)
    marks.note_below(figure, answer := marks.answered(guess, multiples[0], "times the minimum"))
    return Picture(figure, "\n".join([lesson, *lines, *filter(None, [answer])]), data=data)


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
def show_assignments(assign: Callable, critical_path: Callable) -> Table:
    """How many times as long as equal rounds the ring takes, by who has which tokens: the student's
    critical path, as a multiple of the minimum."""
    counts = (2, 4, 8, 16)

    def longer(assignment, tokens=_CHUNK):
        places = places_of_chunks(assignment, tokens)
        found = require_number(critical_path([each.tolist() for each in places]), "critical_path")
        return f"{found / least_makespan(pairs_by_round(places)):.2f}"

    rows = {"contiguous pieces": [longer([[2 * r, 2 * r + 1] for r in range(n)]) for n in counts],
            "round robin, 2 chunks a rank": [longer([[r, r + n] for r in range(n)])
                                             for n in counts],
            "round robin, token by token": [
                longer([range(r, 2 * n * _CHUNK, n) for r in range(n)], 1) for n in counts],
            "yours, 2 chunks a rank": [longer(as_assignment(
                assign(2 * n, n), 2 * n, n, f"{2 * n} chunks on {n} ranks")) for n in counts]}
    return Table("Pairs on the critical path, as a multiple of the minimum",
                 ("", *(f"{n} ranks" for n in counts)),
                 [(name, *numbers) for name, numbers in rows.items()])


@shows("7.12")
def show_ring_in_llama(ring_attention: Callable, assign: Callable) -> Table:
    """A small Llama of Hugging Face with the student's attention, each rank on its chunks of a
    text, beside the same model on the whole text."""
    ranks, chunks = ring_runs.RANKS, 2 * ring_runs.RANKS
    mine = as_assignment(assign(chunks, ranks), chunks, ranks, f"{chunks} chunks on {ranks} ranks")
    found = ring_runs.llama_runs(ring_attention, mine)
    rows = [("tokens of the text", f"{ring_runs.CONTEXT}"), ("tokens on a rank", f"{found.tokens}"),
            ("loss, mean over all tokens", f"{found.loss:.4f}"),
            ("largest difference of a logit", f"{found.logits:.0e}"),
            ("largest difference of a gradient", f"{found.gradients:.0e}")]
    return Table("A Llama on 4 ranks, compared with one process", ("", ""), rows,
                 note="The gradients of the weights were summed over ranks, because each rank has "
                      "other tokens.")


@shows("torch's context_parallel")
def show_context_parallel() -> Table:
    """What torch's own context_parallel does on this machine, on 2 ranks."""
    said = launch(ring_runs.torchs_context_parallel, ranks=2, quiet=True)[0]
    where = devices.plan(2)
    title = f"context_parallel on 2 ranks, {where.device} with {where.library}"
    if isinstance(said, str):
        return Table(title, ("it raised",), [(said,)],
                     note="It has implementations for CUDA's flash, efficient and cuDNN attention, "
                          "and none for the CPU's." if where.device == "cpu" else "")
    return Table(title, ("", ""), [("largest difference from full attention", f"{said[1]:.0e}")],
                 note="In bfloat16, so that the flash kernel is used.")

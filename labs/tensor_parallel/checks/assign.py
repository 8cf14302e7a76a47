"""Exercise 7.12: which chunks of a causal sequence each rank of the ring gets."""

from collections import Counter
from collections.abc import Callable

from labs.exercises.numbers import as_list, as_number
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.tensor_parallel.ring.cases import places_of_chunks
from labs.tensor_parallel.ring.pairs import least_makespan, makespan, pairs_by_round
from labs.words import counted

# (chunks, ranks): two for each rank on every number of ranks, and more on some
CASES = [(2 * ranks, ranks) for ranks in (4, 2, 3, *range(5, 17), 1)]
CASES += [(4 * ranks, ranks) for ranks in (2, 3, 4, 8)] + [(6 * ranks, ranks) for ranks in (3, 5)]
_TOKENS = 3  # of a chunk


@check("7.12")
def check_assign(assign: Callable):
    """assign(chunks, ranks): for each rank the numbers of its chunks; all ranks compute the same
    number of pairs in every round."""
    for chunks, ranks in CASES:
        where = f"{counted(chunks, 'chunk')} on {counted(ranks, 'rank')}"
        reject_unequal_rounds(as_assignment(assign(chunks, ranks), chunks, ranks, where), where)
    return ("on 1 to 16 ranks each chunk has one rank, and all ranks compute the same number of "
            "pairs in every round")


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


def reject_unequal_rounds(assignment: list[list[int]], where: str) -> None:
    """Raises Wrong where one rank computes more pairs in a round than another."""
    rounds = pairs_by_round(places_of_chunks(assignment, _TOKENS))
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

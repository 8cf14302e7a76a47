"""Exercise 0.3: the bytes that each rank of a ring sends, by formula and counted."""

from collections.abc import Callable

from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, require_number, require_signature
from labs.checks.on_ranks import WORLD_SIZES
from labs.checks.verdicts import check, shows
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.start_here import recorded_collectives

RING_SIZES = (96, 96_000)  # bytes, divisible by 4-byte numbers on 2, 3 and 4 ranks


@check("0.3")
def check_ring_bytes(ring_bytes: Callable):
    """The formula must give the bytes that a ring of sends and receives was seen to send."""
    require_signature(ring_bytes, ("size", "ranks"))
    for ranks in reversed(WORLD_SIZES):  # on 2 ranks too many formulas agree
        for size in RING_SIZES:
            counted = max(recorded_collectives.counted_bytes(ranks, size))
            judge_number(ring_bytes(size, ranks), counted, _byte_causes(counted, size, ranks),
                         f"{size:,} bytes on {ranks} ranks", "bytes",
                         "How many steps, and how many bytes leave in each?", source="each sent",
                         rel_tol=1e-6)
    return "your formula equals the bytes counted on rings of 2, 3 and 4 ranks"


def _byte_causes(counted, size, ranks) -> list[Cause]:
    return [
        Cause("whole_tensor_each_step", counted * ranks,
              "as if each step sent the whole tensor, but it sends one piece"),
        Cause("one_half_only", counted / 2,
              "one of the two halves, the reduce-scatter or the all-gather"),
        Cause("limit_for_many_ranks", 2 * size, "that is the limit for very many ranks"),
        Cause("sent_to_every_rank", (ranks - 1) * size,
              "what sending the whole tensor to every other rank would cost"),
        Cause("one_round_only", size, "as if the tensor went round once"),
        Cause("steps_not_bytes", 2 * (ranks - 1), "the number of steps, not of bytes"),
        Cause("elements_not_bytes", counted / 4, "counted in 4-byte numbers, not in bytes"),
        Cause("megabytes_not_bytes", counted / 1e6, "counted in MB, not in bytes")]


MEASURED = (2, 3, 4, 8)  # world sizes in the chart of the ring's bytes
CHART_SIZE = 12_000_000  # bytes: divides by all of them


@shows("0.3")
def ring_traffic(ring_bytes: Callable) -> Picture:
    """Counts what a ring sends on 2, 3, 4 and 8 ranks and draws it with the student's formula,
    and the guess for 4 ranks in MB."""
    require_signature(ring_bytes, ("size", "ranks"))
    rows = []
    for ranks in MEASURED:
        formula = require_number(ring_bytes(CHART_SIZE, ranks), "ring_bytes")
        counted = max(recorded_collectives.counted_bytes(ranks, CHART_SIZE))
        rows.append(Bar(f"{ranks} ranks", counted / 1e6,
                        formula / 1e6, guessed("0.3") if ranks == 4 else None))
    return bars(rows, unit="MB", title="sent by each rank to all-reduce 12 MB",
                limit=(2 * CHART_SIZE / 1e6, "2 S"))

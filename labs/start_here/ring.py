"""Exercise 0.3: the second half of a ring all-reduce, and the bytes that each rank of it sends, by
formula and counted."""

from collections.abc import Callable

import torch

from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, require_number, require_signature
from labs.checks.on_ranks import WORLD_SIZES
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.start_here import recorded_collectives
from labs.start_here.return_values import require_tensor
from labs.words import counted
from labs.workers import devices

RING_SIZES = (96, 96_000)  # bytes, divisible by 4-byte numbers on 2, 3 and 4 ranks


COPY = "`pieces` is a tuple of views into `mine`: copy_ writes into a view."


STEPS = "Every rank takes N - 1 steps: a send on one rank needs a receive on the next."


@check("0.3", hints={"item assignment": COPY, "deadlock": STEPS, "no_progress": STEPS})
def check_ring(ring_all_gather: Callable, ring_bytes: Callable):
    """The second half must complete all sums by sends of one piece, and the formula must give the
    bytes that the ring was seen to send."""
    require_signature(ring_all_gather, ("mine",))
    require_signature(ring_bytes, ("size", "ranks"))
    for ranks in reversed(WORLD_SIZES):  # on 2 ranks too many rings and formulas agree
        with devices.send_recv_device(ranks):
            tried = recorded_collectives.run_answer(
                recorded_collectives.try_ring, ring_all_gather, ranks=ranks)
        for rank, one in enumerate(tried):
            _require_sums(rank, ranks, one)
            _require_sends(rank, ranks, one)
    for ranks in reversed(WORLD_SIZES):
        sent = recorded_collectives.counted_bytes(ring_all_gather, ranks, *RING_SIZES)
        for size, seen in zip(RING_SIZES, sent, strict=True):
            judge_number(ring_bytes(size, ranks), seen, _byte_causes(seen, size, ranks),
                         f"{size:,} bytes on {ranks} ranks", "bytes",
                         "How many steps, and how many bytes leave in each?", source="each sent",
                         rel_tol=1e-6)
    return ("your ring completes all sums on 2, 3 and 4 ranks, and your formula equals the bytes "
            "counted on it")


def _require_sums(rank, ranks, tried):
    where, before, result = f"rank {rank} of {ranks}", tried.own, tried.result
    # Sends and receives alone: catches a collective that does the same.
    for name in tried.names:
        if name not in ("send", "recv"):
            raise Wrong(f"{where} called {name} itself", "Build it from lab.send_recv.",
                        code="ready_made")
    require_tensor(rank, ranks, result)
    if result.shape != before.shape:
        raise Wrong(f"{where} returned shape {list(result.shape)}, not {list(before.shape)}",
                    "A ring works in place: return `mine`.", code="wrong_shape")
    # 1111, 2222, ...: piece k of each rank is k + 1 times a power of ten.
    total = (torch.arange(ranks) + 1) * int("1" * ranks)
    rows = [tensor.reshape(ranks, -1)[:, 0].tolist() for tensor in (before, result, total)]
    wrong = [piece for piece, (_, held, wanted) in enumerate(zip(*rows, strict=True))
             if held != wanted]
    if not wrong:
        return
    if rows[1] == rows[0]:
        raise Wrong(f"{where} holds what it held at the start: piece {(rank + 1) % ranks} alone is "
                    "complete", f"What you receive must be copied into `mine`. {COPY}",
                    code="all_gather_missing")
    for piece in wrong:
        # Catches a second reduce-scatter.
        if rows[1][piece] == rows[0][piece] + rows[2][piece]:
            raise Wrong(f"{where}, piece {piece}: holds {rows[1][piece]}, which is the sum "
                        f"{rows[2][piece]} plus the part {rows[0][piece]} that was there",
                        "What arrives is a complete sum: copy it, and add nothing.",
                        code="added_not_copied")
    piece = wrong[0]
    # Catches a loop that ends too early, and a first piece that is not complete.
    raise Wrong(f"{where}, piece {piece}: holds {rows[1][piece]}, the sum is {rows[2][piece]}"
                + (", as at the start" if rows[1][piece] == rows[0][piece] else ""),
                f"At the start piece {(rank + 1) % ranks} is complete on this rank. Send the piece "
                "that became complete last, in each of N - 1 steps.", code="wrong_output")


def _require_sends(rank, ranks, tried):
    sends = [call.elements for call in tried.calls if call.kind == "send"]
    piece = len(tried.own) // ranks
    # One piece in each step: catches full tensors, and a step after the last one.
    if sends != [piece] * (ranks - 1):
        raise Wrong(f"rank {rank} of {ranks} sent {sum(sends) / piece:g} pieces in "
                    f"{counted(len(sends), 'send')}; {counted(ranks - 1, 'piece')} are enough",
                    "N - 1 steps, one piece in each.", code="wrong_traffic")


def _byte_causes(sent, size, ranks) -> list[Cause]:
    return [
        Cause("whole_tensor_each_step", sent * ranks,
              "as if each step sent the full tensor, but it sends one piece"),
        Cause("one_half_only", sent / 2,
              "one of the two halves, the reduce-scatter or the all-gather"),
        Cause("limit_for_many_ranks", 2 * size, "that is the limit for very many ranks"),
        Cause("sent_to_every_rank", (ranks - 1) * size,
              "what sending the full tensor to every other rank would cost"),
        Cause("one_round_only", size, "as if the tensor went round once"),
        Cause("steps_not_bytes", 2 * (ranks - 1), "the number of steps, not of bytes"),
        Cause("elements_not_bytes", sent / 4, "counted in 4-byte numbers, not in bytes"),
        Cause("megabytes_not_bytes", sent / 1e6, "counted in MB, not in bytes")]


MEASURED = (2, 3, 4, 8)  # world sizes in the chart of the ring's bytes
CHART_SIZE = 12_000_000  # bytes: divides by all of them


@shows("0.3")
def ring_traffic(ring_all_gather: Callable, ring_bytes: Callable) -> Picture:
    """Counts what the student's ring sends on 2, 3, 4 and 8 ranks and draws it with the student's
    formula, and the guess for 4 ranks in MB."""
    require_signature(ring_bytes, ("size", "ranks"))
    rows = []
    for ranks in MEASURED:
        formula = require_number(ring_bytes(CHART_SIZE, ranks), "ring_bytes")
        [sent] = recorded_collectives.counted_bytes(ring_all_gather, ranks, CHART_SIZE)
        rows.append(Bar(f"{ranks} ranks", sent / 1e6,
                        formula / 1e6, guessed("0.3") if ranks == 4 else None, palette.PLAIN))
    return bars(rows, unit="MB", title="sent by each rank to all-reduce 12 MB",
                limit=(2 * CHART_SIZE / 1e6, "twice the size"),
                lesson=f"From {MEASURED[0]} to {MEASURED[-1]} ranks: {rows[0].measured:.3g} to "
                       f"{rows[-1].measured:.3g} MB")

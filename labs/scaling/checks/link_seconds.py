"""Exercise 6.5: bytes of a ring all-reduce on a host's link, and its seconds."""

from dataclasses import astuple, dataclass
from math import isclose

from labs.exercises.numbers import (
    Mistake,
    as_number,
    judge_number,
    likeliest_cause,
    require_several,
    require_signature,
)
from labs.exercises.verdicts import Wrong, check
from labs.predictions.host_links import LinkTime, Topology, flat_all_reduce

ONE_BYTE = 0.999999  # less than one, which is what int() cuts off
NAMES = ("size", "hosts", "ranks", "alpha", "beta")


@dataclass(frozen=True)
class Case:
    """A tensor of `size` bytes on hosts with so many ranks each; α in seconds, β in bytes/s."""

    size: int
    hosts: int
    ranks: int
    alpha: float
    beta: float

    @property
    def world(self) -> int:
        return self.hosts * self.ranks

    @property
    def bytes(self) -> float:
        return flat_all_reduce(self.size, Topology(self.hosts, self.ranks))

    @property
    def seconds(self) -> float:
        return LinkTime(self.alpha, self.beta).seconds(self.bytes)

    def __str__(self):
        return (f"link_seconds({self.size}, hosts={self.hosts}, ranks={self.ranks}, "
                f"alpha={self.alpha:g}, beta={self.beta:g})")


# Odd sizes, and more hosts than ranks and fewer: what counts hosts, ranks of a host or all ranks
# differs in each. On one host nothing crosses a link.
CASES = (Case(8_000_000, 2, 2, 0.004, 25e6), Case(1_000_003, 2, 8, 0.002, 12.5e9),
         Case(64, 3, 2, 0.01, 6.25e6), Case(123_457, 8, 4, 0.0005, 1e9),
         Case(2**30, 16, 8, 0.0002, 50e9), Case(4_000_000, 5, 1, 0.003, 3.1e6),
         Case(4_000_000, 1, 4, 0.001, 25e6), Case(7, 2, 3, 0.25, 1.5))

_BYTES: tuple[Mistake, ...] = (
    Mistake("ring_one_rank_on_host", lambda case: 2 * (case.hosts - 1) / case.hosts * case.size,
            "that is a ring with one rank on each host", "N is the number of all ranks."),
    Mistake("ring_inside_one_host", lambda case: 2 * (case.ranks - 1) / case.ranks * case.size,
            "that is a ring inside one host", "N is the number of all ranks."),
    Mistake("reduce_scatter_alone", lambda case: case.bytes / 2, "that is a reduce-scatter alone",
            "An all-reduce is a reduce-scatter and an all-gather."),
    Mistake("counts_both_directions_together", lambda case: 2 * case.bytes,
            "that counts both directions together",
            "The link carries as many bytes in each direction at the same time."),
    Mistake("all_ranks_host_send_together", lambda case: case.ranks * case.bytes,
            "that is what all ranks of a host send together", "In a ring each rank sends to the "
            "next one only, and all but one of a host's ranks have that one on their own host."),
    Mistake("all_ranks_send_together", lambda case: case.world * case.bytes,
            "that is what all ranks send together",
            "Only one rank of a host sends over its link."),
    Mistake("own_piece_too", lambda case: 2 * case.size, "that is 2S",
            "No rank sends its own piece to itself: (N-1)/N."),
    Mistake("tensor_itself", lambda case: case.size, "that is the tensor itself",
            "How often does each piece pass?"),
    Mistake("on_one_host_no_byte", lambda case: 2 * (case.world - 1) / case.world * case.size,
            "on one host no byte passes its link",
            "The ranks of a host reach each other without it."),
    Mistake("in_bits", lambda case: 8 * case.bytes, "that is in bits",
            "Size and result are in bytes."))

_SECONDS: tuple[Mistake, ...] = (
    Mistake("missing", lambda case: case.bytes / case.beta, "α is missing", "α + bytes/β."),
    Mistake("size_not_bytes", lambda case: case.alpha + case.size / case.beta, "that is α + S/β",
            "Not S passes the link, but the bytes that you have just computed."),
    Mistake("takes_for_bits_per_second", lambda case: case.alpha + 8 * case.bytes / case.beta,
            "that takes β for bits per second", "β is in bytes per second."),
    Mistake("wrong_steps",
            lambda case: 2 * (case.world - 1) * case.alpha + case.bytes / case.beta,
            "that counts α once for each step of the ring",
            "This α is fitted to whole all-reduces."),
    Mistake("sends_both_directions_one_after", lambda case: case.alpha + 2 * case.bytes / case.beta,
            "that sends both directions one after the other", "They pass at the same time."),
    Mistake("multiplies", lambda case: case.alpha + case.bytes * case.beta, "that multiplies by β",
            "β is bytes per second."),
    Mistake("multiplies_rest", lambda case: case.alpha * case.bytes / case.beta,
            "that multiplies α by the rest", "α + bytes/β."))


@check("6.5")
def check_link_seconds(link_seconds):
    """link_seconds(size, hosts, ranks, alpha, beta) -> (bytes on a host's link in each direction,
    seconds) of a ring all-reduce."""
    require_signature(link_seconds, NAMES)
    answers = [require_several(link_seconds(*astuple(case)), ("bytes", "seconds"), f"{case}: it "
                               "returned", "numbers") for case in CASES]
    _judge_order(answers)
    for which, mistakes in enumerate((_BYTES, _SECONDS)):
        given = [as_number(pair[which]) for pair in answers]
        for at, case in enumerate(CASES):
            # Of a ring over all ranks one edge leaves each host, and it carries what one rank
            # sends: 2(N-1)/N · S. On one host none does.
            want = (case.bytes, case.seconds)[which]
            causes = likeliest_cause(mistakes, CASES, given, at)
            # Bytes may be cut off to a whole number, and seconds computed from that.
            judge_number(answers[at][which], want, causes,
                         f"{case}: the {('bytes', 'seconds')[which]}",
                         abs_tol=(ONE_BYTE, ONE_BYTE / case.beta)[which])
    return (f"bytes and seconds are right for {len(CASES)} cases, from one host to 16, and from "
            "7 bytes to a GiB")


def _judge_order(answers):
    """What the two numbers are shows only in their order."""
    case, pair = CASES[0], answers[0]
    if all(number is not None and isclose(number, want) for number, want in
           zip(map(as_number, pair), (case.seconds, case.bytes), strict=True)):
        raise Wrong(f"{case}: the two numbers are exchanged", "Return bytes, then seconds.",
                    code="swapped")

"""Exercise 5.9: how long a ring all-gather is in flight on a given link."""

from labs.exercises.numbers import Cause, judge_number
from labs.exercises.verdicts import check
from labs.predictions import traffic


@check("5.9")
def check_collective_seconds(collective_seconds):
    """collective_seconds(nbytes, ranks, bandwidth): seconds of a ring all-gather or
    reduce-scatter."""
    for nbytes, ranks, bandwidth in ((8e9, 5, 300e9), (1e9, 2, 1e9), (3e6, 8, 12.5e9),
                                     (5e6, 1, 1e9)):
        # (N-1)/N of the tensor arrives at each rank; with one rank nothing does.
        want = traffic.all_gather(nbytes, ranks) / bandwidth
        judge_number(collective_seconds(nbytes, ranks, bandwidth), want,
                     _causes(want, nbytes, ranks, bandwidth),
                     f"{nbytes:.0e} bytes on {ranks} ranks at {bandwidth:.3g} bytes/s: the time",
                     "s", abs_tol=0)
    return "(N-1)/N of the tensor through the link, on 1, 2, 5 and 8 ranks"


def _causes(want, nbytes, ranks, bandwidth) -> list[Cause]:
    return [(nbytes / bandwidth, "as if a rank received its own piece too",
             "Only (N-1)/N arrives."),
            (2 * want, "that of an all-reduce", "An all-gather is half of an all-reduce."),
            (nbytes / ranks / bandwidth, "that of one piece",
             "N-1 pieces arrive, one after the other."),
            ((ranks - 1) * nbytes / bandwidth, "as if nbytes were one rank's piece",
             "nbytes is the whole tensor; a piece is nbytes / ranks."),
            (8 * want, "8 times too long", "The bandwidth is in bytes, not bits."),
            (want * 1e3, "that is in milliseconds", "Return seconds.")]

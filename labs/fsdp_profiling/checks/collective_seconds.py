"""Exercise 5.9: how long a ring all-gather is in flight on a given link."""

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling.checks.common import raise_wrong, same
from labs.predictions import traffic


@check("5.9")
def check_collective_seconds(collective_seconds):
    """collective_seconds(nbytes, ranks, bandwidth): seconds of a ring all-gather or
    reduce-scatter."""
    for nbytes, ranks, bandwidth in ((8e9, 5, 300e9), (1e9, 2, 1e9), (3e6, 8, 12.5e9),
                                     (5e6, 1, 1e9)):
        got = collective_seconds(nbytes, ranks, bandwidth)
        want = traffic.all_gather(nbytes, ranks) / bandwidth
        if not isinstance(got, int | float) or isinstance(got, bool):
            raise Wrong(f"collective_seconds returned {got!r}, not a number of seconds")
        # (N-1)/N of the tensor arrives at each rank; with one rank nothing does.
        if not same(got, want, abs_tol=0.0):
            raise_wrong(got, want, _mistakes(want, nbytes, ranks, bandwidth),
                        f"{nbytes:.0e} bytes on {ranks} ranks at {bandwidth:.3g} bytes/s: the time",
                        " s")
    return "(N-1)/N of the tensor through the link, on 1, 2, 5 and 8 ranks"


def _mistakes(want, nbytes, ranks, bandwidth) -> list[tuple]:
    return [(nbytes / bandwidth, "is as if a rank received its own piece too",
             "Only (N-1)/N arrives."),
            (2 * want, "is that of an all-reduce", "An all-gather is half of an all-reduce."),
            (nbytes / ranks / bandwidth, "is one piece's",
             "N-1 pieces arrive, one after the other."),
            ((ranks - 1) * nbytes / bandwidth, "is as if nbytes were one rank's piece",
             "nbytes is the whole tensor; a piece is nbytes / ranks."),
            (8 * want, "is 8 times too long", "The bandwidth is in bytes, not bits."),
            (want * 1e3, "is in milliseconds", "Return seconds.")]

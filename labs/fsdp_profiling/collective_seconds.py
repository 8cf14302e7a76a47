"""Exercise 5.9: how long a ring all-gather is in flight on a given link."""

from collections.abc import Callable
from dataclasses import replace

from labs.checks.numbers import Cause, judge_number, require_signature
from labs.checks.verdicts import check, shows
from labs.fsdp_profiling import step_model
from labs.pictures import phases
from labs.pictures.picture import Picture
from labs.predictions.communication import traffic

# Bytes, ranks, bytes/s of the link, seconds of latency. In the last one almost all is latency.
_JOBS = ((8e9, 5, 300e9, 20e-6), (1e9, 2, 1e9, 0.25), (3e6, 8, 12.5e9, 1e-4), (4, 4, 1e9, 5e-5))


@check("5.9")
def check_collective_seconds(collective_seconds):
    """collective_seconds(nbytes, ranks, bandwidth, latency): seconds of a ring all-gather or
    reduce-scatter."""
    require_signature(collective_seconds, ("nbytes", "ranks", "bandwidth", "latency"))
    for nbytes, ranks, bandwidth, latency in _JOBS:
        # (N-1)/N of the tensor arrives at each rank, and however small it is, the latency remains.
        want = latency + traffic.all_gather(nbytes, ranks) / bandwidth
        judge_number(collective_seconds(nbytes, ranks, bandwidth, latency), want,
                     _causes(nbytes, ranks, bandwidth, latency),
                     f"{nbytes:.0e} bytes on {ranks} ranks at {bandwidth:.3g} bytes/s, "
                     f"{latency:.3g} s of latency: the time", "s", abs_tol=0)
    return "the latency, and (N-1)/N of the tensor through the link, on 2, 4, 5 and 8 ranks"


def _causes(nbytes, ranks, bandwidth, latency) -> list[Cause]:
    share = (ranks - 1) / ranks * nbytes / bandwidth
    mistakes = [
        Cause("own_piece_too", nbytes / bandwidth,
              "as if a rank received its own piece too", "Only (N-1)/N arrives."),
        Cause("all_reduce", 2 * share, "that of an all-reduce",
              "An all-gather is half of an all-reduce."),
        Cause("one_piece", nbytes / ranks / bandwidth, "that of one piece",
              "N-1 pieces arrive, one after the other."),
        Cause("nbytes_of_a_piece", (ranks - 1) * nbytes / bandwidth,
              "as if nbytes were one rank's piece",
              "nbytes is the whole tensor; a piece is nbytes / ranks."),
        Cause("bandwidth_in_bits", 8 * share, "the bytes take 8 times too long",
              "The bandwidth is in bytes, not bits.")]
    return [Cause("leaves_out_latency", share, "that leaves out the latency", "Add it once."),
            Cause("latency_each_piece", share + (ranks - 1) * latency,
                  "that adds the latency for each of the N-1 pieces",
                  "It is that of the whole collective: add it once."),
            Cause("takes_latency_away", share - latency, "that takes the latency away", "Add it."),
            Cause("in_milliseconds", (share + latency) * 1e3, "that is in milliseconds",
                  "Return seconds."),
            *(replace(one, number=one.number + latency) for one in mistakes),
            *(replace(one, sentence=f"{one.sentence}, and without the latency")
              for one in mistakes)]


@shows("5.9")
def show_links(collective_seconds: Callable, ranks: int = 8, tokens: int = 4096) -> Picture:
    """Draws the modelled step of Llama-2-7B on each link and in each order."""
    step = step_model.llama_7b(tokens)
    title = f"Llama-2-7B on {ranks} A100s, {tokens:,} tokens per rank"
    return phases.modelled_phases({title: step_model.on_links(step, collective_seconds, ranks)},
                                  {title: step.seconds_by_phase}, ranks)

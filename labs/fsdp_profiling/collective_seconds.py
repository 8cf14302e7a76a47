"""Exercise 5.9: how long a ring all-gather is in flight on a given link, and a layer of backward
with and without prefetch."""

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


# (seconds of a collective, of computing) of a layer: computing takes longer than both collectives,
# as long, longer than one of them, and shorter than one.
_LAYERS = ((1.0, 5.0), (2.0, 4.0), (3.0, 4.0), (7.0, 2.0))


@check("5.9")
def check_collective_seconds(collective_seconds, layer_seconds):
    """collective_seconds(nbytes, ranks, bandwidth, latency): seconds of a ring all-gather or
    reduce-scatter; layer_seconds(in_flight, computing, prefetch): of a layer's backward."""
    require_signature(collective_seconds, ("nbytes", "ranks", "bandwidth", "latency"))
    require_signature(layer_seconds, ("in_flight", "computing", "prefetch"))
    for nbytes, ranks, bandwidth, latency in _JOBS:
        # (N-1)/N of the tensor arrives at each rank, and however small it is, the latency remains.
        want = latency + traffic.all_gather(nbytes, ranks) / bandwidth
        judge_number(collective_seconds(nbytes, ranks, bandwidth, latency), want,
                     _causes(nbytes, ranks, bandwidth, latency),
                     f"{nbytes:.0e} bytes on {ranks} ranks at {bandwidth:.3g} bytes/s, "
                     f"{latency:.3g} s of latency: the time", "s", abs_tol=0)
    for in_flight, computing in _LAYERS:
        for prefetch in (True, False):
            # Both collectives of a layer pass the link. With prefetch they overlap with computing,
            # and the longer of the two decides; without, all wait for one another.
            both = 2 * in_flight
            want = max(computing, both) if prefetch else computing + both
            judge_number(layer_seconds(in_flight, computing, prefetch), want,
                         _layer_causes(in_flight, computing, prefetch),
                         f"a collective of {in_flight:g} s, {computing:g} s of computing, "
                         f"prefetch={prefetch}: the layer's time", "s")
    return ("the latency, and (N-1)/N of the tensor through the link, on 2, 4, 5 and 8 ranks; a "
            "layer takes the longer of computing and both collectives, and their sum without "
            "prefetch")


def _layer_causes(in_flight, computing, prefetch) -> list[Cause]:
    both = 2 * in_flight
    common = [
        Cause("leaves_out_reduce_scatter", max(computing, in_flight) if prefetch
              else computing + in_flight, "that is with one collective",
              "A layer of backward has two: an all-gather and a reduce-scatter."),
        Cause("exposed_alone", max(0.0, both - computing) if prefetch else both,
              "that is the exposed communication alone", "Return the seconds of the layer."),
        Cause("computing_alone", computing, "that is computing alone",
              "What is exposed takes time, too.")]
    if prefetch:
        return [*common,
                Cause("adds_overlapped", computing + both,
                      "as if nothing overlapped", "With prefetch the two overlap: the longer of "
                      "them decides."),
                Cause("shorter_of_two", min(computing, both), "that is the shorter of the two",
                      "The layer is over when both are."),
                Cause("one_hidden", max(computing, in_flight) + in_flight,
                      "as if one of the two collectives overlapped",
                      "Both overlap: the next all-gather and the last reduce-scatter.")]
    return [*common,
            Cause("overlaps_without_prefetch", max(computing, both), "as if both overlapped",
                  "Without prefetch the all-gather is issued when the layer before is done, and "
                  "queues behind its reduce-scatter."),
            Cause("reduce_scatter_hidden", max(computing, in_flight) + in_flight,
                  "as if one of the two collectives overlapped",
                  "The late all-gather queues behind the reduce-scatter, so that the rank waits "
                  "for both.")]


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
def show_links(collective_seconds: Callable, layer_seconds: Callable, ranks: int = 8,
               tokens: int = 4096) -> Picture:
    """Draws the modelled step of Llama-2-7B on each link and in each order; below it, the time of
    one layer of backward with and without prefetch."""
    step = step_model.llama_7b(tokens)
    title = f"Llama-2-7B on {ranks} A100s, {tokens:,} tokens per rank"
    layer, lines = step.work[-1], []
    for name, link in step_model.link_speeds(ranks).items():
        in_flight = collective_seconds(layer.bytes, ranks, link.bandwidth, link.latency)
        on, off = (1e3 * layer_seconds(in_flight, layer.backward, prefetch)
                   for prefetch in (True, False))
        lines.append(f"{name}: a layer of backward takes {on:.1f} ms with prefetch, {off:.1f} ms "
                     "without")
    return phases.modelled_phases({title: step_model.on_links(step, collective_seconds, ranks)},
                                  {title: step.seconds_by_phase}, ranks, "\n".join(lines))

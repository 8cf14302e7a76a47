"""Exercise 5.9: how long a ring all-gather is in flight on a given link, and a layer of backward
with and without prefetch."""

from collections.abc import Callable
from dataclasses import replace

from labs.checks.generator import new_generator
from labs.checks.numbers import (
    Cause,
    Mistake,
    common_cause,
    judge_number,
    require_number,
    require_signature,
)
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
    rng = new_generator()
    drawn = (rng.randrange(10**6, 10**9), rng.randint(3, 64), rng.uniform(1e9, 3e11),
             rng.uniform(1e-5, 1e-3))
    layers = (*_LAYERS, (rng.uniform(1, 9), rng.uniform(1, 20)))
    for nbytes, ranks, bandwidth, latency in (*_JOBS, drawn):
        # (N-1)/N of the tensor arrives at each rank, and however small it is, the latency remains.
        want = latency + traffic.all_gather(nbytes, ranks) / bandwidth
        judge_number(collective_seconds(nbytes, ranks, bandwidth, latency), want,
                     _causes(nbytes, ranks, bandwidth, latency),
                     f"{nbytes:.0e} bytes on {ranks} ranks at {bandwidth:.3g} bytes/s, "
                     f"{latency:.3g} s of latency: the time", "s", abs_tol=0)
    for prefetch in (True, False):
        answers = [require_number(layer_seconds(*layer, prefetch), "layer_seconds(…)")
                   for layer in layers]
        for at, (in_flight, computing) in enumerate(layers):
            # Both collectives of a layer pass the link. With prefetch they overlap with computing,
            # and the longer of the two decides; without, all wait for one another.
            both = 2 * in_flight
            judge_number(answers[at], max(computing, both) if prefetch else computing + both,
                         common_cause(_MISTAKES[prefetch], layers, answers, at),
                         f"a collective of {in_flight:g} s, {computing:g} s of computing, "
                         f"prefetch={prefetch}: the layer's time", "s")
    return ("the latency, and (N-1)/N of the tensor through the link, on 2, 4, 5 and 8 ranks; a "
            "layer takes the longer of computing and both collectives, and their sum without "
            "prefetch")


def _alike(number_with: Callable, number_without: Callable, code: str, sentence: str,
           hint: str) -> tuple[Mistake, Mistake]:
    """A mistake with prefetch, and the same one without. Each number is one of (seconds of a
    collective, of computing)."""
    return tuple(Mistake(code, lambda layer, number=number: number(*layer), sentence, hint)
                 for number in (number_with, number_without))


_BOTH = (
    _alike(lambda f, c: c, lambda f, c: c, "computing_alone", "that is computing alone",
           "What is exposed takes time, too."),
    _alike(lambda f, c: max(0.0, 2 * f - c), lambda f, c: 2 * f, "exposed_alone",
           "that is the exposed communication alone", "Return the seconds of the layer."),
    _alike(lambda f, c: max(c, f), lambda f, c: c + f, "leaves_out_reduce_scatter",
           "that is with one collective",
           "A layer of backward has two: an all-gather and a reduce-scatter."),
    _alike(lambda f, c: c + 2 * f, lambda f, c: max(c, 2 * f), "exchanges_the_cases",
           "that is the other case", "With prefetch, communication and computing overlap."),
    _alike(lambda f, c: max(c, f) + f, lambda f, c: max(c, f) + f, "one_hidden",
           "as if one of the two collectives overlapped", "With prefetch both overlap. Without it, "
           "the late all-gather queues behind the reduce-scatter, and the rank waits for both."))
# prefetch -> mistakes
_MISTAKES = {
    True: [*(one for one, _ in _BOTH), Mistake(
        "shorter_of_two", lambda layer: min(layer[1], 2 * layer[0]),
        "that is the shorter of the two", "The layer is over when both are.")],
    False: [one for _, one in _BOTH]}


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
              "nbytes is the full tensor; a piece is nbytes / ranks."),
        Cause("bandwidth_in_bits", 8 * share, "the bytes take 8 times too long",
              "The bandwidth is in bytes, not bits.")]
    return [Cause("leaves_out_latency", share, "that leaves out the latency", "Add it once."),
            Cause("latency_each_piece", share + (ranks - 1) * latency,
                  "that adds the latency for each of the N-1 pieces",
                  "It is that of the collective as a whole: add it once."),
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

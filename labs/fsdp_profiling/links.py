"""A model of one FSDP step on other links: what the rank computed is measured, how long a
collective would be under way there is calculated. One wire, which collectives use in the order in
which they are issued; no latency; nothing else on the wire.
"""

from dataclasses import dataclass

from labs.exercises.verdicts import Wrong, check, shows
from labs.meters import trace_units as units
from labs.predictions import hardware, traffic

GPU = hardware.gpu("A100-80")
LINKS = {"NVLink": GPU.nvlink, "PCIe 4": GPU.pcie, "100 GbE": 100e9 / 8}
"""Bytes per second in one direction; NVLink and PCIe as an A100 has them."""
UTILISATION = 0.4  # of a GPU's peak FLOP/s: what well-tuned training reaches
ORDERS = ("prefetch", "no prefetch", "nothing overlaps")


@dataclass(frozen=True)
class Work:
    """One unit's: seconds that forward and backward compute, and bytes of its parameters."""

    name: str
    forward: float
    backward: float
    bytes: int


@dataclass(frozen=True)
class Step:
    """work: the units in forward order, the root first. optimizer: seconds of computing. tokens:
    per rank; parameters: of the whole model."""

    work: tuple
    optimizer: float
    tokens: int
    parameters: int

    @property
    def seconds(self) -> float:
        """Of computing."""
        return sum(one.forward + one.backward for one in self.work) + self.optimizer

    @property
    def parts(self) -> dict:
        """Seconds of computing by phase."""
        return {"forward": sum(one.forward for one in self.work),
                "backward": sum(one.backward for one in self.work), "optimizer": self.optimizer}

    def on_gpu(self, tokens: int):
        """The same step, with this many tokens per rank, computed as fast as an A100 would: 6
        operations per parameter and token (Kaplan et al., arXiv 2001.08361, section 2.1), at 40 %
        of its peak. Every part is faster by the same factor."""
        seconds = 6 * self.parameters * tokens / (UTILISATION * GPU.flops)
        factor = seconds / self.seconds
        work = tuple(Work(one.name, one.forward * factor, one.backward * factor, one.bytes)
                     for one in self.work)
        return Step(work, self.optimizer * factor, tokens, self.parameters)


def measured(recorded) -> Step:
    """What rank 0 computed in a recorded step, unit by unit."""
    trace, sizes = recorded[0], recorded.job.preset
    steps = max(1, len(trace.steps))
    nbytes = {units.owner(trace, one).unit: one.bytes for one in trace.of("all_gather")}
    work = tuple(Work(unit, *(units.unit_seconds(trace, unit, phase) / steps
                              for phase in ("forward", "backward")), nbytes[unit])
                 for unit in units.units(trace))
    return Step(work, units.phase_seconds(trace, "optimizer") / steps,
                sizes.batch * sizes.context, sum(nbytes.values()) // 4)


def step_seconds(step: Step, under_way, order: str = "prefetch") -> float:
    """Seconds of the step when a collective of S bytes is under way for under_way(S) seconds.

    prefetch: a unit's all-gather is issued when the unit before it begins to compute. no prefetch:
    in backward it is issued when that unit is done, behind its reduce-scatter. nothing overlaps:
    the rank waits for every collective.
    """
    if order == "nothing overlaps":
        return step.seconds + sum(under_way(one.bytes) for one in
                                  [*step.work, *step.work[1:], *step.work])
    wire = now = under_way(step.work[0].bytes)
    for number, one in enumerate(step.work):
        if number + 1 < len(step.work):
            wire = max(wire, now) + under_way(step.work[number + 1].bytes)
        now = max(now + one.forward, wire)
    return _backward(step, under_way, order, now) + step.optimizer


def _backward(step, under_way, order, now) -> float:
    """The end of backward that begins at `now`. The root's parameters are still there, and its
    gradients are complete last."""
    root, *layers = step.work
    wire = now
    there = now  # when the next unit's parameters are
    for number, one in enumerate(reversed(layers)):
        if number == 0 or order == "no prefetch":
            wire = there = max(wire, now) + under_way(one.bytes)
        now = max(now, there)
        if order == "prefetch" and number + 1 < len(layers):
            wire = there = max(wire, now) + under_way(layers[-number - 2].bytes)
        now += one.backward
        wire = max(wire, now) + under_way(one.bytes)
    now += root.backward
    return max(wire, now) + under_way(root.bytes)


@check("5.9")
def check_wire_seconds(wire_seconds):
    """wire_seconds(nbytes, ranks, speed): seconds of a ring all-gather or reduce-scatter."""
    for nbytes, ranks, speed in ((8e9, 5, 300e9), (1e9, 2, 1e9), (3e6, 8, 12.5e9), (5e6, 1, 1e9)):
        got, want = wire_seconds(nbytes, ranks, speed), traffic.all_gather(nbytes, ranks) / speed
        if not isinstance(got, int | float) or isinstance(got, bool):
            raise Wrong(f"wire_seconds returned {got!r}, not a number of seconds")
        if abs(got - want) > 1e-9 * max(want, 1e-12):
            _explain(got, want, nbytes, ranks, speed)
    return "(N-1)/N of the tensor through the link, on 1, 2, 5 and 8 ranks"


def _explain(got, want, nbytes, ranks, speed):
    what = f"{nbytes:.0e} bytes on {ranks} ranks at {speed:.3g} bytes/s"
    known = [(nbytes / speed, "as if a rank received its own piece too", "Only (N-1)/N arrives."),
             (2 * want, "that of an all-reduce", "An all-gather is half of an all-reduce."),
             (nbytes / ranks / speed, "one piece's", "N-1 pieces arrive, one after the other."),
             ((ranks - 1) * nbytes / speed, "as if nbytes were one rank's piece",
              "nbytes is the whole tensor; a piece is nbytes / ranks."),
             (8 * want, "8 times too long", "The speed is in bytes, not bits."),
             (want * 1e3, "in milliseconds", "Return seconds.")]
    for value, sentence, hint in known:
        if abs(got - value) <= 1e-9 * max(abs(value), 1e-12):
            raise Wrong(f"{what}: the time is {sentence}", hint)
    raise Wrong(f"{what}: {got:.4g} s, not {want:.4g} s")


@shows("5.9")
def show_links(recorded, wire_seconds, ranks: int = 8, tokens: int = 8192):
    """Step time on each link and in each order, modelled: computing as measured here, and as fast
    as on an A100."""
    from labs.pictures import links as pictures

    here = measured(recorded)
    there = here.on_gpu(tokens)
    panels = {f"computed here, {here.tokens:,} tokens per rank": here,
              f"on an A100, {there.tokens:,} tokens per rank": there}
    return pictures.modelled(
        {title: _rows(step, wire_seconds, ranks) for title, step in panels.items()},
        {title: step.parts for title, step in panels.items()}, ranks)


def _rows(step, wire_seconds, ranks) -> list:
    """(link, order, seconds computing, seconds exposed)."""
    return [(link, order, step.seconds, step_seconds(
        step, lambda nbytes, speed=speed: wire_seconds(nbytes, ranks, speed), order) - step.seconds)
            for link, speed in LINKS.items() for order in ORDERS]

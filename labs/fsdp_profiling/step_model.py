"""A model of one FSDP step on other links: what the rank computed is measured, how long a
collective would be in flight there is calculated.

There is one link, which collectives use in the order in which they are issued; no latency; nothing
else on the link.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from labs.fsdp_profiling.recording import RecordedRun
from labs.meters import trace_units
from labs.predictions import hardware

GPU = hardware.gpu("A100-80")
LINKS = {"NVLink": GPU.nvlink, "PCIe 4": GPU.pcie, "100 GbE": 100e9 / 8}
"""Bytes per second in one direction; NVLink and PCIe as an A100 has them."""
UTILISATION = 0.4  # of a GPU's peak FLOP/s: what well-tuned training reaches
ORDERS = ("prefetch", "no prefetch", "nothing overlaps")


@dataclass(frozen=True)
class UnitWork:
    """One unit: seconds that its forward and backward compute, and bytes of its parameters."""

    name: str
    forward: float
    backward: float
    bytes: int


@dataclass(frozen=True)
class ModelledStep:
    """work: the units in forward order, the root first. optimizer: seconds of computing. tokens:
    per rank; parameters: of the whole model."""

    work: tuple[UnitWork, ...]
    optimizer: float
    tokens: int
    parameters: int

    @property
    def seconds(self) -> float:
        """Of computing."""
        return sum(self.seconds_by_phase.values())

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Of computing."""
        return {"forward": sum(one.forward for one in self.work),
                "backward": sum(one.backward for one in self.work), "optimizer": self.optimizer}

    def on_gpu(self, tokens: int) -> "ModelledStep":
        """Returns the same step with `tokens` tokens per rank, computed as fast as by an A100: 6
        operations per parameter and token (Kaplan et al., arXiv 2001.08361, section 2.1), at 40 %
        of its peak. Every part is faster by the same factor."""
        factor = 6 * self.parameters * tokens / (UTILISATION * GPU.flops) / self.seconds
        work = tuple(replace(one, forward=one.forward * factor, backward=one.backward * factor)
                     for one in self.work)
        return ModelledStep(work, self.optimizer * factor, tokens, self.parameters)


def measured_step(run: RecordedRun) -> ModelledStep:
    """Returns what rank 0 computed in a recorded step, unit by unit."""
    trace, sizes = run[0], run.config.preset
    nbytes = {trace_units.owner(trace, one).unit: one.bytes for one in trace.of("all_gather")}
    work = tuple(UnitWork(unit, *(trace_units.unit_seconds(trace, unit, phase)
                                  for phase in ("forward", "backward")), nbytes[unit])
                 for unit in trace_units.units(trace))
    return ModelledStep(work, trace_units.phase_seconds(trace, "optimizer"),
                        sizes.batch * sizes.context, sum(nbytes.values()) // 4)


def on_links(step: ModelledStep, collective_seconds: Callable, ranks: int) -> list[tuple]:
    """Returns (link, order, seconds computing, seconds exposed) for each link and each order."""
    return [(link, order, step.seconds, step_seconds(
        step, lambda nbytes, bandwidth=bandwidth: collective_seconds(nbytes, ranks, bandwidth),
        order) - step.seconds) for link, bandwidth in LINKS.items() for order in ORDERS]


def step_seconds(step: ModelledStep, in_flight: Callable[[float], float],
                 order: str = "prefetch") -> float:
    """Returns the seconds of the step if a collective of S bytes is in flight for in_flight(S).

    prefetch: a unit's all-gather is issued when the unit before it begins to compute. no prefetch:
    in backward it is issued when that unit is done, behind its reduce-scatter. nothing overlaps:
    the rank waits for every collective.
    """
    if order == "nothing overlaps":
        return step.seconds + sum(in_flight(one.bytes) for one in
                                  [*step.work, *step.work[1:], *step.work])
    link_free = now = in_flight(step.work[0].bytes)
    for one, following in zip(step.work, [*step.work[1:], None], strict=True):
        if following:
            link_free = max(link_free, now) + in_flight(following.bytes)
        now = max(now + one.forward, link_free)
    return _backward_end(step, in_flight, order, now) + step.optimizer


def _backward_end(step, in_flight, order, now) -> float:
    """The end of a backward that begins at `now`. The root's parameters are still there, and its
    gradients are complete last."""
    root, *layers = step.work
    link_free = gathered = now  # when the link is free; when the next unit's parameters are there
    layers.reverse()
    for number, (one, following) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
        if number == 0 or order == "no prefetch":
            link_free = gathered = max(link_free, now) + in_flight(one.bytes)
        now = max(now, gathered)
        if order == "prefetch" and following:
            link_free = gathered = max(link_free, now) + in_flight(following.bytes)
        now += one.backward
        link_free = max(link_free, now) + in_flight(one.bytes)
    now += root.backward
    return max(link_free, now) + in_flight(root.bytes)

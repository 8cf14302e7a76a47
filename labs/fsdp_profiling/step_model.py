"""A model of one FSDP step of Llama-2-7B on several links: computing is calculated from FLOPs, the
seconds of a collective by the student's function.

There is one link, which collectives use in the order in which they are issued; nothing else is on
it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from labs.predictions import hardware

GPU = hardware.gpu("A100-80")
UTILISATION = 0.4  # of a GPU's peak FLOP/s: what well-tuned training reaches
HIDDEN, FFN, VOCABULARY, LAYERS = 4096, 11008, 32000, 32  # of Llama-2-7B
HALF = 2  # bytes of a number in 16 bits: parameters and gradients are communicated in them
ORDERS = ("prefetch", "no prefetch", "nothing overlaps")
# Microseconds of a ring with NCCL's protocol for large messages: once, and for each step to the
# next rank (baseLatencies and hwLatencies of NCCL's cost model, github.com/NVIDIA/nccl).
_ONCE, _HOPS = 8.4, {"NVLink": 3.4, "PCIe 4": 5.7, "100 GbE": 14.0}
_BANDWIDTH = {"NVLink": GPU.nvlink, "PCIe 4": GPU.pcie, "100 GbE": 100e9 / 8}


@dataclass(frozen=True)
class LinkSpeed:
    """bandwidth: bytes per second in one direction. latency: seconds of each collective."""

    bandwidth: float
    latency: float


def link_speeds(ranks: int) -> dict[str, LinkSpeed]:
    """Returns name -> speed: NVLink and PCIe as an A100 has them, and a network."""
    return {name: LinkSpeed(_BANDWIDTH[name], 1e-6 * (_ONCE + (ranks - 1) * hop))
            for name, hop in _HOPS.items()}


@dataclass(frozen=True)
class UnitWork:
    """One unit: seconds that its forward and backward compute, and bytes of its parameters."""

    name: str
    forward: float
    backward: float
    bytes: int


@dataclass(frozen=True)
class ModelledStep:
    """work: the units in forward order, the root first."""

    work: tuple[UnitWork, ...]

    @property
    def seconds(self) -> float:
        """Of computing."""
        return sum(self.seconds_by_phase.values())

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Of computing."""
        return {"forward": sum(one.forward for one in self.work),
                "backward": sum(one.backward for one in self.work)}


def llama_7b(tokens: int) -> ModelledStep:
    """Returns forward and backward of Llama-2-7B on A100s, `tokens` tokens per rank; each layer is
    a unit. Two operations per parameter and token in forward, four in backward (Kaplan et al.,
    arXiv 2001.08361, section 2.1); the embedding is only looked up."""
    # Query, key, value and output; gate, up and down; two norms.
    layer = 4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN
    head = VOCABULARY * HIDDEN

    def unit(name, multiplied, parameters):
        forward = 2 * multiplied * tokens / (UTILISATION * GPU.flops)
        return UnitWork(name, forward, 2 * forward, HALF * parameters)

    # The root: embedding, head and the last norm; only the head is multiplied.
    return ModelledStep((unit("root", head, 2 * head + HIDDEN),
                         *(unit(f"layer {number}", layer, layer) for number in range(LAYERS))))


def on_links(step: ModelledStep, collective_seconds: Callable, ranks: int) -> list[tuple]:
    """Returns (link, order, seconds computing, seconds exposed) for each link and each order."""
    return [(name, order, step.seconds, step_seconds(
        step, lambda nbytes, link=link: collective_seconds(nbytes, ranks, link.bandwidth,
                                                           link.latency), order) - step.seconds)
        for name, link in link_speeds(ranks).items() for order in ORDERS]


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
    # The root's gather comes first, and nothing computes meanwhile.
    link_free = now = in_flight(step.work[0].bytes)
    for one, following in zip(step.work, [*step.work[1:], None], strict=True):
        if following:
            link_free = max(link_free, now) + in_flight(following.bytes)
        now = max(now + one.forward, link_free)
    return _backward_end(step, in_flight, order, now)


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

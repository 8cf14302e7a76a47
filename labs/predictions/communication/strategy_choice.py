"""Which of DDP, HSDP and FSDP trains fastest on several hosts, of those whose model states fit.

Bytes: of the parameters and of the gradients that are communicated, S each. A ring moves as fast
as its slowest edge; within a host that is `inside`, between hosts `across`, the link of a host.
Computing and communication that it hides are left out: they are the same for all three.
"""

from dataclasses import dataclass

from labs.predictions.communication import traffic
from labs.predictions.communication.host_links import Topology
from labs.predictions.memory.recipes import model_states

STRATEGIES = ("DDP", "HSDP", "FSDP")
RECIPE = "bf16, fp32 master"  # 16 bytes of states for each parameter
ELEMENT = 2  # bytes of a parameter or a gradient that is communicated


@dataclass(frozen=True)
class Links:
    """Bytes per second in one direction. inside: between two GPUs of a host; across: of a host's
    link to the others, all its network cards together. NCCL uses them all at once, in rings as in
    trees (github.com/NVIDIA/nccl/issues/530)."""

    inside: float
    across: float


def held_bytes(strategy: str, parameters: float, topology: Topology) -> float:
    """Bytes of model states on a GPU: replicated under DDP, sharded over the ranks of a host under
    HSDP, and over all ranks under FSDP (ZeRO-3). Source: Rajbhandari et al., "ZeRO", SC 2020,
    section 3."""
    shards = {"DDP": 1, "HSDP": topology.ranks, "FSDP": topology.world_size}[strategy]
    return model_states(parameters, RECIPE, ranks=shards, stage=3).total


def step_seconds(strategy: str, parameters: float, topology: Topology, links: Links) -> float:
    """Seconds of a step's collectives, one after the other.

    DDP: an all-reduce over all ranks. FSDP: two all-gathers and a reduce-scatter over all ranks.
    HSDP: these three inside the host, then an all-reduce of the shards' gradients between hosts:
    each rank sends 2(H-1)/H · S/R, and the R ranks of a host share its link.
    """
    size = ELEMENT * parameters
    if strategy == "HSDP":
        return (_sharded(size, topology.ranks) / links.inside
                + traffic.all_reduce(size, topology.hosts) / links.across)
    ranks = topology.world_size
    sent = traffic.all_reduce(size, ranks) if strategy == "DDP" else _sharded(size, ranks)
    return sent / slowest(topology, links)


def fastest_that_fits(parameters: float, memory: float, topology: Topology,
                      links: Links) -> str | None:
    """The strategy with the fewest seconds of those that keep at most `memory` bytes of states on a
    GPU; the first one of STRATEGIES where two are equal, None where none fits."""
    fitting = [each for each in STRATEGIES if held_bytes(each, parameters, topology) <= memory]
    return min(fitting, default=None,
               key=lambda each: step_seconds(each, parameters, topology, links))


def slowest(topology: Topology, links: Links) -> float:
    """Bytes per second of the slowest edge of a ring over all ranks; infinite where there is one
    rank."""
    edges = [links.across] * (topology.hosts > 1) + [links.inside] * (topology.ranks > 1)
    return min(edges, default=float("inf"))


def _sharded(size, ranks) -> float:
    return sum(traffic.stage_passes(3).values()) * traffic.all_gather(size, ranks)

"""What collectives put on the link of a host, and how long that takes.

Several hosts with the same number of ranks each; a host has one link, which stands for all its
network cards together, and its ranks reach each other without it. Ranks are numbered host by host,
as torchrun does. size is always that of the complete tensor, in bytes. The counts are those of ring
algorithms (traffic.py), in which a rank sends to the next one only: of a ring over all ranks one
edge leaves each host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labs.predictions.communication import traffic


@dataclass(frozen=True)
class Topology:
    """hosts: how many; ranks: on each of them."""

    hosts: int
    ranks: int

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1 is needed")

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks


def flat_all_reduce(size: float, topology: Topology) -> float:
    """Bytes in each direction of a host's link: 2(n-1)/n · S on n ranks, what one rank sends; 0
    where there is one host."""
    return _leaving(traffic.all_reduce(size, topology.world_size), topology)


def hierarchical_all_reduce(size: float, topology: Topology) -> float:
    """Bytes in each direction of a host's link: 2(H-1)/H · S on H hosts.

    Reduce-scatter inside the host leaves each of its R ranks S/R; each all-reduces that with the
    ranks that have the same piece on the other hosts; all-gather inside the host. On two hosts this
    is S, and the flat ring's 2(n-1)/n · S is more as soon as a host has two ranks. Source: Jia et
    al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018 (arXiv
    1807.11205), on hierarchical all-reduce; there one rank of a host does what all share here.
    NCCL's trees put as much on the link, on average over the hosts: its two trees have H-1 edges
    each, and S/2 passes each edge in both directions.
    """
    return traffic.all_reduce(size, topology.hosts)


def flat_fsdp_step(size: float, topology: Topology, reshard: bool = True) -> float:
    """Bytes in each direction of a host's link in a step of FSDP over all ranks: all Ψ parameters
    gathered twice, once without `reshard`, and the gradients reduce-scattered: 3(n-1)/n · S."""
    passes = sum(traffic.stage_passes(3, reshard).values())
    return _leaving(passes * traffic.all_gather(size, topology.world_size), topology)


def hybrid_fsdp_step(size: float, topology: Topology) -> float:
    """Bytes in each direction of a host's link in a step of HSDP: parameters are gathered and
    gradients reduce-scattered inside the host; only the sums of the shards, S/R a rank, are
    all-reduced between hosts: 2(H-1)/H · S. Source: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv
    2304.11277), section 3.2.2."""
    return hierarchical_all_reduce(size, topology)


def _leaving(nbytes, topology) -> float:
    return nbytes if topology.hosts > 1 else 0.0


@dataclass(frozen=True)
class LinkTime:
    """t = α + bytes/β, the α–β model: what a collective takes whose bytes pass a link.

    alpha: seconds that it takes without any; beta: bytes per second. One α and β hold for one kind
    of collective on one number of ranks: a ring's α grows with the number of its steps.
    """

    alpha: float
    beta: float

    def seconds(self, nbytes: float) -> float:
        """Seconds of a collective that puts so many bytes on the link, in each direction."""
        return self.alpha + nbytes / self.beta

    def __str__(self):
        alpha = f"α = {1e3 * self.alpha:.2f} ms"
        if alpha == "α = 0.00 ms":
            alpha = "α is too small to see on this link"
        return f"{alpha}, β = {self.beta / 1e6:.1f} MB/s"


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> LinkTime:
    """The α and β with the minimum sum of squared relative errors: absolute ones would leave α,
    which decides small sizes, to the noise of the largest. α is 0 where it would be negative.

    nbytes: on the link, at least two different sizes; seconds: measured. Raises ValueError where
    the seconds do not grow with the bytes.
    """
    nbytes, seconds = np.asarray(nbytes, float), np.asarray(seconds, float)
    if nbytes.shape != seconds.shape or len(set(nbytes)) < 2:
        raise ValueError("a fit takes as many seconds as sizes, and at least two different sizes")
    if (nbytes <= 0).any() or (seconds <= 0).any():
        raise ValueError("sizes and seconds are greater than 0")
    alpha, per_byte = _least_squares(np.stack([1 / seconds, nbytes / seconds], axis=1))
    if alpha < 0:
        alpha, (per_byte,) = 0.0, _least_squares((nbytes / seconds)[:, None])
    if per_byte <= 0:
        raise ValueError("the seconds do not grow with the bytes: take larger sizes, more rounds, "
                         "or a slower link")
    return LinkTime(float(alpha), float(1 / per_byte))


def _least_squares(relative) -> np.ndarray:
    """The factors with which the columns, each a part of the measured time, add up to it."""
    return np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)[0]

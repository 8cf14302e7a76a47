"""What runs on the ranks of two hosts: collectives that are timed on links of several bandwidths,
and whose bytes the kernel counts."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labs.workers.hosts import LinkBytes, link_bytes, set_bandwidth

SETTLE = 0.15  # seconds until the acknowledgments of what was sent have passed, too
ROUNDS = 2  # in turns; a slow link takes what its bandwidth says, whatever else the machine does
FIT_ROUNDS = 3  # of what α and β are fitted to: they must predict other links within 5 %


@dataclass(frozen=True)
class Timed:
    """Seconds of something on a link of this bandwidth, by round: those of the slowest rank. size:
    of the full tensor, or of all parameters, in bytes."""

    what: str
    bandwidth: str
    size: int
    rounds: list[float]

    @property
    def seconds(self) -> float:
        """The fastest round: nothing passes a link sooner than its bandwidth allows, and a core
        that is busy elsewhere only adds to it."""
        return min(self.rounds)


@dataclass(frozen=True)
class Counted:
    """Bytes that host 0 sent and received over its link meanwhile, as the kernel counts them, with
    all headers. size: as of `Timed`."""

    what: str
    size: int
    sent: int
    received: int


def shape_links(bandwidth: str) -> None:
    """On all ranks: gives each link this bandwidth."""
    if os.environ["LOCAL_RANK"] == "0":
        set_bandwidth(bandwidth)
    dist.barrier()


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of `work()` from a moment at which all ranks are ready, on the slowest of them."""
    # Without a barrier, what is timed is how much later than this rank the last one comes.
    dist.barrier()
    began = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def count_bytes(what: str, size: int, work: Callable[[], object]) -> Counted:
    """On all ranks: what passes this rank's link while `work()` runs."""
    barriers = _link_bytes_of(lambda: None)
    passed = _link_bytes_of(work) - barriers
    return Counted(what, size, passed.sent, passed.received)


def _link_bytes_of(work) -> LinkBytes:
    """What passes the link while `work()` runs, between two barriers that are counted too."""
    dist.barrier()
    time.sleep(SETTLE)
    before = link_bytes()
    # The ranks of a host share its counters: none of them may send before all have read them.
    dist.barrier()
    work()
    # A rank returns when it has what it needs: what it sends may still wait for the link.
    dist.barrier()
    time.sleep(SETTLE)
    passed = link_bytes() - before
    dist.barrier()  # as before the work
    return passed


def time_in_turns(work: dict[tuple[str, str, int], Callable], rounds: int) -> list[Timed]:
    """On all ranks: seconds of each entry, in turns, so that what disturbs the machine for a while
    disturbs all. work: (what, bandwidth, size) -> function."""
    found = {key: [] for key in work}
    for _ in range(rounds):
        before = None
        for key, each in work.items():
            if key[1] != before:
                shape_links(before := key[1])
            found[key].append(seconds_of(each))
    return [Timed(*key, seconds) for key, seconds in found.items()]


# What the α and β of an all-reduce are fitted to, and what they are tried on: (bandwidth, bytes).
FITTED = tuple(("50mbit", size) for size in (250_000, 500_000, 1_000_000, 2_000_000))
TRIED = (("50mbit", 3_000_000), ("25mbit", 2_000_000), ("100mbit", 2_000_000),
         ("100mbit", 4_000_000))
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
COUNTED_SIZE = 4_000_000


def measure_all_reduces(rounds: int = FIT_ROUNDS) -> dict[str, list[dict]]:
    """On all ranks: the seconds of all-reduces of FITTED and TRIED, and the bytes that collectives
    of each kind put on the link."""
    work = {("all-reduce", bandwidth, size): collective("all-reduce", size)
            for bandwidth, size in (*FITTED, *TRIED)}
    counted = {kind: collective(kind, COUNTED_SIZE) for kind in KINDS}
    for each in (*work.values(), *counted.values()):
        each()  # the first one of a kind and size makes its buffers
    found = [count_bytes(kind, COUNTED_SIZE, each) for kind, each in counted.items()]
    return as_json(time_in_turns(work, rounds), found)


def measure_hierarchical(hierarchical_all_reduce: Callable, hosts: int, bandwidths: Sequence[str],
                         size: int = COUNTED_SIZE, rounds: int = ROUNDS) -> dict[str, list[dict]]:
    """On all ranks: the seconds, and the bytes on the link, of torch's all-reduce, which is a flat
    ring over all ranks, and of the one given."""
    mesh = host_mesh(hosts)
    tensor = torch.ones(size // 4)
    ways = {"flat": lambda: dist.all_reduce(tensor),
            "hierarchical": lambda: hierarchical_all_reduce(tensor, mesh)}
    for each in ways.values():
        each()
    found = [count_bytes(what, size, each) for what, each in ways.items()]
    work = {(what, bandwidth, size): each for bandwidth in bandwidths
            for what, each in ways.items()}
    return as_json(time_in_turns(work, rounds), found)


def host_mesh(hosts: int) -> DeviceMesh:
    """On all ranks: a mesh with a row for each host. "inside": the ranks of one host; "across": the
    ranks that have the same place on each host."""
    return init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts),
                            mesh_dim_names=("across", "inside"))


def as_json(timed: list[Timed], counted: list[Counted]) -> dict[str, list[dict]]:
    """Both as dictionaries, which JSON knows."""
    return {"timed": [asdict(one) for one in timed], "counted": [asdict(one) for one in counted]}


def collective(kind: str, size: int) -> Callable[[], None]:
    """A function that runs a collective on a full tensor of `size` bytes, on all ranks."""
    ranks = dist.get_world_size()
    whole = torch.ones(size // 4 // ranks * ranks)
    shard = torch.ones(len(whole) // ranks)
    calls = {"all-reduce": lambda: dist.all_reduce(whole),
             "all-gather": lambda: dist.all_gather_single(whole, shard),
             "reduce-scatter": lambda: dist.reduce_scatter_single(shard, whole)}
    return calls[kind]

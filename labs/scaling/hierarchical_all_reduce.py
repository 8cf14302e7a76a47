"""Exercise 6.6: an all-reduce in three steps, of which only the middle one leaves the host."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.checks.guesses import guessed
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.meters.traffic import Traffic
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.communication import traffic
from labs.predictions.communication.host_links import (
    LinkTime,
    Topology,
    flat_all_reduce,
    hierarchical_all_reduce,
)
from labs.scaling.host_groups import HostTraffic, require_collectives
from labs.scaling.link_collectives import host_mesh
from labs.scaling.link_measurements import measure_hierarchical
from labs.scaling.link_recordings import LinkRun
from labs.scaling.link_seconds import link_name
from labs.workers.hosts.links import read_bandwidth

# Ranks -> hosts of the meshes that are tried on them: 2 × 2, and 2 × 3 and 3 × 2, so that a host's
# ranks are not as many as the hosts; one host, and one rank on each.
MESHES = {4: (2, 1, 4), 6: (2, 3)}
LARGE = 1001  # elements: 2 and 3 do not divide it
HINTS = {
    "outputShape[0] * worldSize": "Pad a copy of the tensor with zeros to a multiple of the ranks "
    "of a host.",
    ".dtype() ==": "A buffer has the dtype of the tensor: tensor.new_empty(...) makes one.",
    "input tensor must be the same size as output": "The output of reduce_scatter_single has 1/R "
    "of its input's elements, and the input of all_gather_single 1/R of its output's: pad."}


@check("6.6", hints=HINTS)
def check_hierarchical_all_reduce(hierarchical_all_reduce):
    """hierarchical_all_reduce(tensor, mesh): the sum over all ranks, in place; mesh["inside"] are
    the ranks of a host, mesh["across"] those with the same place on each host."""
    for ranks, hosts in MESHES.items():
        on_ranks(_try_meshes, hierarchical_all_reduce, hosts, world_sizes=(ranks,))
    return ("the sum is right on meshes of 2 × 2, 2 × 3 and 3 × 2 ranks, for sizes that they do "
            "not divide, too; between hosts each rank sends only its share, 2(H-1)/H · S/R")


def _try_meshes(hierarchical_all_reduce, numbers_of_hosts):
    for hosts in numbers_of_hosts:
        mesh = host_mesh(hosts)
        ranks = mesh["inside"].size()
        for tensor in _tensors():
            where = (f"{hosts} hosts × {ranks} ranks, {str(tensor.dtype).removeprefix('torch.')} "
                     f"of shape {list(tensor.shape)}")
            calls = _judged_sum(hierarchical_all_reduce, tensor, mesh, where)
            if tensor.numel() == LARGE:
                raise_on_all_ranks(_judge_traffic, HostTraffic(calls, ranks), tensor, hosts, where)


def _tensors() -> list[torch.Tensor]:
    """Whole numbers, so that sums are exact in any order, with as many digits as the dtype has, so
    that a sum in a smaller one shows. One is not contiguous."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def draw(*shape, dtype=torch.float32):
        most = _most(dtype)
        return torch.randint(-most, most, shape, generator=generator).to(dtype)

    return [draw(24), draw(LARGE), draw(5, 7), draw(1), draw(4, 3, dtype=torch.float64).t(),
            draw(7, dtype=torch.int64)]


def _most(dtype) -> int:
    """So that the sum over up to 8 ranks is exact in the dtype: 24 and 53 bits, and 63."""
    return 2 ** {torch.float32: 20, torch.float64: 45, torch.int64: 58}[dtype]


def _judged_sum(hierarchical_all_reduce: Callable, tensor, mesh, where) -> list:
    before, want = tensor.clone(), tensor.clone()
    # The tensors of all ranks before the call: from their sums the right result and the wrong ones
    # are made.
    everyone = [torch.empty(want.shape, dtype=want.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, want.contiguous())
    with Traffic() as traffic, traffic.marked_waits():
        returned = hierarchical_all_reduce(tensor, mesh)
        forgotten = traffic.never_waited_for()
    inside = dist.get_process_group_ranks(mesh["inside"].get_group())
    raise_on_all_ranks(_judge_waits, forgotten, where)
    raise_on_all_ranks(_judge_values, tensor, returned, before, everyone, inside,
                       HostTraffic(traffic.calls, len(inside)), where)
    return traffic.calls


def _judge_waits(forgotten, where):
    """What is not waited for may be done in time, or not."""
    if forgotten:
        raise Wrong(f"{where}: rank {dist.get_rank()} does not wait for its "
                    f"{forgotten[0].kind} of {forgotten[0].bytes:,} bytes",
                    "With async_op=True a collective returns before it is done: call .wait() on "
                    "what it returns.", code="never_waited")


def _judge_values(tensor, returned, before, everyone, inside, traffic, where):
    rank, total = f"{where}: rank {dist.get_rank()}", sum(everyone)
    # In place, as dist.all_reduce: the caller looks at its own tensor.
    if torch.equal(tensor, total):
        return
    if torch.equal(tensor, before):
        is_other = isinstance(returned, torch.Tensor) and returned is not tensor
        raise Wrong(f"{rank}: the tensor is as it was; the sum should be in it"
                    + f", and you returned {kind_of(returned)}" * is_other,
                    "In place: tensor.copy_(...), in its own shape. An assignment to the name "
                    "`tensor` leaves the caller's as it is.", code="not_in_place")
    across = [other for other in range(len(everyone))
              if other % len(inside) == dist.get_rank() % len(inside)]
    causes = {"the mean over all ranks, not the sum": total / len(everyone),
              "the sum over the ranks of its own host only": sum(everyone[one] for one in inside),
              "the sum over the ranks with the same place on each host only":
                  sum(everyone[one] for one in across),
              f"{len(inside)} times the sum": len(inside) * total,
              f"{len(everyone) // len(inside)} times the sum":
                  len(everyone) // len(inside) * total}
    found = next((name for name, value in causes.items()
                  if torch.equal(tensor.double(), value.double())), None)
    if found:
        raise Wrong(f"{rank} has {found}", code="wrong_result")
    # A group that was forgotten: the pieces of other places are added, too.
    for call in filter(traffic.is_crowded, traffic.crossing):
        _refuse_crowded(call, where)
    # Each element is off by less than the digits of a 16-bit number.
    if torch.allclose(tensor.double(), total.double(), rtol=0.01, atol=0.01 * _most(total.dtype)):
        raise Wrong(f"{rank} has the sum with fewer digits than {total.dtype} has",
                    "Reduce in the dtype of the tensor.", code="fewer_digits")
    wrong = int((tensor != total).sum())
    raise Wrong(f"{rank}: {wrong} of {tensor.numel()} elements are not the sum over all ranks",
                "Each rank keeps the piece of its own number inside the host; the last ranks may "
                "have padding in theirs.", code="wrong_sum")


def _refuse_crowded(call, where):
    raise Wrong(f"{where}: {call.kind} of {call.bytes:,} bytes runs over ranks "
                f"{list(call.members)}, several of them on one host",
                "Between hosts: the group of mesh[\"across\"], which has one rank of each.",
                code="wrong_group")


def _judge_traffic(traffic: HostTraffic, tensor, hosts, where):
    require_collectives(traffic, where)
    # Invariant: between hosts a rank sends no more than its share. `padded` allows for padding to a
    # multiple of the ranks.
    ranks, size = traffic.ranks, tensor.numel() * tensor.element_size()
    padded = size + 2 * ranks * hosts * tensor.element_size()
    # Several ranks of a host in one ring between hosts: the flat all-reduce.
    for call in traffic.crossing:
        if traffic.is_crowded(call):
            _refuse_crowded(call, where)
    # Whole tensors between hosts: R times the bytes of the link.
    most = 2 * (hosts - 1) / hosts * padded / ranks
    if (sent := traffic.sent(traffic.crossing)) > most:
        raise Wrong(f"{where}: rank {dist.get_rank()} sends {sent:,.0f} bytes to other hosts; its "
                    f"share, 2(H-1)/H · S/R, is {2 * (hosts - 1) / hosts * size / ranks:,.0f}",
                    "Reduce-scatter inside the host first: then only S/R is left to all-reduce.",
                    code="too_much_between_hosts")
    # A whole all-reduce inside the host costs as much as the reduce-scatter and the all-gather
    # together, and the all-gather comes on top.
    most = 2 * (ranks - 1) / ranks * padded
    if (sent := traffic.sent(traffic.within)) > most:
        raise Wrong(f"{where}: rank {dist.get_rank()} sends {sent:,.0f} bytes inside its host; a "
                    "reduce-scatter and an all-gather, 2(R-1)/R · S, are "
                    f"{2 * (ranks - 1) / ranks * size:,.0f}",
                    "Inside: reduce_scatter_single, then all_gather_single; nothing else.",
                    code="too_much_inside_hosts")


@shows("6.6")
def show_hierarchical(answer: Callable, run: LinkRun | None = None) -> Picture:
    """Draws bytes and seconds of the flat and of the student's all-reduce. run: None means that
    both are measured now."""
    run = run or measure_hierarchical(answer)
    size, ways = run.counted[0].size, ("flat", "hierarchical")
    ranks = run.topology.world_size
    predicted = [traffic.all_reduce(size, ranks), hierarchical_all_reduce(size, run.topology)]
    bandwidths = list(dict.fromkeys(one.bandwidth for one in run.timed))
    panels = [Panel("MB on the link", "MB", [run.sent(way) for way in ways], 1e6, predicted,
                    guessed=(None, guessed("6.6") and 1e6 * guessed("6.6")))]
    panels += [Panel(f"seconds, {link_name(one)}", "s", [run.seconds(way, one) for way in ways],
                     predicted=[each / (read_bandwidth(one) / 8) for each in predicted],
                     colour=palette.PHASES["communication"]) for one in bandwidths]
    return side_by_side(ways, panels, "predicted: bytes by formula, and these bytes at the link's "
                        "bandwidth" + f"\n{run.note}" * bool(run.note),
                        f"hierarchical: {run.sent(ways[1]) / run.sent(ways[0]):.0%} of the "
                        "flat all-reduce's bytes on the link")


@shows("All-reduces on GPUs")
def show_on_gpus(size: float = 14e9, ranks: int = 8, inside: float = 450e9,
                 card: float = 50e9) -> Table:
    """Returns a table of both all-reduces by formula, on two hosts with GPUs: with a network card
    for each GPU, as in an H100 node, and with one card a host. inside, card: bytes per second in
    one direction, of a GPU's NVLink and of a card.

    NCCL uses all cards of a host at once, in rings as in trees
    (github.com/NVIDIA/nccl/issues/530), so that they count as one link with their sum.
    """
    rows = []
    for cards, name in ((ranks, "a card for each GPU"), (1, "one card a host")):
        time = LinkTime(0.0, cards * card)
        flat = flat_all_reduce(size, Topology(2, ranks))
        # the ranks of a host share its cards
        between = flat_all_reduce(size, Topology(2, 1))
        seconds, across = time.seconds(flat), time.seconds(between)
        within = traffic.all_reduce(size, ranks)
        # a ring is as slow as its slowest edge, and each of its edges carries as much
        rows += [(name, "flat ring", flat, flat, max(seconds, flat / inside)),
                 (name, "hierarchical, step by step", between, within, across + within / inside),
                 (name, "hierarchical, in pieces", between, within, max(across, within / inside))]
    return Table(f"{size / 1e9:g} GB on two hosts with {ranks} GPUs each, {inside / 1e9:g} GB/s "
                 f"inside, cards of {8 * card / 1e9:g} Gbit/s, by formula",
                 ("cards", "all-reduce", "GB between hosts", "GB a GPU sends inside", "ms"),
                 [(*names, f"{sent / 1e9:.1f}", f"{within / 1e9:.1f}", f"{1e3 * seconds:.0f}")
                  for *names, sent, within, seconds in rows], left=1,
                 note="In pieces, as NCCL's trees do: while one piece is inside, the one before is "
                      "between the hosts. At best this takes the longer of the two.")

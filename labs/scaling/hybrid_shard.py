"""Exercise 6.7: HSDP, shards inside each host and replicas across hosts."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from labs.checks.guesses import guessed
from labs.checks.on_ranks import close, on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.traffic import Traffic
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.predictions.memory.shards import padded
from labs.scaling.host_groups import HostTraffic
from labs.scaling.link_measurements import measure_training
from labs.scaling.link_recordings import LinkRun
from labs.scaling.link_seconds import link_name
from labs.scaling.link_strategies import (
    MeasuredModel,
    hybrid,
    model_bytes,
    predicted_link_bytes,
    resident_bytes,
    root_bytes,
)
from labs.training import data, models
from labs.training.loop import train

HOSTS = {4: (2,), 6: (2, 3)}  # ranks -> numbers of hosts that are tried on them
LAYERS, WIDTH, CONTEXT = 3, 37, 8  # neither 2 nor 3 divides the width
BYTES = 4
_PLACES = ("The mesh has one place for each rank: (hosts, ranks of a host), and a host has "
           "dist.get_world_size() // hosts of them.")
HINTS = {"overlapping meshes": "The blocks first, the root last.",
         "Mesh should not be bigger": _PLACES, "list index out of range": _PLACES}


@check("6.7", hints=HINTS)
def check_hybrid_shard(hybrid_shard):
    """hybrid_shard(model, hosts): fully_shard of each block and of the model, shards inside each
    host, replicas across hosts. Ranks are numbered host by host."""
    for ranks, numbers in HOSTS.items():
        on_ranks(_try_hosts, hybrid_shard, numbers, world_sizes=(ranks,), timeout=60)
    return ("on 2 × 2, 2 × 3 and 3 × 2 ranks a rank stores Ψ/R parameters, gathers and "
            "reduce-scatters inside its host, all-reduces only its shard's gradients across, and "
            "trains as one process does")


class _BlocksOfTwo(MeasuredModel):
    """Each block has two linear layers, so that units of one layer are no blocks."""

    def __init__(self):
        super().__init__(LAYERS, WIDTH, CONTEXT)
        self.layers = nn.ModuleList(nn.Sequential(layer, nn.Linear(WIDTH, WIDTH))
                                    for layer in self.layers)
        models.move_to_rank(self)


def _try_hosts(hybrid_shard, numbers_of_hosts):
    for hosts in numbers_of_hosts:
        ranks = dist.get_world_size() // hosts
        where = f"{hosts} hosts × {ranks} ranks"
        model = _BlocksOfTwo()
        whole = copy.deepcopy(model)
        # SGD, because AdamW hides a constant factor in all gradients.
        built = hybrid(hybrid_shard, hosts, model, torch.optim.SGD, lr=0.5)
        raise_on_all_ranks(_judge_sharded, built[0], whole, ranks, hosts, where)
        calls = _train_both(built, whole)
        raise_on_all_ranks(_judge_traffic, HostTraffic(calls, ranks), whole, hosts, where)
        raise_on_all_ranks(_judge_trained, _full(built[0]), whole, where)


def _train_both(built, whole, steps=3) -> list:
    """Trains both on all ranks' batches, and returns the collectives of the last step."""
    # Each rank trains on two rows of its own; the reference, a single process, on those of all
    # ranks.
    own = [data.xy_batches(1, 2, seed=100 * step + dist.get_rank())[0] for step in range(steps)]
    everyone = [[data.xy_batches(1, 2, seed=100 * step + rank)[0] for rank in
                 range(dist.get_world_size())] for step in range(steps)]
    batches = [{name: torch.cat([one[name] for one in step]) for name in step[0]}
               for step in everyone]
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.5), batches)
    train(*built, own[:-1])
    with Traffic() as traffic:
        train(*built, own[-1:])
    return [call for call in traffic.calls if call.elements]


def _full(module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]


def _judge_sharded(module, whole: nn.Module, ranks, hosts, where):
    rank = f"{where}: rank {dist.get_rank()}"
    kept = resident_bytes(module)
    shapes = [tuple(p.shape) for p in whole.parameters()]
    share, total = (BYTES * sum(padded(shape, over) for shape in shapes) for over in (ranks, 1))
    flat = BYTES * sum(padded(shape, ranks * hosts) for shape in shapes)
    names = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
    # Invariant: each host has one full copy of the parameters, sharded evenly over its ranks.
    if names:
        raise Wrong(f"{rank}: {names[0]!r} is not sharded: {kept:,} bytes of parameters are "
                    f"resident, of {total:,}", "fully_shard each of model.layers, then the model.",
                    code="not_sharded")
    # What no unit below the root has is gathered with the root, before the first block runs.
    split = [name for name, block in module.named_modules()
             if any(block is each for each in models.blocks(module))
             and not isinstance(block, FSDPModule)]
    if split and len(set(_meshes(module))) == 1:
        raise Wrong(f"{rank}: {split[0]!r} is not a unit, though parts of it may be one",
                    "fully_shard each of model.layers, then the model.", code="wrong_units")
    if kept == share:
        return
    # Without a mesh fully_shard shards over all ranks.
    over_all = {name: shape == (ranks * hosts,) for (name, _), shape in
                zip(module.named_parameters(), _meshes(module), strict=True)}
    if len(set(over_all.values())) == 2:
        flat_name, other = (next(name for name in over_all if over_all[name] is is_flat)
                            for is_flat in (True, False))
        raise Wrong(f"{rank}: {flat_name!r} is sharded over all {ranks * hosts} ranks, {other!r} "
                    "is not", "fully_shard gets mesh=mesh for each block and for the model: "
                    "without it, it shards over all ranks.", code="other_mesh")
    if kept <= flat:
        raise Wrong(f"{rank} stores {kept:,} bytes of parameters, 1/{ranks * hosts} of the model: "
                    "the parameters are sharded over all hosts, so every all-gather crosses the "
                    "link",
                    "A mesh with two dimensions: fully_shard shards over the second one and "
                    "replicates over the first.", code="sharded_over_all_hosts")
    raise Wrong(f"{rank} stores {kept:,} bytes of parameters; 1/{ranks} of the model, a share for "
                f"each rank of its host, is {share:,}",
                "The first dimension of the mesh is the hosts, the second the ranks of a host.",
                code="wrong_shards")


def _meshes(module) -> list[tuple[int, ...]]:
    """The shape of the mesh of each parameter, all of which are DTensors."""
    return [tuple(p.device_mesh.shape) for p in module.parameters()]


def _judge_traffic(traffic: HostTraffic, whole, hosts, where):
    rank, units = f"{where}: rank {dist.get_rank()}", LAYERS + 1
    # Only sums of shards leave a host: a gather or a scatter between hosts is flat FSDP, or HSDP
    # with the dimensions exchanged.
    for call in traffic.crossing:
        if call.kind != "all_reduce":
            raise Wrong(f"{rank}: {call.kind} of {call.bytes:,} bytes runs over ranks "
                        f"{list(call.members)}, on several hosts",
                        "The ranks of one host are neighbours: 0 … R-1, then R … 2R-1. They are a "
                        "row of the mesh, its second dimension.", code="wrong_group")
        if traffic.is_crowded(call):
            raise Wrong(f"{rank}: all_reduce of {call.bytes:,} bytes runs over ranks "
                        f"{list(call.members)}, several of them on one host",
                        "fully_shard with a 2-D mesh all-reduces by itself, and only shards.",
                        code="extra_collective")
    reduced = [call for call in traffic.within if call.kind == "reduce_scatter"]
    gathered = [call for call in traffic.within if call.kind == "all_gather"]
    if len(reduced) != units:
        raise Wrong(f"{rank}: gradients leave in {len(reduced)} reduce-scatters; {LAYERS} blocks "
                    f"and the root make {units}", "fully_shard each block, then the model.",
                    code="wrong_units")
    # Without the all-reduce the hosts drift apart; with it, each shard's gradients are sent once.
    sums, shares = (sum(call.bytes for call in calls) for calls in (traffic.crossing, reduced))
    if sums * traffic.ranks != shares:
        raise Wrong(f"{rank}: {sums:,} bytes of gradients are all-reduced between hosts; its "
                    f"shards have {shares // traffic.ranks:,}",
                    "The mesh of all hosts goes to fully_shard, not one row of it.",
                    code="not_reduced_between_hosts")
    # By default FSDP2 leaves the root gathered from forward until backward: one all-gather less.
    if len(gathered) not in (2 * units - 1, 2 * units):
        raise Wrong(f"{rank}: {len(gathered)} all-gathers in a step; each block is gathered in "
                    f"forward and again in backward: {2 * units - 1} or {2 * units} with the root",
                    "Leave reshard_after_forward as it is.", code="gathered_too_often")
    if other := {call.kind for call in traffic.within} - {"reduce_scatter", "all_gather"}:
        raise Wrong(f"{rank}: {other.pop()} inside the host: HSDP needs none", "",
                    code="extra_collective")


def _judge_trained(full, whole, where):
    for got, (name, want) in zip(full, whole.named_parameters(), strict=True):
        if not close(got.detach(), want.detach()):
            raise Wrong(f"{where}: rank {dist.get_rank()}: after three steps {name!r} is not what "
                        "one process makes of all ranks' batches",
                        "fully_shard averages over both dimensions: is anything scaled besides?",
                        code="differs_from_reference")


@shows("6.7")
def show_training(hybrid_shard: Callable, run: LinkRun | None = None) -> Picture:
    """Draws what a step of each strategy sends over the link, how long it takes, and how much of
    the parameters is resident on a rank. run: None means that all are measured now."""
    run = run or measure_training(hybrid_shard)
    names = [one.what for one in run.timed]
    size, root = model_bytes(), root_bytes()
    panels = [
        Panel("MB on the link per step", "MB", [run.sent(name) for name in names], 1e6,
              [predicted_link_bytes(name, size, root, run.topology) for name in names]),
        Panel(f"seconds a step, {link_name(run.timed[0].bandwidth)}", "s",
              [one.seconds for one in run.timed], guessed=[
                  guessed("6.7") if name == "HSDP" else None for name in names],
              colour=palette.PHASES["communication"]),
        Panel("MB of parameters per rank", "MB", [run.sent(f"{name}, resident") for name in names],
              1e6, colour=palette.MEMORY["parameters"])]
    caption = (f"{size / 1e6:.1f} MB of parameters, {root / 1e6:.1f} of them at the root; "
               "predicted by ring algorithms\nZeRO-3 gathers the root again in backward; FSDP "
               "keeps it from forward on, and so gathers it once less")
    sent = {name: run.sent(name) for name in names}
    least = min(sent, key=sent.get)
    return side_by_side(names, panels, caption + f"\n{run.note}" * bool(run.note),
                        f"{least} sends least over the link: {sent[least] / 1e6:.3g} MB per step")

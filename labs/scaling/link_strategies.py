"""What runs on the ranks of two hosts: training steps of DDP, ZeRO-3, FSDP and HSDP, whose bytes on
the link are counted and whose seconds are taken in turns."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs.predictions.communication import traffic
from labs.predictions.communication.host_links import Topology, flat_all_reduce, hybrid_fsdp_step
from labs.scaling.link_collectives import (
    ROUNDS,
    Counted,
    as_json,
    count_bytes,
    shape_links,
    time_in_turns,
)
from labs.scaling.on_hosts import START
from labs.training import data, strategies
from labs.training.loop import ModuleAndOptimizer, train
from labs.training.models import DeepMLP, trainable

# 0.6 million parameters: 2.3 MB, which 50 Mbit/s need 0.37 s for; half of them at the root, as a
# small model has them in its embedding.
LAYERS, WIDTH, CONTEXT = 3, 300, 512
BATCH = 4
BANDWIDTH = "50mbit"
WARM_UP = 2  # steps: DDP rebuilds its buckets after the first


class MeasuredModel(DeepMLP):
    """The model that every strategy trains."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, context: int = CONTEXT):
        super().__init__(layers, width, context=context)


def model_bytes() -> int:
    """Bytes of its parameters in fp32, and of its gradients."""
    return _bytes_named("")


def root_bytes() -> int:
    """Bytes of the parameters that no layer has: FSDP gathers them with the root."""
    return model_bytes() - _bytes_named("layers.")


def _bytes_named(beginning: str) -> int:
    with torch.device("meta"):
        return 4 * sum(p.numel() for name, p in trainable(MeasuredModel())
                       if name.startswith(beginning))


def measure_strategies(hybrid_shard: Callable, hosts: int, bandwidth: str = BANDWIDTH,
                       rounds: int = ROUNDS) -> dict[str, list[dict]]:
    """On all ranks: bytes on the link, seconds and bytes of resident parameters of a step of each
    strategy. hybrid_shard(model, hosts) wraps a model as HSDP."""
    chosen = {"DDP": strategies.ddp, "ZeRO-3": strategies.fsdp2, "FSDP": fsdp,
              "HSDP": partial(hybrid, hybrid_shard, hosts)}
    batch = data.xy_batches(1, BATCH, CONTEXT, seed=dist.get_rank())
    size, work, resident = model_bytes(), {}, []
    for name, strategy in chosen.items():
        built = strategy(MeasuredModel(), torch.optim.SGD, lr=0.01)
        work[name] = partial(train, *built, batch)
        train(*built, WARM_UP * batch)
        resident.append(Counted(f"{name}, resident", size, *2 * [resident_bytes(built[0])]))
    found = [count_bytes(name, size, step) for name, step in work.items()]
    timed = time_in_turns({(name, bandwidth, size): step for name, step in work.items()}, rounds)
    shape_links(START)  # the last messages pass at once
    return as_json(timed, found + resident)


def fsdp(model, optimizer_class, **settings) -> ModuleAndOptimizer:
    """FSDP2 as `fully_shard` leaves it by itself: the root stays gathered until backward.
    `strategies.fsdp2` gathers the root in backward again, as ZeRO-3 does."""
    module, optimizer = strategies.fsdp2(model, optimizer_class, **settings)
    # recurse=False: for the root alone; blocks stay as they are.
    module.set_reshard_after_forward(False, recurse=False)
    return module, optimizer


def hybrid(hybrid_shard: Callable, hosts: int, model, optimizer_class,
           **settings) -> ModuleAndOptimizer:
    """A strategy that wraps a model by hybrid_shard(model, hosts)."""
    hybrid_shard(model, hosts)
    return model, optimizer_class(model.parameters(), **settings)


def resident_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that this rank keeps from step to step."""
    # A DTensor has no storage of its own that could be measured: its shard is `_local_tensor`.
    local = (getattr(p, "_local_tensor", p) for p in module.parameters())
    return sum(p.untyped_storage().nbytes() for p in local)


def predicted_link_bytes(name: str, size: float, root: float, topology: Topology) -> float:
    """Bytes that a step puts on a host's link in each direction, by ring algorithms. size: of all
    parameters; root: of those that FSDP gathers with the root, once, and keeps until backward."""
    if name == "HSDP":
        return hybrid_fsdp_step(size, topology)
    if name == "DDP":
        return flat_all_reduce(size, topology)
    passes = sum(traffic.stage_passes(3).values())
    gathered_less = root if name == "FSDP" else 0
    return traffic.all_gather(passes * size - gathered_less, topology.world_size)

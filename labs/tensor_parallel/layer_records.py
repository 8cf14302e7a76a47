"""What a layer of a Llama sends and keeps on a rank: measured as the difference between a deeper
and a shallower model, so that embedding, head and loss do not count."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

from labs.meters import memory
from labs.meters.traffic import Traffic
from labs.predictions.communication.traffic import passes
from labs.tensor_parallel.kept_activations import activation_bytes
from labs.training import data, models
from labs.training.loop import ModuleAndOptimizer
from labs.workers import devices

BATCH, SEQUENCE, BYTES = 2, 64, 4
SIZES = {"hidden": 128, "heads": 8, "kv_heads": 4, "intermediate": 448, "context": SEQUENCE}
_DEPTHS = (1, 3)  # layers
_ORDER = ("all_gather", "reduce_scatter", "all_reduce")  # in which a picture stacks them
Strategy = Callable  # (model, optimizer_class, **settings) -> (module, optimizer)


@dataclass(frozen=True)
class LayerTraffic:
    """Of one layer and step: kind -> calls, and kind -> bytes that a rank sends, by ring
    algorithms."""

    calls: dict[str, float]
    sent: dict[str, float]


@dataclass(frozen=True)
class LayerMemory:
    """What one layer keeps for backward after forward, in bytes: by part, as autograd saves it, and
    the total that the memory meter finds."""

    parts: dict[str, float]
    total: float


def llama(layers: int) -> nn.Module:
    """The model of these measurements, on the rank's device."""
    return models.move_to_rank(models.llama(layers, **SIZES))


def batch() -> data.Batch:
    """The batch that all ranks have."""
    [drawn] = data.lm_batches(1, BATCH, SEQUENCE)
    return {name: tensor.to(devices.device()) for name, tensor in drawn.items()}


def unit_bytes() -> int:
    """Bytes of b·s·h numbers."""
    return BYTES * BATCH * SEQUENCE * SIZES["hidden"]


def whole(model: nn.Module, optimizer_class: type, **settings) -> ModuleAndOptimizer:
    """The strategy that divides nothing."""
    return model, optimizer_class(model.parameters(), **settings)


def layer_traffic(strategies: list[Strategy]) -> list[LayerTraffic]:
    """On a rank: what a layer sends in a step under each strategy."""
    return [_traffic(strategy) for strategy in strategies]


def _traffic(strategy) -> LayerTraffic:
    shallow, deep = (_calls_of_a_step(strategy, layers) for layers in _DEPTHS)
    more, ranks = _DEPTHS[1] - _DEPTHS[0], dist.get_world_size()
    # Known kinds first, in the order of the pictures.
    kinds = sorted({call.kind for call in deep},
                   key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER))

    def difference(count):
        return {kind: (sum(count(call) for call in deep if call.kind == kind)
                       - sum(count(call) for call in shallow if call.kind == kind)) / more
                for kind in kinds}

    return LayerTraffic(difference(lambda _: 1), difference(
        lambda call: passes(call.kind) * (ranks - 1) / ranks * call.bytes))


def _calls_of_a_step(strategy, layers) -> list:
    module, optimizer = strategy(llama(layers), torch.optim.SGD, lr=0.1)
    # loss_parallel is for logits that are DTensors, as those of torch's plan; others are not
    # touched.
    with loss_parallel(), Traffic() as traffic:
        module(**batch()).loss.backward()
        optimizer.step()
    return traffic.calls


def layer_memory(strategies: list[Strategy]) -> list[LayerMemory]:
    """On a rank: what a layer keeps under each strategy."""
    return [_memory(strategy) for strategy in strategies]


def _memory(strategy) -> LayerMemory:
    more = _DEPTHS[1] - _DEPTHS[0]
    shallow, deep = (_kept(strategy, layers) for layers in _DEPTHS)
    return LayerMemory({part: (deep[0][part] - shallow[0][part]) / more for part in deep[0]},
                       (deep[1] - shallow[1]) / more)


def _kept(strategy, layers) -> tuple[dict[str, int], float]:
    def build():
        return strategy(llama(layers), torch.optim.SGD, lr=0.1)

    report = memory.record(build, [batch()])
    return activation_bytes(build()[0], batch()), report.phases["forward"].activations


def both_counts(strategy: Strategy, layers: int) -> dict[str, tuple[int, int]]:
    """On a rank: collective -> (calls that torch's CommDebugMode counts, calls that Traffic counts)
    in forward and backward of one step."""
    module, _ = strategy(llama(layers), torch.optim.SGD, lr=0.1)
    with loss_parallel(), Traffic() as traffic, CommDebugMode() as torchs:
        module(**batch()).loss.backward()
    counted = {str(operator).rsplit(".", 1)[-1]: number
               for operator, number in torchs.get_comm_counts().items()}
    names = {"all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor",
             "reduce_scatter": "reduce_scatter_tensor"}
    return {kind: (counted.get(name, 0), len(traffic.of(kind))) for kind, name in names.items()}

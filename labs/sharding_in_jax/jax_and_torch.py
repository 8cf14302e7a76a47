"""The same block and the same three layouts in torch: the collectives that its own classes call,
beside JAX's, and who notices a sum that is left out."""

import functools
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from labs.checks.guesses import guessed
from labs.checks.verdicts import Verdict, shows
from labs.meters.traffic import CollectiveCall, Traffic
from labs.pictures import marks
from labs.pictures.in_scripts import print_in_script
from labs.pictures.tables import Table
from labs.sharding_in_jax.jax_layouts import CompiledCollective
from labs.sharding_in_jax.layouts import measured_layouts
from labs.sharding_in_jax.scaffold import SHAPES, block_arrays
from labs.words import counted
from labs.workers.launcher import launch


@functools.cache
def torch_collectives(ranks: int = 4) -> dict[str, list[CollectiveCall]]:
    """Layout -> what rank 0 calls in forward and backward of the block. On the CPU, as JAX's
    programs beside it."""
    return launch(_count_all, ranks=ranks, quiet=True, device="cpu")[0]


def _count_all():
    return {name: _count(strategy, cuts_tokens)
            for name, (strategy, cuts_tokens) in _STRATEGIES.items()}


def _count(strategy, cuts_tokens) -> list[CollectiveCall]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    values = {name: torch.tensor(array) for name, array in block_arrays().items()}
    up, down = (nn.Linear(*SHAPES[name], bias=False) for name in ("up", "down"))
    # JAX's arrays are (in, out), nn.Linear's weight is (out, in).
    up.weight.data, down.weight.data = values["up"].T.contiguous(), values["down"].T.contiguous()
    module = strategy(nn.Sequential(up, nn.ReLU(), down))
    # Its gradient is needed: in a model x comes from the layer below.
    x = (values["x"].chunk(ranks)[rank] if cuts_tokens else values["x"]).requires_grad_()
    with Traffic() as traffic:
        module(x).square().mean().backward()
    return traffic.calls


def _mesh():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _fsdp(block):
    # The outermost unit would else stay gathered until backward.
    return fully_shard(block, mesh=_mesh(), reshard_after_forward=True)


def _tensor_parallel(block):
    return parallelize_module(block, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


# Layout -> the strategy, and whether each rank has tokens of its own.
_STRATEGIES = {"DDP": (DistributedDataParallel, True), "FSDP": (_fsdp, True),
               "TP": (_tensor_parallel, False)}
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
Collectives = Sequence[CompiledCollective | CollectiveCall]


@shows("7.26")
def show_collectives(layouts: Callable) -> Table | Verdict:
    """The collectives that JAX's compiler puts into forward and backward of the block, beside those
    that torch's classes call, and why they differ."""
    measured = measured_layouts(layouts, {"n": 4})
    if isinstance(measured, Verdict):
        return measured
    torchs = torch_collectives()
    rows = [row for name, layout in measured.items() if not layout.refused
            for row in _rows(name, layout.collectives, torchs.get(name, ()))]
    reduced = sum(call.bytes for call in getattr(measured.get("TP"), "collectives", ())
                  if call.kind == "all_reduce")
    answer = marks.answered(guessed("7.26"), reduced / 1e3, "kB under TP")
    return Table("Collectives of forward and backward",
                 ("layout", "collective", "JAX, compiled", "torch", "why they differ"), rows,
                 left=4, note="JAX: from the text of the program compiled for 4 CPU devices. "
                 "torch: DDP, fully_shard and parallelize_module, counted on 4 ranks."
                 + (answer and f" {answer}"))


def _rows(name, jaxs: Collectives, torchs: Collectives) -> list[tuple]:
    rows = []
    for kind in _KINDS:
        ours, theirs = ([call for call in calls if call.kind == kind] for calls in (jaxs, torchs))
        if ours or theirs:
            rows.append((name if not rows else "", kind.replace("_", "-"), _counted(ours),
                         _counted(theirs), _reason(kind, ours, theirs, jaxs, torchs)))
    return rows


def _counted(calls) -> str:
    nbytes = sum(call.bytes for call in calls)
    return f"{counted(len(calls), 'call')}, {nbytes:,} bytes" if calls else "none"


def _reason(kind, ours, theirs, jaxs, torchs) -> str:
    """Why JAX's and torch's collectives of this kind differ, as far as their numbers say it."""
    more = sum(call.bytes for call in ours) - sum(call.bytes for call in theirs)
    scatters = any(call.kind == "reduce_scatter" for call in torchs)
    if kind == "reduce_scatter" and not ours:
        return "XLA forms none on a CPU"
    if kind == "all_reduce" and scatters and not theirs:
        return "reduces all, then keeps its piece"
    if kind == "all_gather" and more < 0:
        return "torch gathers once more for backward"
    if more == 4:
        return "and the mean loss of all tokens, 4 bytes"
    return "" if more == 0 and len(ours) == len(theirs) else "JAX's compiler has chosen otherwise"


def show_omitted_sums(torchs: list, jaxs: list) -> Table | Verdict:
    """A block in which a sum over ranks is left out: in torch and in JAX, first y's in forward,
    then that of x's gradient in backward. torchs[i]: of each rank (loss, gradient of x); jaxs[i]:
    what `run_jax` returned, the same or a Verdict."""
    refused, derived = jaxs
    if not isinstance(refused, Verdict) or isinstance(derived, Verdict) or refused.passed is None:
        return print_in_script(next(found for found in jaxs[::-1] if isinstance(found, Verdict)))
    loss, gradient = right_loss_and_gradient()
    first = max(abs(found - loss) for found, _ in torchs[0]) / loss
    second = max(_off(found, gradient) for _, found in torchs[1])
    rows = [("y in forward (g)", f"no error; the loss is wrong by {first:.0%}",
             f"{refused.sentence.split(':')[0]}, before anything runs"),
            ("x's gradient in backward (f)", f"no error; the gradient is wrong by {second:.0%}",
             f"nobody writes it: JAX adds it, equal to {_off(derived[1], gradient):.0e}")]
    return print_in_script(Table("A sum over ranks that is left out",
                                 ("the sum of", "torch", "JAX"), rows, left=2))


def right_loss_and_gradient() -> tuple[float, numpy.ndarray]:
    """Of the unsharded block in float64: the mean square of y, and its gradient by x."""
    x, up, down = (array.astype("float64") for array in block_arrays().values())
    inner = x @ up  # (tokens, inner)
    y = inner.clip(0) @ down  # (tokens, hidden)
    return float((y ** 2).mean()), (2 * y / y.size @ down.T * (inner > 0)) @ up.T


def _off(found, right) -> float:
    """The largest difference, as a share of the largest right number."""
    return float(abs(numpy.asarray(found) - right).max() / abs(right).max())

"""Exercise 9.14: the weights of trainers, sharded by FSDP, reach generators that have them in other
shards and another dtype."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from labs.checks.generator import new_generator
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check
from labs.meters.traffic import Traffic
from labs.workers import devices

RECEIVED = 1.1  # times a generator's own bytes: shapes or names may be sent, too
_ALL_TRAINERS = ("full_tensor() is an all-gather: all trainers call it, for the same parameters in "
                 "the same order, also those that send nothing.")
_HINTS = {
    **dict.fromkeys(("collectives_differ", "deadlock", "no_progress", "timed_out"), _ALL_TRAINERS),
    "gloo received": "What is sent has the shape and the dtype of the generator's parameter: a "
    "part that `chunk` returns, converted to `dtype`.",
    "Pair is not connected": "A rank cannot send to itself: `trainers` and `generators` are any "
    "ranks, and rank 0 may be one that generates."}


@dataclass(frozen=True)
class Case:
    """Ranks that train, ranks that generate, and the dtype of the generators' weights."""

    trainers: list[int]
    generators: list[int]
    dtype: torch.dtype

    @property
    def where(self) -> str:
        """How a verdict names it."""
        return f"trainers {self.trainers}, generators {self.generators} in {self.dtype}"


# In the second the ranks are the other way round: rank 0 generates.
CASES = (Case([0, 1, 2, 3], [4, 5], torch.float32), Case([2, 3, 4, 5], [0, 1], torch.bfloat16))


@check("9.14", _HINTS)
def check_weight_sync(sync_weights: Callable):
    """sync_weights(model, trainers, generators, dtype), on all ranks: on trainers FSDP's model, on
    generators one whose parameters are equal parts along dimension 0, which it fills."""
    seed = new_generator().randrange(1000)
    on_ranks(_try_cases, sync_weights, seed, world_sizes=(6,))
    return ("two generators have the weights of four trainers, each in its own part and dtype, and "
            "receive no more than that; the trainers' model is as before")


def _model(seed) -> nn.Module:
    torch.manual_seed(seed)
    # 7 rows divide neither by 4 trainers nor by 2 generators; 3 rows leave a trainer without one.
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.LayerNorm(16),
                          nn.Linear(16, 7), nn.Linear(7, 3, bias=False))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.to(devices.device())


def _try_cases(sync_weights, seed):
    for case in CASES:
        for step in range(2):  # weights of a later step replace the first ones
            _try(sync_weights, case, seed + step)


def _try(sync_weights, case, seed):
    rank, whole = dist.get_rank(), _model(seed)
    # Every rank takes part in making the group of the trainers' mesh.
    mesh = DeviceMesh(devices.device().type, case.trainers)
    trains = rank in case.trainers
    if trains:
        model = fully_shard(copy.deepcopy(whole), mesh=mesh)
        want = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    else:
        model = _part(_model(seed + 7), case)
        want = {name: p.detach() for name, p in _part(whole, case).named_parameters()}
    before = dict(model.named_parameters())
    old = {name: _local(p).clone() for name, p in before.items()}
    with Traffic() as traffic:
        sync_weights(model, list(case.trainers), list(case.generators), case.dtype)
    judge = _judge_trainer if trains else _judge_generator
    raise_on_all_ranks(judge, case, model, want, before, old, traffic)


def _part(model, case) -> nn.Module:
    """This generator's part of every parameter, in its dtype."""
    own = case.generators.index(dist.get_rank())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = parameter.detach().chunk(len(case.generators))[own].to(case.dtype, copy=True)
            setattr(module, name, nn.Parameter(part, requires_grad=False))
    return model


def _local(parameter) -> torch.Tensor:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


def _judge_trainer(case, model, want, *_):
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "to_local") or not torch.equal(_local(parameter), want[name]):
            raise Wrong(f"{case.where}: rank {dist.get_rank()}: the trainer's {name!r} is another "
                        "one afterwards", "full_tensor() and .to(dtype) return new tensors.",
                        code="trainer_changed")


def _judge_generator(case, model, want, before, old, traffic):
    rank = dist.get_rank()
    for name, parameter in model.named_parameters():
        who = f"{case.where}: rank {rank}: {name!r}"
        # An engine has captured the memory of its weights, for example in a CUDA graph.
        if parameter is not before.get(name) or parameter.dtype != case.dtype:
            raise Wrong(f"{who} is another parameter than before, or of another dtype",
                        "Receive into the parameter's memory: dist.recv(parameter.data, …).",
                        code="parameter_replaced")
        if torch.equal(parameter, want[name]):
            continue
        if torch.equal(parameter, old[name]):
            raise Wrong(f"{who} is as it was before", "Every parameter is sent, to each "
                        "generator.", code="not_synced")
        if parameter.numel() and torch.allclose(parameter.float(), want[name].float(), rtol=0.02):
            raise Wrong(f"{who} is rounded", "It has the trainers' precision where dtype has.",
                        code="rounded")
        raise Wrong(f"{who} is not its part of the trainers' weights", "Generator g has the g-th "
                    "of equal parts along dimension 0: full.chunk(len(generators))[g].",
                    code="wrong_part")
    needed = sum(p.nbytes for p in model.parameters())
    received = sum(call.bytes for call in traffic.calls if call.kind not in ("send", "barrier"))
    # Invariant: a generator gets its part. Catches complete tensors that it slices itself.
    if received > RECEIVED * needed:
        raise Wrong(f"{case.where}: rank {rank} receives {received:,} bytes; its weights are "
                    f"{needed:,}", "Slice and convert before sending.", code="too_much_received")

"""Exercise 9.12: a checkpoint of experts on several ranks that any other number of ranks loads:
each rank writes its own part, and nothing is gathered."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labs.checks.generator import new_generator
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check
from labs.meters.traffic import Traffic
from labs.training.mixtures import Mixture
from labs.workers import devices, processes

EXPERTS = 12  # more than 10: names sorted as text put expert 10 before 2
GATHERED = 0.5  # of the experts' bytes: plans of DCP are less, one all-gather of a layer is as much
# Times the model's bytes: DCP adds 1.7 kB to each tensor, and what replicas write twice is more.
# HEADER: bytes that torch.save adds to a file.
WRITTEN, HEADER = 1.25, 2500
DIMENSIONS = "replicate", "expert"
_HINTS = {"size mismatch": "A rank of another mesh has more experts, or fewer: it reads from the "
                           "parts of several ranks.",
          "must match the size": "A rank of another mesh has more experts, or fewer: it reads from "
                                 "the parts of several ranks."}


@check("9.12", _HINTS)
def check_expert_checkpoint(save_experts: Callable, load_experts: Callable):
    """save_experts(model, folder, mesh), load_experts(model, folder, mesh): a model whose experts
    are divided over the ranks of mesh["expert"]; it is loaded on other meshes than it was saved on,
    into the parameters that are there."""
    seed = new_generator().randrange(1000)
    with processes.temporary_folder() as folder:
        _on(4, _save_and_load, save_experts, load_experts, Path(folder), seed)
        _on(2, _load, load_experts, Path(folder, "1 x 4"), (1, 2), seed)
    return ("saved with EP 4 and with EP 2 on two replicas, each loaded with the other, and with "
            "EP 2 on 2 ranks: all parameters are equal; each is written once, and none gathered")


def _on(ranks, fn, *args):
    on_ranks(fn, *args, world_sizes=(ranks,))


def _whole(seed: int) -> Mixture:
    model = Mixture(experts=EXPERTS, shared=True, seed=seed)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):  # else it is 1 for every seed, loaded or not
            nn.init.normal_(module.weight)
    return model


def make_part(seed: int, mesh: DeviceMesh) -> Mixture:
    """A mixture that has its own part of the experts of mesh["expert"], and all else."""
    model = _whole(seed).to(devices.device())
    ranks, rank = mesh["expert"].size(), mesh["expert"].get_local_rank()
    for block in model.layers:
        experts = block.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            part = parameter.detach().chunk(ranks)[rank].clone()
            setattr(experts, name, nn.Parameter(part))
    model.norm.weight.requires_grad_(False)  # a frozen parameter belongs to the checkpoint, too
    return model


def _mesh(shape):
    return init_device_mesh(devices.device().type, shape, mesh_dim_names=DIMENSIONS)


def _save_and_load(save, load, folder, seed):
    """On 4 ranks: each of two meshes loads what the other one saved."""
    shapes = (1, 4), (2, 2)
    for shape in shapes:
        _save(save, folder / "{} x {}".format(*shape), shape, seed)
    for shape, other in zip(shapes, shapes[::-1], strict=True):
        _load(load, folder / "{} x {}".format(*other), shape, seed)


def _save(save, folder, shape, seed):
    mesh = _mesh(shape)
    model = make_part(seed, mesh)
    folder.mkdir(exist_ok=True)
    dist.barrier()  # the folder is there on all ranks
    with Traffic() as traffic:
        _call(save, model, folder, mesh)
    raise_on_all_ranks(_judge_saved, model, traffic, folder, mesh, seed)


def _call(function, model, folder, mesh):
    try:
        function(model, folder, mesh)
    except CheckpointException as error:  # its message is the tracebacks of all ranks
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, NotImplementedError):
            raise cause from None
        raise Wrong(f"rank {rank}: {type(cause).__name__}: {cause}", "A DTensor says which part of "
                    "the complete tensor a rank has: DTensor.from_local(part, mesh, [Replicate(), "
                    "Shard(0)]).", code="checkpoint_failed") from None


def _judge_saved(model, traffic, folder, mesh, seed):
    where = f"saving with EP {mesh['expert'].size()} on {mesh.size()} ranks"
    _judge_gathered(traffic, where)
    whole = _whole(seed)
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    written = sum(max(0, size - HEADER) for size in sizes)
    full = sum(parameter.nbytes for parameter in whole.parameters())
    if not sizes:
        raise Wrong(f"{where}: there is no file in the folder", code="nothing_written")
    # Invariant: each number is on disk once. Catches a file for each rank with all that it has: the
    # router is written 4 times, and with replicas every expert twice.
    if written > WRITTEN * full:
        raise Wrong(f"{where}: {written:,} bytes are written; the model has {full:,}",
                    "Parameters that several ranks have are written by one of them: experts by the "
                    "ranks of replica 0, all else by rank 0.", code="written_twice")
    want = _parts(whole, mesh)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p.cpu(), want[name])]
    if changed:
        raise Wrong(f"{where}: the model is another one afterwards: {changed[0]!r}",
                    code="model_changed")


def _judge_gathered(traffic, where):
    whole = _whole(0)
    experts = sum(p.nbytes for name, p in whole.named_parameters() if ".experts." in name)
    sent = sum(call.bytes for call in traffic.calls)
    if sent > GATHERED * experts:
        raise Wrong(f"{where}: rank {dist.get_rank()} takes part in collectives of {sent:,} bytes; "
                    f"all experts are {experts:,}", "Each rank writes and reads its own part: no "
                    "rank needs the parts of others.", code="gathered")


def _parts(whole, mesh) -> dict[str, torch.Tensor]:
    """What a rank should have of a complete model."""
    ranks, rank = mesh["expert"].size(), mesh["expert"].get_local_rank()
    return {name: p.detach().chunk(ranks)[rank] if ".experts." in name else p.detach()
            for name, p in whole.named_parameters()}


def _load(load, folder, shape, seed):
    mesh = _mesh(shape)
    model = make_part(seed + 1, mesh)
    before = dict(model.named_parameters())
    initial = {name: p.detach().clone() for name, p in before.items()}
    with Traffic() as traffic:
        _call(load, model, folder, mesh)
    raise_on_all_ranks(_judge_loaded, model, before, initial, traffic, mesh, seed)


def _judge_loaded(model, before, initial, traffic, mesh, seed):
    where = f"loaded with EP {mesh['expert'].size()} on {mesh.size()} ranks"
    want = _parts(_whole(seed), mesh)
    for name, parameter in model.named_parameters():
        who, found = f"{where}: rank {dist.get_rank()}: {name!r}", parameter.detach().cpu()
        # An optimizer that was made before has the old parameters.
        if parameter is not before.get(name):
            raise Wrong(f"{who} is another parameter than before", "Copy into the parameter that "
                        "is there: an optimizer has it.", code="parameter_replaced")
        if found.shape != want[name].shape:
            raise Wrong(f"{who} has the shape {list(found.shape)}, not {list(want[name].shape)}",
                        code="wrong_shape")
        if torch.equal(found, want[name]):
            continue
        if torch.equal(found, initial[name].cpu()):
            raise Wrong(f"{who} is as it was before: nothing was loaded into it",
                        "Every rank loads its part of each layer's experts, and all else.",
                        code="not_loaded")
        if ".experts." in name:
            raise _wrong_experts(who, found, name, seed)
        raise Wrong(f"{who} is not what was saved", code="wrong_numbers")
    _judge_gathered(traffic, where)


def _wrong_experts(who, found, name, seed) -> Wrong:
    whole = list(dict(_whole(seed).named_parameters())[name].detach())
    which = [next((number for number, expert in enumerate(whole) if torch.equal(expert, part)),
                  None) for part in found]
    if None not in which:
        return Wrong(f"{who} has other experts than its own: {which}", "Rank r has the r-th of "
                     "equal parts, in the order of the experts. Names sorted as text put 10 before "
                     "2.", code="other_experts")
    return Wrong(f"{who} is not what was saved", code="wrong_numbers")

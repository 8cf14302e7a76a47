"""The meshes of exercise 9.8, and whether each parameter is sharded over the right ranks."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from labs.checks.verdicts import Wrong
from labs.workers import devices

EXPERTS = ".experts."  # in the names of their parameters


@dataclass(frozen=True)
class Meshes:
    """What the student's function is given: mesh has the dimensions "shard" and "expert", or
    "replicate" before them; everyone has "shard", or "replicate" before it."""

    mesh: DeviceMesh
    everyone: DeviceMesh

    @classmethod
    @functools.cache  # each group of gloo keeps threads that wake a hundred times a second
    def of(cls, *sizes: int) -> "Meshes":
        """On a rank, the same ones each time. sizes: of "replicate", which may be left out, "shard"
        and "expert"."""
        *replicate, shard, expert = sizes
        device, names = devices.device().type, ("replicate",) * len(replicate)
        return cls(init_device_mesh(device, sizes, mesh_dim_names=(*names, "shard", "expert")),
                   init_device_mesh(device, (*replicate, shard * expert),
                                    mesh_dim_names=(*names, "shard")))

    @property
    def expert(self) -> int:
        return self.mesh["expert"].size()

    @property
    def same_experts(self) -> DeviceMesh:
        """The ranks that have this rank's experts."""
        return self.mesh[self.mesh.mesh_dim_names[:-1]]


def require_own_layers(model):
    layers = [block.mlp for block in model.layers]
    if len(set(map(id, layers))) < len(layers):
        raise Wrong("all blocks have the same layer of experts", "Make an ExpertParallelLayer for "
                    "each block, from its own block.mlp.", code="layers_share_experts")


def judge_shards(module, full, meshes):
    """Invariant: each parameter is sharded over ranks that have the same, and no others."""
    found, who = dict(module.named_parameters()), f"rank {dist.get_rank()}"
    if hasattr(module, "layers"):
        require_own_layers(module)
        _judge_groups(module, meshes, who)
    if added := sorted(found.keys() - dict(full.named_parameters()).keys()):
        raise Wrong(f"{who}: parameter {added[0]!r} is not the model's",
                    "An ExpertParallelLayer replaces block.mlp, of which nothing is kept.",
                    code="parameters_added")
    for name, want in full.named_parameters():
        if name not in found:
            raise Wrong(f"{who}: parameter {name!r} of the model is missing", "The model keeps its "
                        "layers, and their names.", code="parameters_missing")
        is_expert, parameter = EXPERTS in name, found[name]
        if parameter.requires_grad != want.requires_grad:
            raise Wrong(f"{who}: parameter {name!r} is {'' if want.requires_grad else 'not '}to be "
                        "trained, and requires_grad was changed", "Leave requires_grad as it is.",
                        code="requires_grad_changed")
        if parameter.dtype != want.dtype:
            raise Wrong(f"{who}: parameter {name!r} has become {parameter.dtype}; it was "
                        f"{want.dtype}", "The model keeps its dtype.", code="dtype_changed")
        if is_expert and len(parameter) != len(want):  # a right answer without EP shows later
            _judge_part(name, parameter, want, meshes, who)
        if not isinstance(parameter, DTensor):
            raise _not_sharded(name, is_expert, who)
        has_part = is_expert and len(parameter) != len(want)
        due = meshes.same_experts if has_part else meshes.everyone
        ranks, having = _ranks_of(parameter.device_mesh), _ranks_of(due)
        if not set(ranks) <= set(having):
            raise Wrong(f"{who}: {name!r} is sharded over ranks {ranks}, but only {having} have "
                        "these experts: parts of different experts are gathered", "fully_shard of "
                        "the experts themselves, with the mesh of those that have the same, before "
                        "the block takes them.", code="experts_mixed")
        if is_expert and not has_part and ranks != having:
            raise Wrong(f"{who}: {name!r} has all {len(want)} experts, sharded over ranks {ranks}",
                        "Replace block.mlp by an ExpertParallelLayer before its experts are "
                        "sharded.", code="experts_not_divided")
        _judge_shard_group(name, parameter, due, meshes, who)


def _judge_groups(module, meshes, who):
    """Invariant: the ranks that divide the experts of a layer are those of mesh["expert"]."""
    want = _ranks_of(meshes.mesh["expert"])
    for number, block in enumerate(module.layers):
        group = getattr(block.mlp, "group", None)  # of the notebook's layer
        if isinstance(group, dist.ProcessGroup) and (
                ranks := sorted(dist.get_process_group_ranks(group))) != want:
            raise Wrong(f"{who}: layers.{number}.mlp divides its experts over ranks {ranks}; "
                        f"mesh[\"expert\"] has {want}",
                        'ExpertParallelLayer(block.mlp, mesh["expert"].get_group()); the ranks '
                        "along all other dimensions have the same experts.",
                        code="other_expert_ranks")


def judge_start(found, full):
    """Invariant: before the first step the shards of each parameter are the model's numbers. found:
    full parameters by name."""
    for name, want in full.named_parameters():
        if found[name].shape != want.shape or not torch.equal(found[name], want):
            raise Wrong(f"rank {dist.get_rank()}: before the first step the shards of {name!r} are "
                        "not the model's numbers",
                        "Each rank takes its own part of the experts, in the order of the ranks of "
                        'mesh["expert"].' if EXPERTS in name else
                        "All parameters are sharded as they are.", code="numbers_changed")


def _judge_shard_group(name, parameter, due, meshes, who):
    """due: the mesh that `fully_shard` should have been given."""
    ranks, want = _sharded_over(parameter), _ranks_of(due["shard"])
    if ranks == want:
        return
    is_expert = EXPERTS in name
    which = ('all dimensions of mesh but "expert", in their order' if is_expert else "everyone")
    hint = f"mesh: {which}. FSDP shards over the last dimension, and replicates over one before it."
    if not is_expert and ranks == _ranks_of(meshes.same_experts["shard"]):
        hint = ("Only block.mlp.experts, not the layer, is sharded over the ranks that have the "
                "same experts. All else is for everyone.")
    if len(ranks) > len(want):
        raise Wrong(f"{who}: {name!r} is sharded over ranks {ranks}; only {want} are to shard it, "
                    "and the others to have copies", hint, code="sharded_over_replicas")
    if len(ranks) < len(want):
        copies = len(want) // len(ranks)
        raise Wrong(f"{who}: {name!r} is sharded over ranks {ranks} and not over {want}: "
                    f"{copies} of them have the same shard", hint, code="shards_replicated")
    raise Wrong(f"{who}: {name!r} is sharded over ranks {ranks} and not over {want}", hint,
                code="other_ranks")


def judge_averaged(module, full, meshes):
    """Explains wrong numbers: a mesh of `fully_shard` in which ranks with the same parameter are
    missing. It is right where the student averages over them."""
    who = f"rank {dist.get_rank()}"
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):  # another mistake left it gathered
            continue
        has_part = len(parameter) != len(full.get_parameter(name))
        having = _ranks_of(meshes.same_experts if has_part else meshes.everyone)
        ranks = _ranks_of(parameter.device_mesh)
        if missing := sorted(set(having) - set(ranks)):
            raise Wrong(f"{who}: the gradient of {name!r} is averaged over ranks {ranks}; ranks "
                        f"{missing} have this parameter too, and become another model",
                        'fully_shard also needs the dimension "replicate": with two dimensions it '
                        "all-reduces over the first.", code="replicas_left_out")


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    return sorted(mesh.mesh.flatten().tolist())


def _sharded_over(parameter: DTensor) -> list[int]:
    """The ranks that have the shards of what this rank has a shard of."""
    mesh = parameter.device_mesh
    here = [place if placement.is_replicate() else slice(None) for placement, place in
            zip(parameter.placements, mesh.get_coordinate(), strict=True)]
    return sorted(mesh.mesh[tuple(here)].flatten().tolist())


def _judge_part(name, parameter, want, meshes, who):
    due = len(want) // meshes.expert
    if len(parameter) != due:
        raise Wrong(f"{who}: {name!r} has {len(parameter)} of {len(want)} experts; divided over "
                    f"the {meshes.expert} ranks of mesh[\"expert\"] it is {due}",
                    'mesh["expert"] are the ranks that divide the experts; those along all other '
                    "dimensions have the same.", code="dimensions_swapped")


def _not_sharded(name, is_expert, who) -> Wrong:
    if is_expert:
        return Wrong(f"{who}: {name!r} is not sharded", "fully_shard(block.mlp.experts, mesh=...) "
                     "over the ranks that have the same experts.", code="experts_not_sharded")
    return Wrong(f"{who}: {name!r} is in no unit: it is not sharded, and its gradient not averaged",
                 "fully_shard(block) for each block, and then fully_shard(model) takes what is in "
                 "no block.", code="not_sharded")

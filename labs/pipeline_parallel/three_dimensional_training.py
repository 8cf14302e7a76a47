"""A Llama trained on 2 × 2 × 2 ranks: data, pipeline and tensor parallel at the same time."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from labs.checks.on_ranks import raise_on_all_ranks, scaled_timeout
from labs.checks.verdicts import Wrong, kind_of
from labs.meters.traffic import CollectiveCall, Traffic
from labs.pipeline_parallel.runner import PipelineRunner
from labs.pipeline_parallel.stages import MicroBatch, Stage, make_stages, whole_step
from labs.predictions.pipelines import one_f_one_b
from labs.training import data, models
from labs.workers import devices
from labs.workers.launcher import launch

NAMES, SIZES = ("data", "pipeline", "tensor"), (2, 2, 2)
RANKS = 8
STEPS, MICRO_BATCHES, BATCH, CONTEXT = 5, 4, 16, 16
MODEL = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "context": CONTEXT}
# Not AdamW: the sum of the replicas' gradients in place of their mean would leave the same update.
OPTIMIZER = {"lr": 0.1, "momentum": 0.9}
ENDS_OF_BLOCKS = ("self_attn.o_proj", "mlp.down_proj")
ROOM = 1.02  # padding, where ranks do not divide a parameter


@dataclass
class RankRun:
    """What one of the eight ranks did. coordinates: data, pipeline, tensor. losses: of each step,
    of its own replica's batch; 0 on the first stage. held: elements of parameters that it keeps.
    parameters: name in the full model -> full tensor after the last step, of its stage; empty
    but on one rank of each stage. calls: collectives and messages of the last step."""

    coordinates: tuple[int, int, int]
    losses: list[float] = field(default_factory=list)
    held: int = 0
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[CollectiveCall] = field(default_factory=list)


def small_llama() -> nn.Module:
    """The model, the same on all ranks, on the CPU."""
    return models.llama(**MODEL)


def windows(step: int) -> torch.Tensor:
    """The whole batch of a step, int64 (BATCH, CONTEXT + 1)."""
    return data.windows(BATCH, CONTEXT, seed=step)


def micro_batches(tokens: torch.Tensor, count: int) -> list[MicroBatch]:
    """The batch in equal parts; each token's target is the next one."""
    return [{"input_ids": part[:, :-1], "targets": part[:, 1:]} for part in tokens.chunk(count)]


def train_in_three_dimensions(parallelize: Callable, steps: int = STEPS) -> list[RankRun]:
    """Launches eight ranks, on each of which parallelize(stage, mesh) returns the module to train,
    with 1F1B between the stages and SGD. What each rank did, in order."""
    return launch(_train, parallelize, steps, ranks=RANKS, quiet=True, hang_after=scaled_timeout(4),
                  timeout=scaled_timeout(60))


def train_alone(steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(loss of each step, parameters after the last one) of one process with the full model."""
    model, losses = small_llama(), []
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    for step in range(steps):
        losses.append(whole_step(lambda tokens: model(input_ids=tokens).logits,
                                 micro_batches(windows(step), 1)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _train(parallelize, steps) -> RankRun:
    device = devices.device()
    mesh = init_device_mesh(device.type, SIZES, mesh_dim_names=NAMES)
    run = RankRun(tuple(mesh.get_coordinate()))
    replica, number, _ = run.coordinates
    model, layers = small_llama().to(device), [MODEL["layers"] // SIZES[1]] * SIZES[1]
    stage = make_stages(model, layers, [number])[number]
    names = stage.names()
    # Before parallelize, which replaces the parameters by DTensors.
    allowed = expected_elements(stage)
    module = _module(parallelize, stage, mesh)
    run.held = sum(models.local_shard(p).numel() for p in module.parameters())
    # Before the first step, in which a wrong mesh may hang.
    raise_on_all_ranks(_judge_held, module, allowed, run)
    optimizer = torch.optim.SGD(module.parameters(), **OPTIMIZER)
    schedule = one_f_one_b(SIZES[1], MICRO_BATCHES)
    runner = PipelineRunner(schedule, {number: module}, group=mesh["pipeline"].get_group(),
                            recorded=False)
    for step in range(steps):
        # (BATCH / 2, CONTEXT + 1): the tensor-parallel ranks and both stages of a replica have the
        # same.
        own = windows(step).to(device).chunk(SIZES[0])[replica]
        with Traffic() as traffic:
            run.losses.append(runner.step(micro_batches(own, MICRO_BATCHES)).loss)
            optimizer.step()
            optimizer.zero_grad()
    run.calls = traffic.calls
    # full_tensor gathers: all ranks call it, in the same order, though one of each stage keeps the
    # result.
    whole = {name: _whole(p) for name, p in module.named_parameters()}
    if replica == run.coordinates[2] == 0:
        run.parameters = {names.get(name, name): p for name, p in whole.items()}
    return run


def _module(parallelize, stage: Stage, mesh: DeviceMesh) -> nn.Module:
    module = parallelize(stage, mesh)
    if not isinstance(module, nn.Module):
        raise Wrong(f"parallelize returned {kind_of(module)}, not a module", "return stage",
                    code="wrong_type")
    # The runner asks a stage for its width; fully_shard and parallelize_module leave it in place.
    if not isinstance(module, Stage):
        raise Wrong(f"parallelize returned {kind_of(module)}, not the stage that it was given",
                    "fully_shard and parallelize_module change the stage in place: return stage.",
                    code="other_module")
    return module


def _judge_held(module, allowed, run):
    """Raises Wrong where this rank keeps more of its stage than tensor and data ranks leave."""
    _judge_meshes(module)
    if run.held <= ROOM * allowed:
        return _judge_plan(module)
    # The invariant: each matrix of a layer is cut over tensor and data ranks, and all else over
    # data ranks. What is left whole in one of the dimensions is held twice.
    cut = {"tensor": set(), "data": set()}
    for name, parameter in module.named_parameters():
        is_matrix = "layers." in name and parameter.dim() == 2
        for dimension in cut if is_matrix else ("data",):
            if not _is_cut(parameter, dimension):
                cut[dimension].add(name)
    whole = {dimension: sorted(names) for dimension, names in cut.items() if names}
    named = "; ".join(f"not sharded over {dimension} ranks: {names[0]}"
                      + f" and {len(names) - 1} more" * (len(names) > 1)
                      for dimension, names in whole.items())
    raise Wrong(f"rank {dist.get_rank()} keeps {run.held:,} elements of its stage; sharded over "
                f"2 tensor and 2 data ranks it would keep {allowed:,.0f}"
                + f" ({named})" * bool(named),
                "parallelize_module(layer, mesh[\"tensor\"], plan) names each matrix of a layer; "
                "then fully_shard(..., mesh=mesh[\"data\"]) for each layer and for the stage.",
                code="not_sharded")


def _judge_meshes(module):
    """Raises Wrong where a parameter is cut over ranks that are in different stages, or over the
    two dimensions exchanged: ranks of one stage would wait for ranks of the other."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        others = set(mesh.mesh_dim_names or ("",)) - {"data", "tensor"}
        if others:
            ranks = mesh.mesh.flatten().tolist()
            raise Wrong(f"rank {dist.get_rank()}: {name} is sharded over ranks {ranks}, "
                        + ("but the ranks of a pipeline group have different layers"
                           if "pipeline" in others else "which are no group of one dimension"),
                        "Give each call its dimension: mesh[\"tensor\"] or mesh[\"data\"].",
                        code="wrong_group")


def _judge_plan(module):
    """Raises Wrong where a matrix is cut over tensor ranks along the wrong dimension."""
    for name, parameter in module.named_parameters():
        name = name.removesuffix(".weight")
        if "layers." not in name or parameter.dim() != 2 or not _is_cut(parameter, "tensor"):
            continue
        # A weight is (out, in): row-parallel is cut along 1. fully_shard always cuts along 0.
        ends_block = name.endswith(ENDS_OF_BLOCKS)
        rank, along = dist.get_rank(), {dimension: _placement(parameter, dimension).dim
                                        for dimension in ("data", "tensor")}
        if ends_block and along == {"data": 1, "tensor": 0}:
            raise Wrong(f"rank {rank}: {name} is row-parallel over data ranks, and fully_shard "
                        "shards it over tensor ranks", "The two meshes are exchanged.",
                        code="meshes_swapped")
        # The invariant: between the two matrices of a block a rank has a part of the hidden units,
        # and nothing is gathered.
        if ends_block and along["tensor"] == 0:
            raise Wrong(f"rank {rank}: {name} is column-parallel, so it needs its full input, of "
                        "which each tensor-parallel rank has a part",
                        "Which is the last matrix of attention, and which of the MLP? They take "
                        "such a part.",
                        code="part_of_input")
        if not ends_block and along["tensor"] == 1:
            raise Wrong(f"rank {rank}: {name} is row-parallel, so it takes a part of its input, "
                        "which is replicated: its full output must be summed",
                        "A column-parallel module takes the full input and gives a part.",
                        code="output_not_summed")


def _placement(parameter, dimension):
    return parameter.placements[parameter.device_mesh.mesh_dim_names.index(dimension)]


def _is_cut(parameter, dimension) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    if dimension not in (names or ()):
        return False
    return not _placement(parameter, dimension).is_replicate()


def _whole(parameter) -> torch.Tensor:
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().cpu()


def group_of(call: CollectiveCall) -> str:
    """The dimension in whose groups a collective or a message of the eight ranks runs; "" where it
    is none of them."""
    ranks = torch.arange(RANKS).view(*SIZES)  # the tensor dimension varies fastest
    members = tuple(sorted(call.members))
    for dimension, name in enumerate(NAMES):
        if members in {tuple(group.tolist()) for group in
                       ranks.movedim(dimension, -1).reshape(-1, SIZES[dimension])}:
            return name
    return ""


def expected_elements(stage: Stage) -> float:
    """Elements of parameters that a rank keeps of a stage: matrices of its layers over tensor and
    data ranks, everything else over data ranks."""
    layers = list(stage.body.layers)
    matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2)
    rest = sum(p.numel() for p in stage.parameters()) - matrices
    return matrices / (SIZES[0] * SIZES[2]) + rest / SIZES[0]

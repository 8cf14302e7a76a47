"""The parts of a step, before they are put together: what is computed, and what is sent beside it.

All seconds are of a whole step on the slowest rank, without the wait of a pipeline.
"""

from dataclasses import dataclass

from labs.predictions.step_time import communication
from labs.predictions.step_time.computation import (
    head_times,
    launch_wait,
    layer_times,
    optimizer_seconds,
)
from labs.predictions.step_time.constants import FITTED, LINK_SHARE, Constants
from labs.predictions.step_time.training_run import TrainingRun


@dataclass(frozen=True)
class Part:
    """cause: the field of `StepTime` that it counts for. beside: None if it is computed; of
    communication, the seconds of computing that are in the same place of the step, 0 where nothing
    is. in_stage: whether the other stages of a pipeline wait for it. of_weights: those of its
    seconds that compute gradients of weights, which nobody waits for. interferes: whether it slows
    down what is computed beside it: collectives do, a GPU's copy engines do not."""

    name: str
    cause: str
    seconds: float
    beside: float | None = None
    in_stage: bool = True
    of_weights: float = 0.0
    interferes: bool = True

    def exposed(self, constants: Constants) -> float:
        """Seconds by which the part lengthens the step."""
        if self.beside is None:
            return self.seconds
        if not self.interferes:
            return max(0.0, self.seconds - self.beside)
        return communication.exposed(self.seconds, self.beside, constants)


def parts_of(run: TrainingRun, constants: Constants = FITTED) -> list[Part]:
    """Every part of one step. A micro-batch takes its layers and, on the last pipeline stage, the
    head. In a pipeline, sharded parameters are gathered once a step and stay, and gradients are
    reduced once (torchtitan does so); context parallelism hides behind attention alone."""
    forward, backward = layer_times(run, constants)
    layer, head = forward + backward, head_times(run, constants)
    layers, batches = run.stage_layers, run.accumulation
    heads = _heads(run, layer.total, head.total)
    # A part's seconds are those of one layer and micro-batch, `often` times.
    often = layers * batches
    tensor = communication.tensor_seconds(run, constants)
    around, back = communication.context_seconds(run, constants)
    sent = communication.expert_seconds(run, constants)
    busy = layer.total + sent + communication.exposed(
        tensor, layer.matmul if run.tensor_overlaps else 0.0, constants)
    beside = float(run.context_overlaps)  # 0: gathered before attention begins, so nothing hides it
    return [
        # of the three products forward and backward, one gives the gradient of the weights
        Part("products of the layers", "matmul", often * layer.matmul,
             of_weights=often * forward.matmul),
        Part("attention", "attention", often * layer.attention),
        Part("memory traffic of the layers", "memory", often * layer.memory),
        Part("tensor-parallel all-reduces", "tensor", often * tensor,
             often * layer.matmul if run.tensor_overlaps else 0.0),
        Part("tokens to their experts and back", "expert", often * sent, 0.0),
        Part("keys and values in forward", "context", often * around,
             beside * often * forward.attention),
        Part("keys and values in backward", "context", often * back,
             beside * often * backward.attention),
        Part("activations to the next stage", "pipeline",
             batches * communication.pipeline_seconds(run, constants), 0.0),
        Part("host starting kernels", "launch", often * launch_wait(run, busy)),
        Part("host between steps", "launch",
             run.overheads.step * run.gpu.generation.host, in_stage=False),
        Part("stalls of the pipeline", "stall", _stalls(run), in_stage=False),
        Part("product of the head", "matmul", heads * head.matmul, in_stage=False),
        Part("memory traffic of the loss", "memory", heads * head.memory, in_stage=False),
        Part("optimizer", "host" if run.offload else "memory", optimizer_seconds(run),
             in_stage=False),
        *_data_parallel(run, constants, forward.total, backward.total)]


def _heads(run, layer, head) -> float:
    """How many heads, of seconds `head`, lengthen the step. With equal stages that is one for each
    micro-batch. With unequal ones the last stage has fewer layers in its place: what is longer than
    the longest stage counts for each micro-batch, the rest once, until the pipeline is full."""
    if not run.stages or not head:
        return run.accumulation
    spare = (run.stage_layers - run.stages[-1]) * layer
    longer = max(0.0, head - spare) / head
    return run.accumulation * longer + 1 - longer


def _stalls(run) -> float:
    """Of all micro-batches: `Overheads.stall` for each neighbour of a stage, on many nodes."""
    if run.pipeline == 1 or run.gpus / run.gpus_per_node < _STALLING:
        return 0.0
    neighbours = min(2, run.pipeline - 1)
    return neighbours * run.overheads.stall * (run.accumulation + run.pipeline - 1)


def _data_parallel(run, constants, forward, backward) -> list[Part]:
    """Parameters gathered and gradients reduced; forward, backward: seconds of one layer."""
    gathered, reduced = communication.sharding_seconds(run, constants)
    layers = run.stage_layers
    often = layers * (run.accumulation if run.pipeline == 1 else 1)
    reduced *= run.reduce_rounds
    embedding = communication.embedding_seconds(run, constants)
    return [
        Part("parameters gathered in forward", "sharding", often * gathered, often * forward,
             in_stage=False),
        Part("gathered and reduced in backward", "sharding", often * reduced, often * backward,
             in_stage=False),
        Part("embedding gathered and reduced", "sharding", often / layers * embedding, 0.0,
             in_stage=False),
        Part("gradients all-reduced", "all_reduce",
             communication.all_reduce_seconds(run, constants),
             layers * backward if run.reduce_overlaps else 0.0, in_stage=False),
        *_copies(run, often, forward - gathered, backward - reduced)]


def _copies(run, often, forward, backward) -> list[Part]:
    """Under CPU offload: each shard to the GPU before it is gathered, and its gradient back. FSDP2
    copies from pinned memory on streams of their own, in line with the collectives of the same
    unit: forward, backward are the seconds of computing that these leave free, by layer. A shard is
    copied in fp32 and cast on the GPU. The root is gathered once, and nothing hides it."""
    if not run.offload:
        return []
    seconds = 4 / run.shards / (run.gpu.pcie * LINK_SHARE)
    layer, root = seconds * run.layer_parameters, seconds * run.embedding_parameters
    kind = {"cause": "host", "in_stage": False, "interferes": False}
    return [Part("shards copied in forward", seconds=often * layer,
                 beside=often * max(0.0, forward), **kind),
            Part("shards and gradients copied in backward", seconds=often * 2 * layer,
                 beside=often * max(0.0, backward), **kind),
            Part("root copied", seconds=often / run.stage_layers * 2 * root, beside=0.0, **kind)]


def pipeline_wait(run: TrainingRun, part: Part) -> float:
    """Seconds that a stage waits for each second of a part. 1F1B with v chunks per stage waits
    (p − 1)/v times a micro-batch's for the pipeline to fill and drain (Narayanan et al., SC 2021,
    section 2.2); under ZB-H1 gradients of weights fill min(p, m) − 1 micro-batches' of that (Qi et
    al., 2024, arXiv 2401.10241, table 1)."""
    if not part.in_stage:
        return 0.0
    # the stages' seconds together, in those of the longest, less the longest itself
    stages = run.layers / run.stage_layers if run.stages else run.pipeline
    wait = (stages - 1) / run.chunks / run.accumulation
    if run.zero_bubble and part.of_weights:
        filled = (min(run.pipeline, run.accumulation) - 1) / run.accumulation
        wait -= filled * part.of_weights / part.seconds
    return wait


_STALLING = 32  # nodes from which on measured pipelines stall

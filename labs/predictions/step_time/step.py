"""The step: computation, what communication adds to it, the pipeline's bubble."""

from dataclasses import dataclass

from labs.predictions.efficiency import flops_per_token, utilization
from labs.predictions.step_time.communication import (
    all_reduce_seconds,
    context_seconds,
    embedding_seconds,
    exposed,
    pipeline_seconds,
    sharding_seconds,
    tensor_seconds,
)
from labs.predictions.step_time.computation import (
    head_times,
    layer_times,
    optimizer_seconds,
)
from labs.predictions.step_time.constants import FITTED, Constants
from labs.predictions.step_time.training_run import TrainingRun


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, by cause; all micro-batches together.

    matmul includes the output head; memory is norms, activations, loss and optimizer;
    tensor, context, sharding, all_reduce and pipeline are the communication that nothing hides, and
    bubble is the wait for a pipeline to fill and drain.
    """

    matmul: float
    attention: float
    memory: float
    tensor: float
    context: float
    sharding: float
    all_reduce: float
    pipeline: float
    bubble: float

    @property
    def total(self) -> float:
        """Seconds of the whole step: its causes come one after the other."""
        return sum(vars(self).values())

    def tokens_per_s(self, run: TrainingRun) -> float:
        """Tokens per second and GPU."""
        return run.step_tokens / run.gpus / self.total

    def mfu(self, run: TrainingRun, parameters: float) -> float:
        """Model FLOPs utilization, 0 to 1, with 6N + 12·L·h·s FLOPs per token."""
        flops = flops_per_token(parameters, run.layers, run.hidden, run.sequence)
        return utilization(flops, self.tokens_per_s(run), run.gpu.flops)


def step_time(run: TrainingRun, constants: Constants = FITTED) -> StepTime:
    """The time of one step. A micro-batch takes its layers and, on the last pipeline stage, the
    head; 1F1B with v chunks per stage waits (p − 1)/v times its layers' time for the pipeline to
    fill and drain (Narayanan et al., SC 2021, section 2.2). In a pipeline, sharded parameters are
    gathered once a step and stay, and gradients are reduced once (torchtitan does so)."""
    forward, backward = layer_times(run, constants)
    layers, batches = run.stage_layers, run.accumulation
    layer = forward + backward
    head = head_times(run, constants)
    tensor = tensor_seconds(run, constants)
    if run.tensor_overlaps:
        tensor = exposed(tensor, layer.matmul, constants)
    tensor *= layers
    sharding = layers * _sharding_exposed(run, constants, forward, backward)
    sharding += embedding_seconds(run, constants)
    handover = pipeline_seconds(run, constants)
    context = layers * _context_exposed(run, constants, forward, backward)
    stage = layers * layer.total + tensor + context + handover
    return StepTime(
        matmul=batches * (layers * layer.matmul + head.matmul),
        attention=batches * layers * layer.attention,
        memory=batches * (layers * layer.memory + head.memory) + optimizer_seconds(run),
        tensor=batches * tensor,
        sharding=sharding * (batches if run.pipeline == 1 else 1),
        context=batches * context,
        all_reduce=_all_reduce_exposed(run, constants, layers * backward.total),
        pipeline=batches * handover,
        bubble=stage * (run.pipeline - 1) / run.chunks)


def _sharding_exposed(run, constants, forward, backward) -> float:
    """Seconds that gathering and reducing add to one layer."""
    gathered, reduced = sharding_seconds(run, constants)
    return (exposed(gathered, forward.total, constants)
            + exposed(reduced, backward.total, constants))


def _context_exposed(run, constants, forward, backward) -> float:
    """Seconds that ring attention adds to one layer: it hides behind attention alone."""
    around, back = context_seconds(run, constants)
    return (exposed(around, forward.attention, constants)
            + exposed(back, backward.attention, constants))


def _all_reduce_exposed(run, constants, backward) -> float:
    """Seconds that all-reducing gradients adds to a step: it overlaps the last micro-batch's
    backward, or nothing."""
    seconds = all_reduce_seconds(run, constants)
    return exposed(seconds, backward, constants) if run.reduce_overlaps else seconds

"""The step: computation, what communication adds to it, the pipeline's bubble."""

from dataclasses import dataclass, fields

from labs.predictions.step_time.constants import FITTED, Constants
from labs.predictions.step_time.efficiency import flops_per_token, utilization
from labs.predictions.step_time.parts import parts_of, pipeline_wait
from labs.predictions.step_time.training_run import TrainingRun


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, by cause; all micro-batches together.

    matmul includes the output head; memory is norms, activations, loss and optimizer;
    tensor, context, sharding, all_reduce and pipeline are the communication that nothing hides, and
    bubble is the wait for a pipeline to fill and drain. host: copies of CPU offload that nothing
    hides, and AdamW on the host. launch: the GPU waits for the host to start kernels. stall: a
    pipeline on many nodes stands still. expert: all-to-alls of tokens to their experts and back.
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
    host: float = 0.0
    launch: float = 0.0
    stall: float = 0.0
    expert: float = 0.0

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
    """The time of one step: its parts one after the other, communication as far as computing does
    not hide it, and the wait of a pipeline."""
    parts = parts_of(run, constants)
    seconds, waits = dict.fromkeys(_CAUSES, 0.0), 0.0
    for part in parts:
        exposed = part.exposed(constants)
        seconds[part.cause] += exposed
        waits += pipeline_wait(run, part) * exposed
    return StepTime(**seconds | {"bubble": waits})


_CAUSES = [field.name for field in fields(StepTime)]

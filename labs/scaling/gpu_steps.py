"""Steps of public runs on GPUs, as a student puts their seconds together (exercises 6.16 to 6.18).

The runs are nanotron's on H100s, without a pipeline, tensor-parallel groups within a node:
`labs/predictions/gpu_runs/rows/ultrascale.json` says where they are from.
"""

import functools
from dataclasses import dataclass, replace

from labs.checks.verdicts import Wrong
from labs.predictions import hardware
from labs.predictions.gpu_runs.folder import load
from labs.predictions.gpu_runs.run import GpuRun
from labs.predictions.plans.answer import Answer
from labs.predictions.plans.job import training_run
from labs.predictions.step_time.constants import FITTED, Overheads
from labs.predictions.step_time.parts import Part, parts_of
from labs.training.memory_categories import GB

MODELS = {"1B": "nanotron 1B", "8B": "nanotron 8B"}
_OF_THE_HEAD = ("product of the head", "memory traffic of the loss")


@dataclass(frozen=True)
class GpuStep:
    """What a training step consists of. Seconds, except layers and micro_batches.

    layers: of the model. micro_batches: of a step on each GPU, one after the other. kernels: the
    GPU's seconds for one layer of one micro-batch, forward and backward, with the collectives of
    tensor parallelism that nothing hides. launch: the host's seconds to start these kernels, while
    the GPU runs those before. head: the GPU's seconds for output head and loss of one micro-batch.
    once: what a step does once: gradients reduced, optimizer.
    """

    name: str
    layers: int
    micro_batches: int
    kernels: float
    launch: float
    head: float
    once: float

    def __repr__(self):
        launch = f"{1e3 * self.launch:.2f} ms" if self.launch else "0 (not known)"
        return (f"{self.name}\n{self.layers} layers, {self.micro_batches} micro-batches\n"
                "for each layer of each micro-batch: "
                f"kernels {1e3 * self.kernels:.2f} ms, launch {launch}\n"
                f"head {1e3 * self.head:.2f} ms for each micro-batch, "
                f"once {1e3 * self.once:.1f} ms for the step")


@dataclass(frozen=True)
class Candidate:
    """A plan that may be chosen. memory: predicted bytes of a rank at its peak; memory_high: upper
    end of the interval that held 80 % of measured ranks. free: bytes of the GPU for tensors."""

    name: str
    step: GpuStep
    memory: float
    memory_high: float
    free: float

    def __repr__(self):
        return (f"{self.step!r}\nmemory {self.memory / GB:.1f} GB, up to "
                f"{self.memory_high / GB:.1f}, of {self.free / GB:.1f} GB")


PARTS = ("kernels", "waiting for the host", "head", "once")


def right_parts(step: GpuStep) -> dict[str, float]:
    """PARTS -> seconds: in each layer the GPU waits for the host, or the host for the GPU."""
    often = step.micro_batches * step.layers
    return {"kernels": often * step.kernels,
            "waiting for the host": often * max(0.0, step.launch - step.kernels),
            "head": step.micro_batches * step.head, "once": step.once}


def right_seconds(step: GpuStep) -> float:
    """Seconds of a step."""
    return sum(right_parts(step).values())


def step_of(run: GpuRun, calibrated: bool = True) -> GpuStep:
    """The parts of a run without a pipeline. calibrated: with the constants of its code base; else
    with those of published runs of others, and a launch of 0, which is not known."""
    job = run.job if calibrated else replace(
        run.job, code=replace(run.job.code, constants=FITTED, overheads=Overheads()))
    sizes, constants = training_run(job, run.plan), job.code.constants
    seconds = dict.fromkeys(("kernels", "head", "once"), 0.0)
    for part in parts_of(sizes, constants):
        if part.name != "host starting kernels":
            seconds[_place(part)] += part.exposed(constants)
    often = sizes.accumulation
    return GpuStep(name_of(run), sizes.layers, often,
                   kernels=seconds["kernels"] / often / sizes.layers,
                   launch=sizes.overheads.launch * sizes.gpu.generation.host,
                   head=seconds["head"] / often, once=seconds["once"])


def _place(part: Part) -> str:
    return "kernels" if part.in_stage else "head" if part.name in _OF_THE_HEAD else "once"


def name_of(run: GpuRun) -> str:
    """Such as "8B on 16 H100: TP 4 × DP 4, ZeRO-1, micro-batch 2"."""
    plan = run.plan
    return (f"{run.job.name.split()[-1]} on {run.gpus} {run.job.gpu.name}: TP {plan.tensor} × DP "
            f"{plan.data}, {plan.sharding}, micro-batch {plan.micro_batch}")


@functools.cache
def runs(gpus: int = 256) -> list[GpuRun]:
    """Runs on so many GPUs at most whose seconds are known."""
    return [run for run in _all() if run.seconds and run.gpus <= gpus]


@functools.cache
def _all() -> list[GpuRun]:
    return [run for run in load() if run.source == "nanotron" and run.job
            and run.plan.pipeline == 1 and run.plan.tensor <= run.job.gpus_per_node]


def measured_step(model: str, tensor: int, micro_batch: int, gpus: int = 16, sharding: str = "DDP",
                  calibrated: bool = True) -> tuple[GpuStep, float]:
    """(the parts of a public run's step, its measured seconds). model: "1B" or "8B". tensor:
    tensor-parallel ranks. micro_batch: sequences. calibrated: whether with the constants of the
    run's own code base. Raises Wrong where there is no such run."""
    asked = (MODELS.get(model), gpus, tensor, micro_batch, sharding)
    for run in runs():
        if asked == _key(run):
            return step_of(run, calibrated), run.seconds
    known = sorted({_key(run)[2:4] for run in runs() if _key(run)[:2] == asked[:2]
                    and run.plan.sharding == sharding})
    sizes = "; ".join(f"tensor={a}, micro_batch={b}" for a, b in known)
    raise Wrong(f"no run of {model} on {gpus} GPUs with tensor={tensor}, micro_batch={micro_batch},"
                f" sharding={sharding!r}", f"Measured there: {sizes or 'none'}.",
                code="unknown_name")


def _key(run) -> tuple:
    return (run.job.name, run.gpus, run.plan.tensor, run.plan.micro_batch, run.plan.sharding)


MOST_SEQUENCES = 16  # of a micro-batch: larger ones all run out of memory


def candidate_runs(model: str = "8B", gpus: int = 16) -> list[GpuRun]:
    """Every plan that was tried for the model on so many GPUs, those that ran out of memory too; of
    two runs with one plan the first."""
    found = {_key(run): run for run in reversed(_all())
             if (run.job.name, run.gpus) == (MODELS[model], gpus)
             and run.plan.micro_batch <= MOST_SEQUENCES and run.ran is not None}
    return sorted(found.values(), key=lambda run: int(run.id.split()[-1]))


def candidates(model: str = "8B", gpus: int = 16) -> list[Candidate]:
    """The plans that were tried on H100s for 256 sequences of 4,096 tokens. model: "1B" or "8B"."""
    if model not in MODELS:
        raise Wrong(f"no model {model!r}", f"Choose among {', '.join(MODELS)}.",
                    code="unknown_name")
    return [candidate_of(run) for run in candidate_runs(model, gpus)]


def candidate_of(run: GpuRun) -> Candidate:
    """The run as a plan that may be chosen, without what was measured."""
    answer = Answer(run.job, run.plan)
    _, memory = answer.largest
    return Candidate(name_of(run), step_of(run), memory, answer.memory_factors.of(memory)[1],
                     run.job.gpu.usable - hardware.overhead(run.gpus))

"""Meshes and steps of published runs.

Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), table 4;
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (arXiv
2205.05198), table 5; Jiang et al., "MegaScale", NSDI 2024 (arXiv 2402.15627), table 2, the rows of
Megatron-LM, which interleave 6 chunks of layers on each of 8 stages. MegaScale's do not say what is
recomputed; here it is what Megatron-LM recommends, attention alone.
"""

from dataclasses import dataclass, replace

from labs.predictions.plans.job import Job, Plan
from labs.predictions.plans.known_jobs import JOBS


@dataclass(frozen=True)
class MeshRow:
    """Sizes of the dimensions as a report prints them. sequence: tokens; tflops: 16-bit TFLOP/s of
    a GPU; mfu: percent. Both are 0 where a row is made up."""

    gpus: int
    tensor: int
    context: int
    pipeline: int
    data: int
    sequence: int = 8192
    tflops: float = 0
    mfu: float = 0

    def __repr__(self):
        product = self.tensor * self.context * self.pipeline * self.data
        return (f"{self.gpus:,} GPUs; TP {self.tensor} × CP {self.context} × PP {self.pipeline} × "
                f"DP {self.data} = {product:,}")


LLAMA_3 = (MeshRow(8192, 8, 1, 16, 64, 8192, 430, 43), MeshRow(16384, 8, 1, 16, 128, 8192, 400, 41),
           MeshRow(16384, 8, 16, 16, 4, 131072, 380, 38))
"""As printed, its last row's wrong size too."""


@dataclass(frozen=True)
class PublishedStep:
    """A job, how it was spread over its GPUs, and the seconds that a step took."""

    job: Job
    plan: Plan
    seconds: float


def _megascale(gpus: int, batch: int, seconds: float) -> PublishedStep:
    large = JOBS["GPT-175B"]
    job = replace(large, batch=batch, gpus=gpus, shape=replace(large.shape, vocabulary=64000))
    return PublishedStep(job, Plan(gpus // 64, 8, 8), seconds)


def _on_64(recompute: str, seconds: float) -> PublishedStep:
    return PublishedStep(JOBS["GPT-175B on 64"], Plan(1, 8, 8, sharding="DDP", recompute=recompute),
                         seconds)


STEPS_OF_175B = (_on_64("full", 18.13), _on_64("selective", 13.75), _megascale(1024, 768, 11.9),
                 _megascale(3072, 6144, 29.02), _megascale(12288, 6144, 8.57))

"""Meshes and steps of published runs, and how far the model of a step's seconds is from them.

Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), table 4 and
section 3.3.2; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022 (arXiv 2205.05198), table 5 and section 6.2; Jiang et al., "MegaScale", NSDI 2024 (arXiv
2402.15627), table 2 and section 6.1, the rows of Megatron-LM, which interleave 6 chunks of layers
on each of 8 stages. MegaScale's rows do not say what is recomputed; here it is what Megatron-LM
recommends, attention alone.

Llama 3's number of chunks V is not printed either. It follows from section 3.3.2: the first chunk
of the first stage has only the embedding after one layer was taken from it, so a chunk is one
layer, and a stage of 8 places has 8 of them.
"""

from dataclasses import dataclass, replace

from labs.checks.verdicts import shows
from labs.pictures.tables import Table
from labs.predictions.code_bases import MEGATRON
from labs.predictions.plans.job import Job, Plan
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.search import step_parts, step_seconds
from labs.predictions.step_time.efficiency import attention_flops, six_nd
from labs.predictions.step_time.published_runs import error_percent


@dataclass(frozen=True)
class MeshRow:
    """Sizes of the dimensions as a report prints them; data parallelism has the ranks that the
    others leave. sequence: tokens. tflops: 16-bit TFLOP/s of a GPU."""

    gpus: int
    tensor: int
    context: int
    pipeline: int
    sequence: int
    tflops: float


# The first print of the table has the data-parallel size 4 in its last row, where the other sizes
# leave 8; version 3 of the PDF (23 November 2024) prints 8.
LLAMA_3 = (MeshRow(8192, 8, 1, 16, 8192, 430), MeshRow(16384, 8, 1, 16, 8192, 400),
           MeshRow(16384, 8, 16, 16, 131072, 380))

LLAMA_3_PARAMETERS = 405e9
LLAMA_3_TOKENS = 2048 * 8192
"""Of a step: table 4 prints 16M for all rows."""


@dataclass(frozen=True)
class PublishedStep:
    """A job, how it was spread over its GPUs, and the seconds that a step took. name: of its
    source. is_fitted: whether the model's constants were fitted to it, among others."""

    name: str
    job: Job
    plan: Plan
    seconds: float
    is_fitted: bool = False

    @property
    def predicted(self) -> float:
        """Seconds of a step by the model."""
        return step_seconds(self.job, self.plan)

    @property
    def error(self) -> float:
        """Percent by which the prediction is too long; below 0, too short."""
        return error_percent(self.predicted, self.seconds)


def llama_3_seconds(row: MeshRow, attention: float = 1) -> float:
    """Seconds of a step that follow from a row's TFLOP/s. attention: the share of 12·L·h·s FLOPs a
    token that they count: 1 as PaLM's MFU does, which the report cites, 0.5 for what a causal
    kernel computes, 0 for 6N alone."""
    shape = JOBS["Llama-3-405B"].shape
    flops = (six_nd(LLAMA_3_PARAMETERS, 1)
             + attention * attention_flops(shape.layers, shape.hidden, row.sequence))
    return LLAMA_3_TOKENS * flops / row.gpus / (row.tflops * 1e12)


def llama_3_step(row: MeshRow, chunks: int = 8) -> PublishedStep:
    """The step of a row of LLAMA_3: FSDP without recomputation, as section 3.3.2 says, and the
    data-parallel size that the other sizes leave."""
    job = replace(JOBS["Llama-3-405B"], gpus=row.gpus, sequence=row.sequence,
                  batch=LLAMA_3_TOKENS // row.sequence)
    data = row.gpus // (row.tensor * row.context * row.pipeline)
    plan = Plan(data, row.tensor, row.pipeline, row.context, "FSDP", recompute="none",
                chunks=chunks)
    return PublishedStep("Llama 3", job, plan, llama_3_seconds(row))


def _megascale(gpus: int, batch: int, seconds: float) -> PublishedStep:
    large = JOBS["GPT-175B"]
    job = replace(large, batch=batch, gpus=gpus, shape=replace(large.shape, vocabulary=64000))
    return PublishedStep("MegaScale", job, Plan(gpus // 64, 8, 8, chunks=6), seconds)


def _korthikanti(recompute: str, seconds: float) -> PublishedStep:
    plan = Plan(1, 8, 8, sharding="DDP", recompute=recompute,
                chunks=MEGATRON.chunks[96, 8])
    return PublishedStep("Korthikanti", JOBS["GPT-175B on 64"], plan, seconds, is_fitted=True)


STEPS_OF_175B = (_korthikanti("full", 18.13), _korthikanti("selective", 13.75),
                 _megascale(1024, 768, 11.9), _megascale(3072, 6144, 29.02),
                 _megascale(12288, 6144, 8.57))

LLAMA_3_STEPS = tuple(map(llama_3_step, LLAMA_3))
"""Of the rows of LLAMA_3, in their order; the model was fitted to none of them."""


@shows("Published steps of 175B parameters")
def show_published_steps() -> Table:
    """Published and predicted seconds of STEPS_OF_175B, the shares of the predicted step, and the
    prediction for stages of one chunk."""
    rows = []
    for step in STEPS_OF_175B:
        parts = step_parts(step.job, step.plan)
        plain = step_parts(step.job, replace(step.plan, chunks=1))
        shares = [f"{part / parts.total:.1%}" for part in (parts.matmul, parts.all_reduce,
                                                           parts.bubble)]
        rows.append((step.name, f"{step.job.gpus:,}", step.plan.chunks, f"{step.seconds:.2f}",
                     f"{step.predicted:.2f}", f"{step.error:+.1f} %", *shares,
                     f"{plain.total:.2f}", f"{plain.bubble:.2f}"))
    fewer, more = STEPS_OF_175B[3:]
    return Table("Steps of 175 billion parameters",
                 ("source", "GPUs", "chunks", "published s", "predicted s", "error",
                  "matrix products", "all-reduce", "bubble", "s with 1 chunk", "bubble of it, s"),
                 rows, note=f"With 4 times the GPUs, MegaScale's last step is "
                 f"{fewer.seconds / more.seconds:.2f} times as fast; predicted: "
                 f"{fewer.predicted / more.predicted:.2f} times.")


@shows("Seconds of Llama 3's steps")
def show_llama_3_seconds() -> Table:
    """The seconds that follow from the published TFLOP/s on 16,384 GPUs, by the FLOPs that are
    counted, and the predicted seconds of computation alone."""
    rows = []
    for row, step in zip(LLAMA_3[1:], LLAMA_3_STEPS[1:], strict=True):
        parts = step_parts(step.job, step.plan)
        rows.append((f"{row.sequence:,}", row.tflops,
                     *(f"{llama_3_seconds(row, share):.2f}" for share in (0, 0.5, 1)),
                     f"{parts.matmul:.2f}", f"{parts.attention:.2f}"))
    return Table("Seconds of a step of Llama 3 405B on 16,384 GPUs",
                 ("tokens", "TFLOP/s", "6N alone", "half of attention", "all of attention",
                  "predicted matrix products", "predicted attention"), rows,
                 note="Predicted: computation alone, without any communication.")

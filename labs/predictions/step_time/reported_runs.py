"""Training runs as a report prints them: a model, GPUs, tokens per second, and a data sheet.

Of the published rows, those whose report prints the MFU as well, so that a formula can be compared.
"""

import functools
import json
from dataclasses import dataclass

from labs.meters.metrics import Metric
from labs.predictions.step_time.efficiency import hfu, utilization
from labs.predictions.step_time.published_runs import ROWS
from labs.predictions.step_time.row_fields import read_gpu
from labs.words import counted


@dataclass(frozen=True)
class ReportedRun:
    """A run. parameters: all of the model's, a tied matrix once. tied: whether the head is the
    embedding. sequence: tokens of one. recompute: "none", "selective" (attention's two products run
    again in backward) or "full" (all of forward does). sheet_tflops: 16-bit TFLOP/s (1e12) of one
    GPU in its data sheet; sparse: whether that is the rate with sparsity, twice the dense one.
    tokens_per_s: of all GPUs together.
    """

    name: str
    parameters: int
    vocabulary: int
    tied: bool
    layers: int
    hidden: int
    sequence: int
    recompute: str
    gpus: int
    sheet_tflops: float
    sparse: bool
    tokens_per_s: float

    def __repr__(self):
        sheet = f"{self.sheet_tflops:,.4g} TFLOP/s{' with sparsity' * self.sparse}"
        return (f"{self.name}: {self.parameters:,} parameters{' (tied)' * self.tied}, "
                f"{self.layers} layers of width {self.hidden:,}, sequences of {self.sequence:,}\n"
                f"{counted(self.gpus, 'GPU')}, data sheet {sheet}; {self.tokens_per_s:,.0f} "
                f"tokens/s together, recomputes {self.recompute}")

    def metrics(self) -> list[Metric]:
        """Tokens per second and MFU, for the record of a run of one's own."""
        return [Metric(f"{self.name}: throughput", self.tokens_per_s, "tokens/s"),
                Metric(f"{self.name}: MFU", efficiency_of(self).mfu, "")]


class RunEfficiency(ReportedRun):
    """A run with what follows from it. Not for students: it is what they write."""

    @property
    def six_n(self) -> float:
        """FLOPs per token of the weights' products: 6 for each parameter that is multiplied, so not
        for an embedding that is only looked up (torchtitan's num_flops_per_token)."""
        looked_up = 0 if self.tied else self.vocabulary * self.hidden
        return 6 * (self.parameters - looked_up)

    @property
    def attention(self) -> float:
        """FLOPs per token of attention's two products, forward and backward: 12·L·h·s."""
        return 12 * self.layers * self.hidden * self.sequence

    @property
    def flops(self) -> float:
        """FLOPs per token that the model needs, forward and backward."""
        return self.six_n + self.attention

    @property
    def recomputed(self) -> float:
        """FLOPs per token that run again: by convention a third of all with "full"."""
        return {"none": 0, "selective": self.attention / 3, "full": self.flops / 3}[self.recompute]

    @property
    def peak(self) -> float:
        """Dense FLOP/s of one GPU."""
        return self.sheet_tflops * 1e12 / (2 if self.sparse else 1)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        return utilization(self.flops, self.tokens_per_s / self.gpus, self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: what is recomputed counts too."""
        return hfu(self.mfu, self.recomputed / self.flops)


def efficiency_of(run: ReportedRun) -> RunEfficiency:
    """The run with its FLOPs, MFU and HFU."""
    return RunEfficiency(**vars(run))


@functools.cache
def reported_runs() -> dict[str, ReportedRun]:
    """Id -> run, of the published rows that print tokens/s and MFU, in 16 bits."""
    return {name: _run(row) for name, row in _rows().items()}


def printed_mfu(name: str) -> float:
    """The MFU that the report of this run prints, 0 to 1."""
    return _rows()[name]["mfu"] / 100


@functools.cache
def _rows() -> dict[str, dict]:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    return {row["id"]: row for row in rows if row.get("tokens_per_s_per_gpu") and row.get("mfu")
            and "fp8" not in row["precision"]}


def _run(row) -> ReportedRun:
    gpu = read_gpu(row["gpu"])
    return ReportedRun(
        f"{row['model']} on {row['gpus']} {gpu.name}", row["n_params"], row["vocab"],
        "tied embeddings" in row["notes"], row["n_layers"], row["hidden"], row["seq_len"],
        row["activation_checkpointing"], row["gpus"], gpu.sheet_tflops,
        gpu.sparse, row["gpus"] * row["tokens_per_s_per_gpu"])

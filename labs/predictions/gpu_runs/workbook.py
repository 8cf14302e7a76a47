"""Rows of this workbook: Llamas of transformers under FSDP2 on one H200, as one rank of 8.

The rank's collectives send nothing, so that its seconds are those of one GPU alone.
"""

from collections.abc import Iterator

from labs.predictions.code_bases import PYTORCH_EAGER
from labs.predictions.gpu_runs.run import GpuRun, Unreadable
from labs.predictions.hardware import gpu
from labs.predictions.plans.job import Job, Plan
from labs.predictions.plans.models import NoModel, shape_named

RANKS = 8


def runs(content: dict) -> Iterator[GpuRun]:
    """Two runs of each row of the file's content: its memory, and its seconds."""
    for values in content["rows"]:
        row = dict(zip(content["fields"], values, strict=True))
        name = f"{row['model']}, {row['precision']}, {row['batch']} × {row['sequence']}"
        name += ", recomputed" * row["recompute"]
        yield _run(name, "FSDP2, a rank of 8", row, RANKS, memory=row["peak_bytes"])
        yield _run(name, "FSDP2, a GPU alone", row, 1, seconds=row["step_s"])


def _run(name, kind, row, ranks, **measured) -> GpuRun:
    found = {"id": f"workbook {name}", "source": "this workbook", "kind": kind, **measured}
    try:
        if row["precision"] != "mixed":
            raise Unreadable("products in fp32 without TF32 are not predicted")
        shape = shape_named(row["model"])
    except (Unreadable, NoModel) as reason:
        return GpuRun(**found, refused=str(reason))
    plan = Plan(ranks, sharding="FSDP" if ranks > 1 else "DDP", micro_batch=row["batch"],
                recompute="full" if row["recompute"] else "none")
    return GpuRun(**found, plan=plan, job=Job(
        row["model"], shape, row["sequence"], ranks * row["batch"], gpu("H200"), ranks, ranks,
        "bf16 policy", code=PYTORCH_EAGER))

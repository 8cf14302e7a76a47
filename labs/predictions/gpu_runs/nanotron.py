"""Rows of nanotron's benchmark: Llamas of 1B to 80B on 8 to 512 H100s, with DP, ZeRO-1, TP and PP.

Memory is that of world rank 0, which is in the pipeline's first stage.
"""

from collections.abc import Iterator

from labs.predictions.code_bases import NANOTRON
from labs.predictions.gpu_runs.run import BAD_ROW, GpuRun, Unreadable, why
from labs.predictions.hardware import gpu
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.job import Job, Plan, impossible
from labs.training.memory_categories import GiB

GPUS_PER_NODE = 8


def runs(content: dict) -> Iterator[GpuRun]:
    """Every row of the file's content."""
    about, models = content["about"], content["models"]
    for number, values in enumerate(content["rows"]):
        row = dict(zip(content["fields"], values, strict=True))
        yield _run(row, number, about, models)


def _run(row, number, about, models) -> GpuRun:
    found = {"id": f"nanotron {number}", "source": "nanotron", "kind": _kind(row),
             "ran": row["status"] == "ran"}
    try:
        job, plan = _job(row, about, models), _plan(row)
        if reason := impossible(job, plan):
            raise Unreadable(reason)
        if plan.data * plan.micro_batch * row["grad_accum"] != job.batch:
            raise Unreadable("its micro-batches together are not its global batch")
    except BAD_ROW as reason:
        return GpuRun(**found, refused=why(reason))
    ran, tokens = found["ran"], row.get("tokens_per_s_per_gpu")
    return GpuRun(**found, job=job, plan=plan,
                  seconds=job.batch * job.sequence / tokens / job.gpus if ran and tokens else None,
                  memory=row["memory_gib"] * GiB if ran and row.get("memory_gib") else None)


def _kind(row) -> str:
    if row["tp"] == row["pp"] == 1:
        return "DP and ZeRO-1"
    return "TP" if row["pp"] == 1 else "PP" if row["tp"] == 1 else "TP and PP"


def _job(row, about, models) -> Job:
    name = row["model"]
    if name not in models:
        raise Unreadable(f"model {name!r} has no sizes in the file")
    sizes = models[name]
    hidden, heads = sizes["hidden"], sizes["heads"]
    shape = Shape("llama", hidden, sizes["layers"], heads, sizes.get("kv_heads") or heads,
                  hidden // heads, sizes["ffn"], about["vocabulary"], tied=bool(sizes["tied"]))
    return Job(f"nanotron {name}", shape, about["sequence"], row["global_batch"], gpu("H100"),
               row["nodes"] * GPUS_PER_NODE, GPUS_PER_NODE, code=NANOTRON)


def _plan(row) -> Plan:
    return Plan(row["dp"], row["tp"], row["pp"], sharding="ZeRO-1" if row["zero"] else "DDP",
                micro_batch=row["micro_batch"], recompute="none")

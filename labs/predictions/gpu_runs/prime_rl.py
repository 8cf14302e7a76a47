"""Rows of prime-rl's benchmark: Qwen3 under FSDP2 with torch.compile, on 1 to 8 GPUs.

Memory is what torch's allocator had reserved. Rows with activations moved to the host are refused.
Those of Qwen3-30B-A3B have experts, of which every rank computes with all. Two rows of June 2026,
on RTX A6000s, are of later code than the others, of January, and hold about 40 % less memory for
the same job: the constants are those of January.
"""

from collections.abc import Iterator

from labs.predictions.code_bases import PRIME_RL, PRIME_RL_SFT
from labs.predictions.gpu_runs.run import BAD_ROW, GpuRun, Unreadable, why
from labs.predictions.hardware import gpu
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.job import Job, Plan, impossible
from labs.training.memory_categories import GiB

_CARDS = {"H100": "H100", "H200": "H200", "B200": "B200", "A100": "A100-80",
          "A6000": "A6000"}

# Qwen's config.json of each: hidden, layers, heads, kv_heads, head_dim, ffn, tied
_SIZES = {"Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072, True),
          "Qwen3-1.7B": (2048, 28, 16, 8, 128, 6144, True),
          "Qwen3-4B": (2560, 36, 32, 8, 128, 9728, True),
          "Qwen3-8B": (4096, 36, 32, 8, 128, 12288, False),
          "Qwen3-14B": (5120, 40, 40, 8, 128, 17408, False),
          "Qwen3-32B": (5120, 64, 64, 8, 128, 25600, False)}
# The same, and then: experts, active_experts, expert_ffn
_MIXTURES = {"Qwen3-30B-A3B": (2048, 48, 32, 4, 128, 6144, False, 128, 8, 768)}
_WORDS = 151936


def runs(content: dict) -> Iterator[GpuRun]:
    """Every row of the file's content."""
    for values in content["rows"]:
        yield _run(dict(zip(content["fields"], values, strict=True)))


def _run(row) -> GpuRun:
    kind = "LoRA" if row["lora_rank"] else "FSDP2"
    found = {"id": row["id"], "source": "prime-rl",
             "kind": "experts, " * (_name(row) in _MIXTURES) + kind,
             "ran": bool(row["ran"]) or (False if "OutOfMemory" in str(row["error"]) else None),
             "seconds": row["step_s"] or None if row["ran"] else None,
             "memory": row["peak_gib"] * GiB if row["ran"] and row["peak_gib"] else None}
    try:
        job, plan = _job(row)
        if reason := impossible(job, plan):
            raise Unreadable(reason)
    except BAD_ROW as reason:
        return GpuRun(**found, refused=why(reason))
    return GpuRun(**found, job=job, plan=plan)


def _job(row) -> tuple[Job, Plan]:
    name, sizes = _name(row), _SIZES | _MIXTURES
    if name not in sizes:
        raise Unreadable(f"the sizes of {row['model']} are not known here")
    if row["checkpointing"] not in ("Recompute", "none", None):
        raise Unreadable(f"{row['checkpointing']}: activations are moved to the host")
    card = next((known for mark, known in _CARDS.items() if mark in row["gpu"]), None)
    if not card:
        raise Unreadable(f"{row['gpu']} is no GPU of the table")
    *widths, tied = sizes[name][:7]
    experts = dict(zip(("experts", "active_experts", "expert_ffn"), sizes[name][7:], strict=False))
    shape = Shape("llama", *widths, _WORDS, tied=tied, **experts)
    context = row["cp"] or 1
    data = row["gpus"] // context
    plan = Plan(data, context=context, sharding="FSDP", micro_batch=1,
                recompute="full" if row["checkpointing"] == "Recompute" else "none",
                expert=row["ep"] or 1)
    return Job(f"{name}, {row['type']}" + ", LoRA" * bool(row["lora_rank"]), shape, row["sequence"],
               data * row["micro_batches"], gpu(card), row["gpus"],
               code=PRIME_RL_SFT if row["type"] == "sft" else PRIME_RL,
               lora=row["lora_rank"] or 0), plan


def _name(row) -> str:
    return row["model"].split("/")[-1].removesuffix("-Instruct-2507").removesuffix("-Base")

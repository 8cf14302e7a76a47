"""Reads the fields of a published row into a `TrainingRun`.

Fields are free text in part ("8x 200 Gbps HDR IB per node"), so each has a small reader that either
understands it or raises Excluded with the field's name.
"""

import itertools
import re
from dataclasses import replace

from labs.predictions.code_bases import FUSED_LOSS, MEGATRON, CodeBase
from labs.predictions.hardware import GPU, known_gpus
from labs.predictions.step_time.training_run import TrainingRun

_NEEDED = ("n_layers", "hidden", "n_heads", "vocab", "gpu", "gpus", "seq_len", "micro_batch")
_NUMBERS = ("n_layers", "hidden", "n_heads", "vocab", "gpus", "seq_len", "micro_batch", "n_params",
            "n_kv_heads", "ffn_hidden", "gpus_per_node", "global_batch", "grad_accum", "tp", "pp",
            "cp", "virtual_stages", "iter_time_s", "tokens_per_s_per_gpu", "mfu", "tflops_per_gpu")
_HBM2E_96GB = 2400e9  # bytes/s (pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md)
_PARAMETERS_OFF = 0.2  # a mixture of experts has several times what its sizes say


class Excluded(Exception):
    """A row that cannot be predicted; says which field is why."""


def read_run(row: dict, code_base: CodeBase) -> TrainingRun:
    """What the row says about its run, and where it does not, what its code base does."""
    _check_numbers(row)
    strategy, precision = str(row.get("strategy") or ""), str(row.get("precision") or "")
    tensor, pipeline, context = (row.get(name) or 1 for name in ("tp", "pp", "cp"))
    data = row["gpus"] // (tensor * pipeline * context)
    if not data:
        raise Excluded(f"gpus={row['gpus']} is less than tp·pp·cp")
    if _has("offload", strategy):
        raise Excluded("strategy names offloading, but no row says what stays on the host")
    return TrainingRun(
        **_sizes(row), **_batch(row, data, pipeline), **_node(row), **_kernels(row, code_base),
        tensor=tensor, pipeline=pipeline, context=context,
        sequence_parallel=tensor > 1 and (
            code_base is not MEGATRON or _has(r"sequence parallel|\bSP\b", strategy)),
        chunks=row.get("virtual_stages") or code_base.chunks.get(
            (row["n_layers"], pipeline), 2 if _has("interleaved", strategy) else 1),
        **_sharding(strategy, data * context, row.get("gpus_per_node") or 8),
        reduce_bytes=2 if _has(r"\bPURE\b", precision) else 4, fp8=_has("fp8|float8", precision),
        tensor_overlaps=_has("async", strategy), reduce_overlaps=pipeline == 1)


def read_gpu(text: str) -> GPU:
    """The GPU that a row names: "a100_80gb", "A100 80GB", "H100 96GB HBM2e 500W"."""
    memory = _number(r"(\d+) ?GB", text)
    for gpu in reversed(known_gpus().values()):  # "A100" alone is the later one, of 80 GB
        name, _, size = gpu.name.partition("-")
        if (_has(rf"(?<![A-Z0-9]){name}(?![A-Z0-9])", text)
                and (not size or memory in (0, float(size)))):
            return replace(gpu, bandwidth=_HBM2E_96GB) if _has("96 ?GB HBM2e", text) else gpu
    raise Excluded(f"gpu {text!r} is not in the table of labs/predictions/hardware.py")


def read_network(text: str, per_node: float) -> float:
    """Bytes/s of network adapters per GPU: "RoCE 1600 Gbps/node" and "8x 200 Gbps HDR IB per node"
    are 25e9 with 8 GPUs per node, "400 Gb/s RDMA per GPU" is 50e9. 0 if it says nothing."""
    found = re.search(r"(?:(\d+) ?x ?)?(\d+) ?Gb(?:ps|/s|it/s)", text, re.IGNORECASE)
    if not found:
        return 0
    rate = float(found[2]) * int(found[1] or 1) * 1e9 / 8
    return rate if "per GPU" in text else rate / per_node


def read_recompute(text: str) -> str:
    """"none", "selective", "half" or "full" from the field activation_checkpointing."""
    if text.startswith("selective-op"):  # torchtitan: saves attention and every second product
        return "half"
    if text in ("none", "selective", "full"):
        return text
    raise Excluded(f"activation_checkpointing {text!r} is none of none, selective, full")


def _check_numbers(row):
    if missing := [name for name in _NEEDED if not row.get(name)]:
        raise Excluded(f"has no {', '.join(missing)}")
    for name in _NUMBERS:
        value = row.get(name)
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise Excluded(f"{name}={value!r} is not a number above 0")


def _sizes(row) -> dict:
    hidden, heads = row["hidden"], row["n_heads"]
    sizes = dict(layers=row["n_layers"], hidden=hidden, ffn=row.get("ffn_hidden") or 4 * hidden,
                 heads=heads, kv_hidden=hidden * (row.get("n_kv_heads") or heads) / heads,
                 vocabulary=row["vocab"])
    return sizes | dict(mlp_matrices=_mlp_matrices(row, sizes))


def _mlp_matrices(row, sizes) -> int:
    """3 if the MLP is gated: the number which, with tied embeddings or without, with learned
    positions or without, comes nearest to the published parameters. Where none are published, an
    MLP 4h wide is not gated."""
    hidden, ffn = sizes["hidden"], sizes["ffn"]
    if not row.get("n_params"):
        return 2 if ffn == 4 * hidden else 3

    def missed_by(matrices, embeddings, positions):
        layer = 2 * hidden * (hidden + sizes["kv_hidden"]) + matrices * hidden * ffn
        looked_up = (embeddings * row["vocab"] + positions * row["seq_len"]) * hidden
        return abs(sizes["layers"] * layer + looked_up - row["n_params"])

    nearest = min(itertools.product((2, 3), (1, 2), (0, 1)), key=lambda one: missed_by(*one))
    if missed_by(*nearest) > _PARAMETERS_OFF * row["n_params"]:
        raise Excluded(f"n_params={row['n_params']:.4g} is no dense transformer of these sizes")
    return nearest[0]


def _batch(row, data, pipeline) -> dict:
    """Micro-batches of a step; the last may be partly full, and so may a single one. A pipeline
    needs as many as it has stages: PyTorch's schedules cut a smaller number up."""
    count = row.get("grad_accum") or 1
    if row.get("global_batch"):
        count = row["global_batch"] / (row["micro_batch"] * data)
    return dict(sequence=row["seq_len"], micro_batch=row["micro_batch"] * min(1, count / pipeline),
                accumulation=max(pipeline, count))


def _node(row) -> dict:
    text, per_node = str(row["gpu"]), row.get("gpus_per_node") or 8
    gpu = read_gpu(text)
    network = read_network(str(row.get("interconnect") or ""), per_node)
    return dict(gpu=gpu, gpus=row["gpus"], gpus_per_node=per_node,
                network=network or gpu.generation.network,
                power=_number(r"(\d+) ?W\b", text))


def _kernels(row, code_base) -> dict:
    """torch.compile fuses pointwise operations and the loss."""
    compiled = bool(row.get("compile"))
    return dict(recompute=read_recompute(str(row.get("activation_checkpointing") or "none")),
                flash=code_base.flash, fused=code_base.fused or compiled,
                loss_bytes=FUSED_LOSS if compiled else code_base.loss_bytes,
                early_stop=code_base.early_stop)


def _sharding(strategy, ranks, per_node) -> dict:
    """ZeRO stage and the ranks that parameters are cut over. ZeRO-1 sends what DDP sends."""
    if _has("SHARD_GRAD_OP|ZeRO-?2", strategy):
        return dict(sharding=2, shards=ranks)
    if _has("HYBRID|HSDP", strategy):
        return dict(sharding=3, shards=min(ranks, per_node))
    if _has("FSDP|FULL_SHARD|ZeRO-?3", strategy):
        return dict(sharding=3, shards=ranks)
    return dict(sharding=0, shards=1)


def _has(pattern, text) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


def _number(pattern, text) -> float:
    found = re.search(pattern, text, re.IGNORECASE)
    return float(found[1]) if found else 0

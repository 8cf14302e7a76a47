"""Rows of Megatron-LM's functional tests: GPTs, small ones and ones of 7B, on 8 GPUs, dense and
with experts; Mixtral 8x7B on 128.

Memory is that of a rank of the pipeline's last stage. What is no GPT is refused: T5, BERT; and of
GPTs those with latent attention, shared experts, further heads, Mamba, 8 bits, Muon, reinforcement
learning.
"""

from collections.abc import Iterator

from labs.predictions.code_bases import MEGATRON_CORE
from labs.predictions.gpu_runs.run import BAD_ROW, GpuRun, Unreadable, why
from labs.predictions.hardware import gpu
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.job import Job, Plan, impossible

GPUS = 8  # of a test whose recipe is not known: one node
# No public recipe has this release test. Its states say how many GPUs it took: 128 would have 17.3
# GB of them on a rank of the last stage, 64 21.9 and 256 15.1; 17.5 to 17.7 GB stay allocated.
_GPUS_OF = {"mixtral/mixtral_8x7b_alltoall_tp2pp4ep4": 128}
_CARDS = {"a100": "A100-80", "h100": "H100"}
_EXPERTS = ("moe", "mixtral")  # folders of tests that have experts beside those of dense GPTs
_NOT_READ = {"multi-latent-attention": "latent attention",
             "hybrid-layer-pattern": "Mamba layers", "hybrid-override-pattern": "Mamba layers",
             "perform-rl-step": "reinforcement learning", "spec": "a layer of its own",
             "export-kd-cfg": "a teacher beside it", "mtp-num-layers": "further heads",
             "fp8-format": "products in 8 bits",
             "moe-shared-expert-intermediate-size": "shared experts"}
_WORDS = 50257  # GPT-2's, the tests' tokenizer
_SENTENCE_PIECE = 256000  # Nemotron's


def runs(content: dict) -> Iterator[GpuRun]:
    """Every row of the file's content."""
    for values in content["rows"]:
        row = dict(zip(content["fields"], values, strict=True))
        yield _run(row, content["configs"].get(row["test"]))


def _run(row, config) -> GpuRun:
    # A GB200 is not in the table of GPUs, and some records name none: there only memory is known.
    seconds = row["step_s"] if row["platform"] in _CARDS else None
    found = {"id": f"{row['test']} {row['record']}", "source": "Megatron-LM",
             "kind": "experts" if config and config.get("num-experts") else "dense GPT",
             "seconds": seconds or None, "memory": row["peak_bytes"] or None}
    try:
        job, plan = _job(row, config or {})
        if reason := impossible(job, plan):
            raise Unreadable(reason)
    except BAD_ROW as reason:
        return GpuRun(**found, refused=why(reason))
    return GpuRun(**found, job=job, plan=plan, stage=plan.pipeline - 1)


def _job(row, config) -> tuple[Job, Plan]:
    shape = _shape(config, row["test"])
    if row["platform"] not in (*_CARDS, "gb200", None):
        raise Unreadable(f"platform {row['platform']!r} is no GPU of the table")
    sizes = {"tensor": config.get("tensor-model-parallel-size") or 1,
             "pipeline": config.get("pipeline-model-parallel-size") or 1,
             "context": config.get("context-parallel-size") or 1}
    gpus = (row["nodes"] or 0) * (row["gpus_per_node"] or 0) or next(
        (count for mark, count in _GPUS_OF.items() if row["test"].startswith(mark)), GPUS)
    each = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    data = max(1, gpus // each)
    batch = config.get("global-batch-size")
    if not batch:
        raise Unreadable("neither its global batch nor its number of GPUs is known")
    layers = config.get("num-layers-per-virtual-pipeline-stage")
    plan = Plan(data, **sizes, sharding=_sharding(config), recompute=_recompute(config),
                micro_batch=config["micro-batch-size"],
                chunks=shape.layers // sizes["pipeline"] // layers if layers else 1,
                sequence_parallel=bool(config.get("sequence-parallel")),
                **_expert_sizes(config, shape),
                stages=_stages(config, shape, sizes["pipeline"]))
    card = gpu(_CARDS.get(row["platform"], "H100"))
    kind = "Megatron GPT with experts" if shape.is_mixture else "Megatron GPT"
    name = f"{kind}, {shape.layers} layers of {shape.hidden}, on {card.name}"
    return Job(name, shape, config.get("seq-length") or 0, batch, card, plan.gpus,
               flash=_is_fused(row, config), code=MEGATRON_CORE), plan


def _shape(config, test) -> Shape:
    folder = test.split("/")[0]
    if folder not in ("gpt", *_EXPERTS) or not config.get("num-layers"):
        raise Unreadable(f"{folder} is no dense GPT")
    for key, what in _NOT_READ.items():
        if config.get(key):
            raise Unreadable(f"{key}: it has {what}")
    if config.get("optimizer", "adam") != "adam":
        raise Unreadable(f"its optimizer is {config['optimizer']}, not Adam")
    hidden, heads = config["hidden-size"], config["num-attention-heads"]
    is_gated, has_bias = bool(config.get("swiglu")), not config.get("disable-bias-linear")
    # megatron/training/arguments.py: 2/3 of 4h where the MLP is gated, in steps of 64
    ffn = config.get("ffn-hidden-size") or (int(4 * hidden * 2 / 3) // 64 * 64 if is_gated
                                            else 4 * hidden)
    rotary = config.get("position-embedding-type") == "rope"
    words = config.get("vocab-size") or (
        _SENTENCE_PIECE if "SentencePiece" in str(config.get("tokenizer-type")) else _WORDS)
    step = 128 * (config.get("tensor-model-parallel-size") or 1)
    return Shape("llama" if is_gated else "gpt2", hidden, config["num-layers"], heads,
                 config.get("num-query-groups") or heads, config.get("kv-channels")
                 or hidden // heads, ffn, -(-words // step) * step,
                 positions=0 if rotary else config["max-position-embeddings"],
                 tied=not config.get("untie-embeddings-and-output-weights"),
                 qkv_bias=has_bias, out_bias=has_bias, mlp_bias=has_bias,
                 **_experts(config, ffn))


def _experts(config, ffn) -> dict:
    if not config.get("num-experts"):
        return {}
    if config.get("moe-layer-freq"):
        raise Unreadable("moe-layer-freq: only some of its layers have experts")
    # megatron/training/arguments.py: two experts for each token, as wide as the MLP
    return dict(experts=config["num-experts"], active_experts=config.get("moe-router-topk") or 2,
                expert_ffn=config.get("moe-ffn-hidden-size") or ffn)


def _expert_sizes(config, shape) -> dict:
    if not shape.is_mixture:
        return {}
    return {"expert": config.get("expert-model-parallel-size") or 1,
            "expert_tensor": config.get("expert-tensor-parallel-size") or 0}


def _sharding(config) -> str:
    if config.get("use-megatron-fsdp"):
        return "FSDP"
    return "ZeRO-1" if config.get("use-distributed-optimizer") else "DDP"


def _recompute(config) -> str:
    return config.get("recompute-granularity") or "none"


def _stages(config, shape, pipeline) -> str | tuple[int, ...]:
    first, last = (config.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if not first or not last or pipeline < 3:
        return ""
    middle = (shape.layers - first - last) // (pipeline - 2)
    return (first, *[middle] * (pipeline - 2), last)


def _is_fused(row, config) -> bool:
    """Whether attention's scores are never written: not in the implementation of its own, nor where
    a test says so, nor in the older records, whose Transformer Engine had no deterministic
    kernel."""
    if config.get("attention-backend") in ("flash", "fused"):
        return True
    return not (config.get("attention-backend") == "unfused" or "dracooci" in row["record"]
                or config.get("transformer-impl") == "local")

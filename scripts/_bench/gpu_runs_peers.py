"""Estimators that can be installed, each asked for a row as its users would ask it.

Where a package's argument can be read in two ways, it is asked in the way that errs less.
"""

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from _bench import deepspeed_estimates
from labs.predictions.gpu_runs.estimators import Estimator
from labs.predictions.hardware import GPU
from labs.predictions.memory.parameters import count
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.job import Job, Plan
from labs.training.memory_categories import GB

EFFICIENCY = 0.5
"""Share of a GPU's peak: mlsysim's default, and what llm-analysis says that Megatron-LM reaches."""

_ZERO_STAGE = {"DDP": 0, "ZeRO-1": 1, "FSDP": 3}

# GPU -> node, fabric and accelerator in mlsysim's registry, which has no DGX H200
_DGX = {"A100-80": ("DGX_A100", "InfiniBand_HDR", "A100"),
        "H100": ("DGX_H100", "InfiniBand_NDR", "H100"),
        "H200": ("DGX_H100", "InfiniBand_NDR", "H200"),
        "B200": ("DGX_B200", "InfiniBand_NDR", "B200")}


@dataclass(frozen=True)
class Peer:
    """module: what must be importable. install: the command that adds it to the environment."""

    module: str
    install: str
    estimators: tuple[Estimator, ...]

    @property
    def is_installed(self) -> bool:
        """Whether the module can be imported."""
        return importlib.util.find_spec(self.module) is not None


def installed() -> Iterator[Estimator]:
    """Estimators of the packages that can be imported."""
    for peer in PEERS:
        if peer.is_installed:
            yield from peer.estimators


def missing() -> dict[str, str]:
    """Module that cannot be imported -> the command that installs it."""
    return {peer.module: peer.install for peer in PEERS if not peer.is_installed}


def accelerate(job: Job, plan: Plan, stage: int = 0) -> float | None:
    """"Training using Adam" of `accelerate estimate-memory`: of one GPU that has the complete
    model."""
    if plan.tensor * plan.pipeline > 1 or plan.sharding != "DDP":
        return None
    from accelerate.commands.estimate import estimate_training_usage

    precision = "float16" if job.bytes_per_parameter.compute == 2 else "float32"
    return float(max(estimate_training_usage(4 * count(job.shape), precision).values()))


def deepspeed(job: Job, plan: Plan, stage: int = 0) -> float | None:
    """DeepSpeed's estimate of the model states for each GPU, under ZeRO-1 and ZeRO-3 (FSDP)."""
    if plan.tensor * plan.pipeline > 1 or plan.sharding not in ("ZeRO-1", "FSDP"):
        return None
    shape, ranks = job.shape, plan.data * plan.context
    # of the modules that have parameters of their own: the embedding, or a matrix of the MLP
    largest = shape.hidden * max(shape.vocabulary, shape.ffn)
    return float(deepspeed_estimates.model_states(
        count(shape), largest, ranks, _ZERO_STAGE[plan.sharding])[1])


def mlsysim_seconds(job: Job, plan: Plan, stage: int = 0) -> float | None:
    """Step latency of mlsysim's DistributedModel. The gradients are exchanged once for the global
    batch; with `gradient_accumulation_steps` its exchange would be a share of one."""
    if not _mlsysim_knows(job, plan):
        return None
    from mlsysim.solvers import DistributedModel

    found = DistributedModel().solve(
        _mlsysim_model(job.shape), _mlsysim_fleet(job.gpu, job.gpus, job.gpus_per_node),
        batch_size=job.batch, seq_len=job.sequence, efficiency=EFFICIENCY, tp_size=plan.tensor,
        pp_size=plan.pipeline, v_stages=plan.chunks, microbatch_count=plan.micro_batches(job),
        zero_stage=_ZERO_STAGE[plan.sharding], activation_recomputation=plan.recompute == "full")
    return float(found.step_latency_total.m_as("second"))


def mlsysim_memory(job: Job, plan: Plan, stage: int = 0) -> float | None:
    """Bytes of mlsysim's TrainingMemoryModel, with a pipeline's micro-batches in flight as its
    DistributedModel asks for them."""
    if not _mlsysim_knows(job, plan):
        return None
    from mlsysim.solvers import TrainingMemoryModel

    accelerator = _mlsysim_fleet(job.gpu, job.gpus, job.gpus_per_node).node.accelerator
    found = TrainingMemoryModel().solve(
        _mlsysim_model(job.shape), accelerator, batch_size=job.batch, seq_len=job.sequence,
        tp_size=plan.tensor, pp_size=plan.pipeline, dp_size=plan.data,
        activation_checkpointing=_recompute(job, plan), zero_stage=_ZERO_STAGE[plan.sharding],
        gradient_accumulation_steps=max(1, plan.micro_batches(job) // plan.pipeline),
        sequence_parallel=plan.sequence_parallel)
    return float(found.total_memory.m_as("byte"))


def _mlsysim_knows(job, plan) -> bool:
    return (_has_arguments_for(plan) and job.gpu.name in _DGX
            and job.gpus % min(job.gpus, job.gpus_per_node) == 0)


def _has_arguments_for(plan) -> bool:
    return plan.context == 1 and plan.sharding in _ZERO_STAGE and plan.schedule == "1F1B"


def _recompute(job, plan) -> str:
    """Attention that never writes its scores keeps what selective recomputation keeps."""
    return "selective" if plan.recompute == "none" and job.flash else plan.recompute


@functools.cache
def _mlsysim_model(shape: Shape):
    from mlsysim.core.units import Q_
    from mlsysim.models.types import TransformerWorkload

    return TransformerWorkload(
        name="model", architecture="Transformer", parameters=Q_(count(shape), "count"),
        layers=shape.layers, hidden_dim=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, vocab_size=shape.vocabulary)


@functools.cache
def _mlsysim_fleet(card: GPU, gpus: int, gpus_per_node: int):
    """The DGX of the GPU's generation in its registry, with as many of its GPUs as the job has."""
    from mlsysim import Hardware, Systems
    from mlsysim.systems.types import Fleet

    node, fabric, accelerator = _DGX[card.name]
    each = min(gpus, gpus_per_node)
    node = getattr(Systems.Nodes, node).model_copy(update={
        "accelerator": getattr(Hardware.Cloud, accelerator), "accelerators_per_node": each})
    return Fleet(name="cluster", node=node, count=gpus // each,
                 fabric=getattr(Systems.Fabrics, fabric))


def llm_analysis_seconds(job: Job, plan: Plan, stage: int = 0) -> float | None:
    """Latency of an iteration of llm-analysis."""
    found = _llm_analysis(job, plan)
    return found and found["latency_per_iter"]


def llm_analysis_memory(job: Job, plan: Plan, stage: int = 0) -> float | None:
    """Weights, optimizer state, gradients and activations of llm-analysis, which counts those of a
    pipeline's first stage."""
    found = None if stage else _llm_analysis(job, plan)
    return found and found["(weight+op_state+grad+act)_memory_per_gpu"]


@functools.lru_cache(maxsize=1)  # a row's seconds and its memory are one question
def _llm_analysis(job, plan) -> dict | None:
    if not _has_arguments_for(plan) or plan.chunks > 1:
        return None
    from llm_analysis import analysis, config

    analysis.logger.setLevel("ERROR")
    shape, card = job.shape, job.gpu
    # It counts two matrices of the MLP; its Llamas' widths are those of as many parameters.
    ffn = shape.ffn if shape.mlp_matrices == 2 else 3 * shape.ffn // 2
    model = config.ModelConfig(
        "model", shape.layers, shape.heads, shape.hidden, shape.vocabulary, job.sequence,
        shape.kv_heads, ffn_embed_dim=ffn, expansion_ratio=ffn / shape.hidden)
    hardware = config.GPUConfig(
        card.name, card.nominal / GB, card.bandwidth / GB, card.nvlink / GB, 8e-6,
        card.flops / 1e12, inter_node_bandwidth_in_GB_per_sec=8 * job.network / GB)
    ranks = config.ParallelismConfig(plan.tensor, plan.pipeline, plan.data, sp_size=(
        plan.tensor if plan.sequence_parallel else 1))
    asked = analysis.LLMAnalysis(model, hardware, config.DtypeConfig(), ranks,
                                 flops_efficiency=EFFICIENCY)
    return asked.training(
        plan.micro_batch, plan.micro_batches(job), job.batch, job.sequence,
        activation_recomputation=analysis.ActivationRecomputation[plan.recompute.upper()],
        ds_zero=analysis.DSZeRO(_ZERO_STAGE[plan.sharding]), flash_attn=job.flash,
        mlp_gated_linear_units=shape.family != "gpt2")


_NO_TERM = "context parallelism, HSDP, schedules other than 1F1B"
PEERS = (
    Peer("accelerate", "pip install accelerate", (
        Estimator("accelerate estimate-memory", "memory", accelerate,
                  "TP, PP and sharded states: it knows one GPU with the complete model"),)),
    Peer("deepspeed", "pip install 'data-parallel-workbook[third-party]'", (
        Estimator("DeepSpeed's ZeRO estimate", "memory", deepspeed,
                  "TP and PP, which it has no argument for, and DDP"),)),
    Peer("mlsysim", "pip install mlsysim==0.3.0", (
        Estimator("mlsysim", "seconds", mlsysim_seconds, _NO_TERM),
        Estimator("mlsysim", "memory", mlsysim_memory, _NO_TERM))),
    Peer("llm_analysis", "pip install --no-deps llm-analysis==0.2.2 fire termcolor", (
        Estimator("llm-analysis", "seconds", llm_analysis_seconds,
                  f"{_NO_TERM}, interleaved stages"),
        Estimator("llm-analysis", "memory", llm_analysis_memory,
                  f"{_NO_TERM}, interleaved stages, a pipeline's later stages"))))
"""Packages in the order in which they are listed. llm-analysis asks for transformers below 5, but
imports it for Hugging Face's configurations alone: without its dependencies it can be installed
beside any version."""

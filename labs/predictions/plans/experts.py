"""Expert parallelism: which rank has which experts, and what a layer saves of tokens sent to it.

Expert-parallel ranks are taken out of the data-parallel and context-parallel ones, as Megatron-Core
(core/parallel_state.py) and torchtitan (distributed/parallel_dims.py) do: for everything else they
are data-parallel ranks. Each has `experts / expert` experts of a layer, and an all-to-all sends it
the tokens that these are chosen for (Lepikhin et al., "GShard", 2020, arXiv 2006.16668, section 3).
"""

from typing import TYPE_CHECKING

from labs.predictions.memory.parameters import experts_size

if TYPE_CHECKING:  # job.py imports this file
    from labs.predictions.plans.job import Job, Plan

ROUTER_BYTES = 8
"""For each expert and token: the router's logits and probabilities, both in fp32."""


def layer_experts(job: "Job") -> int:
    """Parameters of all experts of a layer; 0 in a dense model."""
    return experts_size(job.shape)


def expert_tensor(plan: "Plan") -> int:
    """Tensor-parallel ranks of an expert: as many as of attention, unless the plan says another
    number."""
    return plan.expert_tensor or plan.tensor


def is_sent(plan: "Plan") -> bool:
    """Whether the experts are on other ranks than plain tensor parallelism puts them on."""
    return plan.expert > 1 or expert_tensor(plan) != plan.tensor


def rank_experts(job: "Job", plan: "Plan") -> float:
    """Parameters of a layer's experts that one rank computes with, before they are sharded."""
    return layer_experts(job) / (plan.expert * expert_tensor(plan))


def expert_copies(plan: "Plan") -> int:
    """Ranks of a pipeline stage that compute with the same experts: those over which their
    gradients are reduced."""
    return plan.data * plan.context * plan.tensor // (plan.expert * expert_tensor(plan))


def expert_shards(job: "Job", plan: "Plan") -> int:
    """Ranks that an expert's parameters are sharded over, in equal parts; 1 under DDP, ZeRO-1 and
    ZeRO-2. FSDP2 shards along a tensor's first dimension: where one tensor has all experts, and
    these are fewer than the ranks, a code base must name another dimension, as torchtitan does."""
    if not plan.is_fsdp:
        return 1
    return plan.shards(job) * plan.tensor // (plan.expert * expert_tensor(plan))


def expert_optimizer_shards(job: "Job", plan: "Plan") -> int:
    """Ranks that the optimizer state of an expert is sharded over."""
    return (expert_copies(plan) if plan.sharding in ("ZeRO-1", "ZeRO-2")
            else expert_shards(job, plan))


def dispatched_bytes(job: "Job", plan: "Plan") -> float:
    """Bytes that one layer saves of the tokens sent to its experts, for the backward of one
    micro-batch, on one rank: copies of the residual stream, one set for each expert that a token
    uses, in 16 bits, and what the router computed. The copies are those that each token needs on
    all tensor-parallel ranks of an expert. 0 in a dense model."""
    shape = job.shape
    if not shape.is_mixture:
        return 0.0
    copies = (2 * job.code.kept.dispatched * shape.active_experts * shape.hidden
              * expert_tensor(plan))
    tokens = plan.micro_batch * job.sequence / plan.context
    return tokens * (copies + ROUTER_BYTES * shape.experts) / plan.tensor


def impossible_experts(job: "Job", plan: "Plan") -> str:
    """Why the experts cannot be divided over the plan's ranks, in one sentence; empty if they
    can."""
    if plan.expert == 1 and not plan.expert_tensor:
        return ""
    if not job.shape.is_mixture:
        return f"expert parallelism {plan.expert}: {job.name} has no experts"
    if job.shape.experts % plan.expert:
        return f"{job.shape.experts} experts cannot be divided by {plan.expert}"
    if job.shape.expert_ffn % expert_tensor(plan):
        return (f"{job.shape.expert_ffn:,} elements of an expert cannot be divided by "
                f"{expert_tensor(plan)}")
    if plan.data * plan.context * plan.tensor % (plan.expert * expert_tensor(plan)):
        if plan.expert_tensor:
            return (f"data {plan.data} × context {plan.context} × tensor {plan.tensor} cannot be "
                    f"divided by expert {plan.expert} × expert-tensor {plan.expert_tensor}")
        return (f"data {plan.data} × context {plan.context} cannot be divided by expert "
                f"{plan.expert}")
    if plan.offload:
        return "offload to the host is not modelled beside expert parallelism"
    if plan.sharding == "HSDP" and plan.shards(job) * plan.tensor % (
            plan.expert * expert_tensor(plan)):
        return (f"HSDP shards over {plan.shards(job)} ranks of a node, which cannot be divided by "
                f"expert {plan.expert}")
    return ""

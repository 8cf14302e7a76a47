"""Seconds that one rank communicates, and how many of them computation does not hide.

A collective takes its bytes over the slowest link of its ring plus a time per hop; the bytes are
those of `labs.predictions.communication.traffic`.
"""

from labs.predictions.communication import traffic
from labs.predictions.step_time.constants import LINK_SHARE, Constants
from labs.predictions.step_time.training_run import TrainingRun


def exposed(communication: float, computation: float, constants: Constants) -> float:
    """Seconds by which communication lengthens computation that runs at the same time: all that
    is longer than it, and a share of what is not, because both use the same multiprocessors."""
    hidden = min(communication, computation)
    return communication - hidden + constants.unhidden * hidden


def link_rate(run: TrainingRun, ranks: int, stride: int = 1, share: float = 0.0) -> float:
    """Bytes/s of a ring of `ranks` ranks that are `stride` ranks apart. Within a node it is
    NVLink's, or PCIe's where there is none. Between nodes all of the group's ranks on a node carry
    the ring in parallel, each through its own adapter, and NVLink bounds their sum. share: of the
    adapters' rate on two nodes, where the code base has one of its own."""
    local = (run.gpu.nvlink or run.gpu.pcie) * LINK_SHARE
    if _is_local(run, ranks, stride):
        return local
    on_node = max(1, run.gpus_per_node // stride)
    nodes = ranks * stride / run.gpus_per_node
    reached = share * max(1.0, nodes / 2) ** -run.overheads.spread if share else LINK_SHARE
    return min(local, on_node * run.network * reached)


def _is_local(run, ranks, stride) -> bool:
    return (ranks - 1) * stride < run.gpus_per_node


def _ring(run, constants, size, ranks, stride=1, passes=1, *, share=0.0, hop=0.0) -> float:
    """Seconds of an all-gather or reduce-scatter (1 pass) or all-reduce (2) of `size` bytes. share
    and hop: between nodes, where the code base has its own."""
    if ranks == 1:
        return 0.0
    sent = traffic.all_gather(size, ranks)
    hop = constants.hop if _is_local(run, ranks, stride) else hop or constants.hop
    return passes * (sent / link_rate(run, ranks, stride, share) + (ranks - 1) * hop)


def _of_gradients(run) -> dict:
    return {"share": run.overheads.gradient_share, "hop": run.overheads.gradient_hop}


def tensor_seconds(run: TrainingRun, constants: Constants) -> float:
    """Of one layer: two all-reduces of activations forward and two backward, and those of forward
    again if it is recomputed (Shoeybi et al., "Megatron-LM", 2019, arXiv 1909.08053, section 3).
    Sequence parallelism sends the same bytes. None of it overlaps."""
    # 2 forward, 2 backward, 2 of the forward that is recomputed
    count = 6 if run.recompute == "full" else 4
    size = 2 * run.tokens * run.hidden
    own = {"share": run.overheads.activation_share, "hop": run.overheads.hop}
    one = _ring(run, constants, size, run.tensor, passes=2, **own)
    if not run.expert:
        return count * one
    # those of the MLP: what its ranks were sent, a token once for each of its experts
    sent = size * run.active_experts * run.expert_tensor / run.tensor
    return count / 2 * (one + _ring(run, constants, sent, run.expert_tensor, passes=2, **own))


def expert_seconds(run: TrainingRun, constants: Constants) -> float:
    """Of one layer: an all-to-all of the tokens to their experts and one back, two forward and two
    backward, and those of forward again if it is recomputed (Lepikhin et al., "GShard", 2020, arXiv
    2006.16668, section 3.3). Of what a rank sends, tokens × active experts × hidden in 16 bits, 1/N
    stays; tensor-parallel ranks send a share each. What is for ranks of the same node goes over
    NVLink, what is for others over the rank's own network adapter, both at once. Computing hides
    none of it."""
    if run.expert < 2:
        return 0.0
    count = 6 if run.recompute == "full" else 4
    size = 2 * run.tokens / run.tensor * run.active_experts * run.hidden
    local = min(run.expert, max(1, run.gpus_per_node // run.expert_tensor))
    inside = size * (local - 1) / run.expert / ((run.gpu.nvlink or run.gpu.pcie) * LINK_SHARE)
    share = run.overheads.activation_share or LINK_SHARE
    outside = size * (run.expert - local) / run.expert / (run.network * share)
    hop = constants.hop if local == run.expert else run.overheads.hop or constants.hop
    return count * (max(inside, outside) + (run.expert - 1) * hop)


def context_seconds(run: TrainingRun, constants: Constants) -> tuple[float, float]:
    """Of one layer, (forward, backward): each rank's keys and values go once around the ring, and
    backward their gradients too (Liu et al., "Ring Attention", 2023, arXiv 2310.01889)."""
    size = 2 * 2 * run.tokens * run.context * run.kv_hidden / run.tensor
    forward = _ring(run, constants, size, run.context, run.tensor)
    return forward, 2 * forward


def sharding_seconds(run: TrainingRun, constants: Constants) -> tuple[float, float]:
    """Of one layer, (forward, backward): parameters are gathered for forward, gathered again for
    backward in stage 3, and gradients are reduce-scattered."""
    if run.sharding < 2:
        return 0.0, 0.0
    stride = run.tensor
    kind = _of_gradients(run)
    gather = _ring(run, constants, run.param_bytes * run.layer_parameters, run.shards, stride,
                   **kind)
    reduce = _ring(run, constants, run.trained * run.reduce_bytes * run.layer_parameters,
                   run.shards, stride, **kind)
    if run.expert:
        shards, apart = run.expert_shards, run.expert * run.expert_tensor
        gather += _ring(run, constants, run.param_bytes * run.expert_weights, shards, apart, **kind)
        reduce += _ring(run, constants, run.trained * run.reduce_bytes * run.expert_weights,
                        shards, apart, **kind)
    return gather, reduce + (gather if run.sharding == 3 else 0)


def embedding_seconds(run: TrainingRun, constants: Constants) -> float:
    """The embedding's gathering and reduction under sharding: first and last, so nothing hides
    them."""
    if run.sharding < 2:
        return 0.0
    size = (run.param_bytes + run.reduce_bytes) * run.embedding_parameters
    return _ring(run, constants, size, run.shards, run.tensor, **_of_gradients(run))


def all_reduce_seconds(run: TrainingRun, constants: Constants) -> float:
    """Gradients that are not sharded over all ranks, all-reduced once a step: DDP's, or those of
    hybrid sharding between its groups. Under ZeRO-1 they are reduce-scattered, and parameters are
    gathered after the step."""
    ranks = run.data * run.context // run.shards
    own = run.trained * (
        run.stage_layers * run.layer_parameters + run.embedding_parameters) / run.shards
    found = _all_reduce(run, constants, own, ranks, run.tensor * run.shards)
    if not run.expert:
        return found
    experts = run.trained * run.stage_layers * run.expert_weights / run.expert_shards
    return found + _all_reduce(run, constants, experts, run.expert_copies // run.expert_shards,
                               run.expert * run.expert_tensor * run.expert_shards)


def _all_reduce(run, constants, own, ranks, stride) -> float:
    """Of `own` gradients that `ranks` ranks have, `stride` ranks apart."""
    kind = _of_gradients(run)
    if run.optimizer_shards:
        return _ring(run, constants, (run.reduce_bytes + run.param_bytes) * own, ranks, stride,
                     **kind)
    return run.overheads.exposed * _ring(run, constants, run.reduce_bytes * own, ranks, stride,
                                         passes=2, **kind)


def pipeline_seconds(run: TrainingRun, constants: Constants) -> float:
    """Of one micro-batch: activations to the next stage and gradients back, for each chunk of
    layers; tensor-parallel ranks send a share each (Narayanan et al., SC 2021, section 4.1)."""
    if run.pipeline == 1:
        return 0.0
    within = run.pipeline * run.tensor <= run.gpus_per_node
    rate = (run.gpu.nvlink or run.gpu.pcie) if within else run.network
    size = 2 * run.tokens * run.hidden / run.tensor
    return 2 * run.chunks * (size / (rate * LINK_SHARE) + constants.hop)

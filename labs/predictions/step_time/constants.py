"""Every constant of the step-time model: seven that are fitted, and those that are published.

None belongs to a row or to a code base. The fitted ones are shares and rates of hardware that no
data sheet gives; `python -m labs.predictions.step_time.fit` prints them again from
published_runs.json, and `scripts/bench steptime` judges the model on rows left out of the fit.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What the fit may choose.

    matmul_a100, matmul_h100: share of the dense 16-bit peak that a very large product reaches.
    half_size: smallest size of a product at which it reaches half of that.
    traffic: bytes that unfused kernels move, over the bytes that the operations need: temporaries,
        casts, changes of layout, and partly filled caches.
    unhidden: share of overlapped communication that still lengthens the step, because NCCL's
        kernels take multiprocessors and memory bandwidth from the computation.
    hop: seconds per step of a ring algorithm, without its bytes; so (ranks − 1)·hop a collective.
    throttling: a GPU limited to a share x of its full power runs at x^throttling of its rate.
    """

    matmul_a100: float
    matmul_h100: float
    half_size: float
    traffic: float
    unhidden: float
    hop: float
    throttling: float


EXPECTED = Constants(matmul_a100=0.87, matmul_h100=0.80, half_size=256, traffic=2.0, unhidden=0.5,
                     hop=5e-6, throttling=0.6)
"""Where the fit starts, and towards which it is weakly drawn where rows say little. matmul: the
highest rates that stas00/ml-engineering's search found (compute/accelerator, MAMF), 271 of 312
TFLOP/s and 794.5 of 989. half_size: a tile or two. throttling: between 1/3, if voltage follows the
clock, and 1, if it is at its floor. The other three are guesses of the order of magnitude."""

FITTED = Constants(matmul_a100=0.856, matmul_h100=0.731, half_size=481, traffic=2.16,
                   unhidden=0.719, hop=5.28e-6, throttling=1.06)
"""Fitted to all rows of published_runs.json that can be predicted."""



@dataclass(frozen=True)
class Overheads:
    """What a code base's host and its cluster's network add to kernels and bytes. Where none of its
    runs was fitted, all are 0 and the step has kernels and bytes alone.

    launch: seconds that the host takes to start the kernels of a layer, forward and backward, for
        one micro-batch. The GPU waits where it would be done sooner.
    experts: further seconds of the kind of `launch` for a layer with experts: its router, putting
        tokens in the order of the experts and back, and the experts' own products.
    step: seconds of the host in each step, whatever it computes: data, clipping, optimizer, log.
    pipelined: further seconds of the kind of `launch` in a pipeline; pipelined_rank: further ones
        there for each rank of a tensor-parallel group, since sends and collectives start in turn.
    pipelined_nodes: those grow as (nodes of the group)^pipelined_nodes.
    hop, gradient_hop: seconds per step of a ring that leaves a node, for activations and for
        gradients.
    activation_share, gradient_share: of the adapters' rate that they reach between two nodes.
    spread: both shares fall as nodes^-spread.
    exposed: share of gradients' all-reduce under DDP that backward does not hide.
    stall: seconds that a pipeline's micro-batch waits for each neighbour of a stage on 32 nodes and
        more. There 54 of 100 measured runs stall, on 64 nodes 94, on 2 to 16 nodes 18, with no
        setting that tells which; and those that do stall for 0.5 to 0.6 s, whatever is sent.
    kernels: seconds of the kernels, over what they would take: 1 but where a measured run says
        otherwise (`labs.predictions.plans.calibration`).
    """

    launch: float = 0.0
    experts: float = 0.0
    step: float = 0.0
    pipelined: float = 0.0
    pipelined_rank: float = 0.0
    pipelined_nodes: float = 0.0
    hop: float = 0.0
    gradient_hop: float = 0.0
    activation_share: float = 0.0
    gradient_share: float = 0.0
    spread: float = 0.0
    exposed: float = 1.0
    stall: float = 0.0
    kernels: float = 1.0


FLASH_SHARE = {("A100", 1): 0.325, ("A100", 2): 0.615, ("H100", 1): 0.175, ("H100", 2): 0.35,
               ("A100", 3): 0.615, ("H100", 3): 0.58}
"""(generation, FlashAttention's version) -> share of the dense peak that its kernels reach. Version
1 on A100 25–40 %, version 2 50–73 % (Dao, arXiv 2307.08691, abstract; the middles of both); version
2 on H100 35 % (Shah et al., arXiv 2407.08608, abstract), and version 1 half of it, since 2 is
"around 2x" faster than 1. Version 3 on H100 1.5 to 2 times as fast as version 2 in forward and 1.5
to 1.75 in backward (ibid.), in the middle 1.65; on A100 there is none, and version 2 runs."""

FP8_SPEEDUP = 2.0
"""Peak of products in 8 bits over that in 16 (data sheets of H100, H200 and B200)."""

MEMORY_SHARE = 0.87
"""Share of the data sheet's memory bandwidth that a device-to-device copy reaches: 2,903 of 3,350
GB/s on an H100 (aigatech/vpbenchmarking)."""

LINK_SHARE = 367.2 / 450
"""Bus bandwidth of a ring of 8 H200s over the data sheet's NVLink (stas00/ml-engineering,
network/README.md). 331 of 400 GB/s on 4 nodes of H100s (aigatech/vpbenchmarking) is the same share,
so it stands for network adapters too."""

OPTIMIZER_BYTES = 28
"""Bytes that AdamW in fp32 moves per parameter: reads weight, gradient and two moments, writes all
but the gradient."""

HOST_OPTIMIZER_BYTES = 80
"""Bytes that torch's AdamW moves through the host's memory per parameter when parameters are on a
CPU. There it is neither fused nor foreach: eight operations, one after the other, read and write
20 tensors of 4 bytes (tests/predictions/test_step_time_offload.py counts them). fused=True: 28."""

TF32_SHARE = 0.5

"""Seconds that one rank computes: products, attention, and what memory bandwidth limits.

All of one micro-batch, in seconds, without any communication.
"""

from dataclasses import dataclass

from labs.predictions.step_time.constants import (
    FLASH_SHARE,
    FP8_SPEEDUP,
    HOST_OPTIMIZER_BYTES,
    MEMORY_SHARE,
    OPTIMIZER_BYTES,
    TF32_SHARE,
    Constants,
)
from labs.predictions.step_time.training_run import TrainingRun

# Bytes per token of 16-bit tensors, (per hidden element, per element of the MLP), forward and then
# backward. Forward: two norms (read, write) and two residual additions (read twice, write); GELU
# (read, write). Backward: a norm reads two and writes one, each residual sum adds two gradients,
# GELU reads two and writes one. A gated MLP has SiLU and a product; rotary embedding reads and
# writes queries and keys. Fused: a norm and an addition in one kernel, and the MLP's in one.
_POINTWISE = {("GELU", "unfused"): ((20, 4), (24, 6)), ("gated", "unfused"): ((28, 10), (32, 18)),
              ("GELU", "fused"): ((16, 4), (16, 6)), ("gated", "fused"): ((20, 6), (20, 10))}
_SHARPNESS = 8  # at equal times, 9 % above either
_SCORE_BYTES = (13, 17)  # written-out scores, forward and backward: product, softmax, dropout


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer, forward or backward."""

    matmul: float
    attention: float
    memory: float

    @property
    def total(self) -> float:
        """All three together: they run one after the other."""
        return self.matmul + self.attention + self.memory

    def __add__(self, other: "LayerTime") -> "LayerTime":
        return LayerTime(self.matmul + other.matmul, self.attention + other.attention,
                         self.memory + other.memory)

    def scaled(self, factor: float) -> "LayerTime":
        """The same kernels, each `factor` times as long."""
        return LayerTime(factor * self.matmul, factor * self.attention, factor * self.memory)


def matmul_rate(run: TrainingRun, constants: Constants) -> float:
    """FLOP/s of a large product, in 16 bits or in TF32."""
    share = (constants.matmul_h100 if run.gpu.generation.name == "H100"
             else constants.matmul_a100)
    return run.gpu.flops * share * _power_share(run, constants) * _precision_share(run)


def memory_rate(run: TrainingRun) -> float:
    """Bytes/s of an operation that memory bandwidth limits."""
    return run.gpu.bandwidth * MEMORY_SHARE


def layer_times(run: TrainingRun, constants: Constants) -> tuple[LayerTime, LayerTime]:
    """Seconds of one layer: (forward, backward with what is recomputed)."""
    rate = matmul_rate(run, constants) * (FP8_SPEEDUP if run.fp8 else 1)
    products = sum(_product_seconds(run.tokens, *widths, rate, constants)
                   for widths in run.products)
    memory = _memory_seconds(run, constants)
    attention = _attention_seconds(run, constants)
    forward = LayerTime(products, attention[0], memory[0])
    # of the two products of backward, one makes the gradient of the weights
    trained = LayerTime((2 if run.trained == 1 else 1) * products, attention[1], memory[1])
    backward = trained + _recomputed(run, forward)
    return forward.scaled(run.overheads.kernels), backward.scaled(run.overheads.kernels)


def _product_seconds(rows, inputs, outputs, rate, constants) -> float:
    """One product of rows × inputs and inputs × outputs. Hockney's law for short vectors, on the
    smallest of the three sizes: half of the rate at `half_size`, because tiles of a small product
    start, end and wait for each other more often than they multiply."""
    smallest = min(rows, inputs, outputs)
    return 2 * rows * inputs * outputs / rate * (1 + constants.half_size / smallest)


def _recomputed(run, forward) -> LayerTime:
    if run.recompute == "full":
        products = [inputs * outputs for inputs, outputs in run.products]
        last = products[-1] / sum(products)
        return LayerTime(forward.matmul * (1 - last * run.early_stop), forward.attention,
                         forward.memory)
    if run.recompute == "selective":
        return LayerTime(0, forward.attention, 0)
    if run.recompute == "half":
        return LayerTime(forward.matmul / 2, 0, forward.memory)
    return LayerTime(0, 0, 0)


def _attention_seconds(run, constants) -> tuple[float, float]:
    """(forward, backward). FlashAttention leaves out the half above the diagonal; its backward has
    five products to forward's two. Written-out scores are a full square, twice backward."""
    # FLOP of Q·Kᵀ and of scores·V: 2·tokens·sequence·hidden each
    square = 4 * run.tokens * run.sequence * run.query_hidden / run.tensor
    if run.flash:
        share = (FLASH_SHARE[run.gpu.generation.name, run.flash] * _power_share(run, constants)
                 * _precision_share(run))
        forward = square / 2 / (run.gpu.flops * share)
        return forward, 2.5 * forward
    scores = run.tokens * run.sequence * run.heads / run.tensor
    rate, memory = matmul_rate(run, constants), memory_rate(run)
    return (square / rate + _SCORE_BYTES[0] * scores / memory,
            2 * square / rate + _SCORE_BYTES[1] * scores / memory)


def _memory_seconds(run, constants) -> tuple[float, float]:
    """Norms, residual sums and activations: (forward, backward)."""
    kind = ("gated" if run.mlp_matrices == 3 else "GELU", "fused" if run.fused else "unfused")
    # without sequence parallelism every tensor-parallel rank works on the whole residual stream
    stream = run.hidden / (run.tensor if run.sequence_parallel else 1)
    mlp = run.ffn / run.tensor
    widths = [(stream * per_hidden + mlp * per_mlp) * (2 if run.fp32 else 1)
              for per_hidden, per_mlp in _POINTWISE[kind]]
    if run.fp8:  # operands are read in 16 bits and written in 8: inputs, then gradients both ways
        widths[0] += 3 * sum(inputs for inputs, _ in run.products)
        widths[1] += 6 * sum(outputs for _, outputs in run.products)
    unfused = 1 if run.fused else constants.traffic
    forward, backward = (unfused * run.tokens * width / memory_rate(run) for width in widths)
    return forward, backward


def head_times(run: TrainingRun, constants: Constants) -> LayerTime:
    """Output head and loss, forward and backward: always in 16 bits, never recomputed."""
    vocabulary = run.vocabulary / run.tensor
    rate = matmul_rate(run, constants)
    # one forward, two backward: gradients of the input and of the weights
    products = 3 * _product_seconds(run.tokens, run.hidden, vocabulary, rate, constants)
    memory = run.loss_bytes * run.tokens * vocabulary / memory_rate(run)
    return LayerTime(products, 0, memory).scaled(run.overheads.kernels)


def launch_wait(run: TrainingRun, busy: float) -> float:
    """Seconds that the GPU waits in a layer, forward and backward, for kernels to be started, if it
    computes and sends for `busy` seconds. Where both take about as long, each is late at times: so
    a mean of high power in place of the larger one."""
    own = run.overheads
    if not own.launch:
        return 0.0
    started = (own.launch + own.experts * (run.active_experts > 0)) * run.gpu.generation.host
    if run.pipeline > 1:
        nodes = max(1.0, run.tensor / run.gpus_per_node)
        started += own.pipelined + (run.tensor > 1) * (
            own.pipelined_rank * run.tensor * nodes ** own.pipelined_nodes)
    return (busy**_SHARPNESS + started**_SHARPNESS) ** (1 / _SHARPNESS) - busy


def optimizer_seconds(run: TrainingRun) -> float:
    """AdamW on this rank's shard, once a step: on the GPU, or on the host under CPU offload."""
    shards = run.optimizer_shards or run.shards
    own = run.trained * (
        run.stage_layers * run.layer_parameters + run.embedding_parameters) / shards
    if run.expert:
        own += run.trained * run.stage_layers * run.expert_weights / (
            run.expert_optimizer_shards if run.optimizer_shards else run.expert_shards)
    if run.offload:
        return HOST_OPTIMIZER_BYTES * own / (run.host_bandwidth * MEMORY_SHARE)
    return OPTIMIZER_BYTES * own / memory_rate(run)


def _precision_share(run) -> float:
    """Of the 16-bit peak: TF32 has half of it (data sheets of A100, H100 and B200). Attention in
    fp32, which FlashAttention does not compute, is taken to reach the same share of that peak."""
    return TF32_SHARE if run.fp32 else 1


def _power_share(run, constants) -> float:
    full = run.gpu.power
    return (min(run.power, full) / full) ** constants.throttling if run.power else 1

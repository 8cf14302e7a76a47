"""What the model of step time must know of a training run."""

from dataclasses import dataclass

from labs.predictions.hardware import GPU
from labs.predictions.step_time.constants import Overheads


@dataclass(frozen=True)
class TrainingRun:
    """A transformer, a batch, GPUs, and how the work is spread over them.

    kv_hidden: width of keys, as of values. query: that of queries, where it is not hidden's.
    latent: (inputs, outputs) of attention's products, where they are others than those.
    mlp_matrices: 2, or 3 if the MLP is gated. micro_batch and accumulation: sequences, and
    micro-batches of one step, per data-parallel group.
    power: watts, or 0 for the data sheet's. network: bytes/s of network adapters per GPU.
    sharding: ZeRO stage 0, 2 or 3; 2 is gathered once, 3 for forward and for backward. shards:
    ranks that parameters are cut over (all data-parallel ones unless hybrid). recompute: "none",
    "selective" (attention), "half" (every second product) or "full". flash: FlashAttention's
    version, or 0 where scores are written to memory. fused: pointwise operations are compiled into
    few kernels. loss_bytes: moved per logit. early_stop: recomputation stops before a layer's last
    product. tensor_overlaps: tensor-parallel communication runs beside the products (AsyncTP).
    reduce_overlaps: gradients are all-reduced while backward still runs. context_overlaps: keys and
    values go around a ring beside attention; if not, they are gathered before it. zero_bubble:
    gradients of weights fill the pipeline's bubble (ZB-H1). reduce_rounds: how often a step's
    sharded gradients are reduced in a pipeline. param_bytes: in which sharded parameters are
    gathered. fp32: activations are in fp32 and products in TF32. offload: shards, gradients and
    optimizer state are in the host's memory, of which this rank's part has host_bandwidth bytes/s.
    stages: layers of each pipeline stage, where they are not equal; the head is on the last.
    optimizer_shards: ranks that the optimizer state is cut over under ZeRO-1, where parameters are
    gathered after the step; else 0. overheads: of the code base.
    stored: weights of a layer, where experts make them more than a token uses; else 0.
    active_experts: of a token, 0 in a dense model. expert: ranks over which a layer's experts are
    divided; expert_tensor: those that compute one expert together; expert_weights: of a layer, on
    one rank; expert_copies: ranks with the same ones, expert_shards of which shard them, and
    expert_optimizer_shards under ZeRO-1 their optimizer state. These are left out, and `stored` has
    the experts, where they are where tensor parallelism alone puts them.
    trained: share of a layer's parameters that have a gradient; below 1 the rest are frozen.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_hidden: float
    vocabulary: int
    mlp_matrices: int
    sequence: int
    micro_batch: float
    accumulation: float
    gpu: GPU
    gpus: int
    gpus_per_node: int
    network: float
    power: float = 0
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    sharding: int = 0
    shards: int = 1
    reduce_bytes: int = 4
    recompute: str = "none"
    flash: int = 2
    fused: bool = False
    fp8: bool = False
    loss_bytes: int = 28
    early_stop: bool = False
    tensor_overlaps: bool = False
    reduce_overlaps: bool = True
    context_overlaps: bool = True
    zero_bubble: bool = False
    reduce_rounds: int = 1
    param_bytes: int = 2
    fp32: bool = False
    offload: bool = False
    host_bandwidth: float = 0
    stages: tuple[int, ...] = ()
    optimizer_shards: int = 0
    overheads: Overheads = Overheads()
    query: float = 0
    trained: float = 1.0
    stored: float = 0
    expert: int = 0
    expert_tensor: int = 0
    active_experts: int = 0
    expert_weights: float = 0
    expert_copies: int = 0
    expert_shards: int = 1
    expert_optimizer_shards: int = 1
    latent: tuple[tuple[int, int], ...] = ()

    @property
    def data(self) -> int:
        """Data-parallel groups, each with a batch of its own."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch that one rank computes."""
        return self.micro_batch * self.sequence / self.context

    @property
    def step_tokens(self) -> float:
        """Tokens of a step, on all GPUs."""
        return self.micro_batch * self.accumulation * self.data * self.sequence

    @property
    def query_hidden(self) -> float:
        """Width of all query heads together."""
        return self.query or self.hidden

    @property
    def products(self) -> tuple[tuple[float, float], ...]:
        """(width of the input, width of the output) of a layer's weights, on one tensor-parallel
        rank: queries, keys and values; attention's output; the MLP, whose last comes last."""
        t, query = self.tensor, self.query_hidden
        into_mlp = (self.hidden, self.ffn / t)
        attention = tuple((inputs, outputs / t) for inputs, outputs in self.latent) or (
            (self.hidden, (query + 2 * self.kv_hidden) / t), (query / t, self.hidden))
        return (*attention, *[into_mlp] * (self.mlp_matrices - 1),
                (self.ffn / t, self.hidden))

    @property
    def layer_parameters(self) -> float:
        """Weights of a layer on one tensor-parallel rank, without norms, biases and
        `expert_weights`."""
        computed = sum(inputs * outputs for inputs, outputs in self.products)
        return self.stored / self.tensor or computed

    @property
    def embedding_parameters(self) -> float:
        """Weights of the output head on one tensor-parallel rank."""
        return self.vocabulary * self.hidden / self.tensor

    @property
    def stage_layers(self) -> float:
        """Layers of one pipeline stage: of the one that has most."""
        return max(self.stages) if self.stages else self.layers / self.pipeline

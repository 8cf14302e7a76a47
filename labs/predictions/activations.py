"""What forward saves for backward, in closed form. All results in bytes.

Two readings. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2022 (arXiv 2205.05198): a GPT layer in 16 bits with dropout and Megatron's fused kernels.
And what torch 2.13 and transformers 5 really save, operation by operation: `saved`, which the tests
hold against autograd's own list of saved tensors, to the byte.

In formulas b is the batch, s the sequence, h the hidden size, a the heads, f the feed-forward
width, q and k the widths of all query and of all key heads, V the vocabulary, e the bytes of one
element, T = b·s.
"""

from labs.predictions.memory_recipes import recipe_of
from labs.predictions.memory_sizes import Sizes, check
from labs.predictions.parameters import shape_of


def korthikanti(batch: int, sequence: int, hidden: int, heads: int, *, tensor_parallel: int = 1,
                sequence_parallel: bool = False, recompute: str = "none") -> float:
    """Bytes saved by one GPT layer in 16 bits (section 4, equations 1, 2 and 4, table 2).

    sbh(34 + 5as/h); over t tensor-parallel ranks sbh(10 + 24/t + 5as/(ht)), with sequence
    parallelism sbh/t·(34 + 5as/h). recompute "selective" leaves out attention's 5as/h, "full" all
    but the layer's input, 2sbh. These are bytes, not elements: often multiplied by 2 in error.
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"no recompute {recompute!r}: choose none, selective or full")
    size = sequence * batch * hidden
    if recompute == "full":
        return 2 * size
    scores = 0 if recompute == "selective" else 5 * heads * sequence / hidden
    whole = 34 if sequence_parallel else 10 + 24 / tensor_parallel
    share = tensor_parallel if sequence_parallel else 1
    return size * (whole / share + scores / tensor_parallel)


def copies(bytes_saved: float, batch: int, sequence: int, hidden: int) -> float:
    """Saved bytes of a layer in units of the 16-bit residual stream, 2sbh."""
    return bytes_saved / (2 * batch * sequence * hidden)


def saved(config, *, batch: int, sequence: int, recipe="fp32", attention: str = "sdpa",
          device: str = "cpu") -> dict:
    """Part -> bytes that autograd keeps at the end of forward, without checkpointing: "embedding",
    "blocks", "final norm" (with the head's input), "loss"."""
    check(attention, device, batch, sequence)
    z = Sizes(shape_of(config), batch, sequence, recipe_of(recipe).compute, attention, device)
    return {"embedding": embedding(z), "blocks": z.shape.layers * block(z),
            "final norm": norm(z), "loss": loss(z)}


def block(z: Sizes) -> float:
    """One block: two norms, attention, feed-forward, GPT-2's two dropouts."""
    residual = 2 * z.dropped(z.x) if z.shape.dropout[2] else 0
    return 2 * norm(z) + attention(z) + feed_forward(z) + residual


def norm(z: Sizes) -> float:
    """LayerNorm: its input and output, 2The, and two statistics. RMSNorm: input in fp32,
    normalised copy and output, Th(4 + 2e), and one fp32 statistic; in fp32 the input is not
    copied, but saved all the same."""
    if z.shape.family == "gpt2":
        return 2 * z.x + 2 * z.layernorm_stat
    return z.x32 + 2 * z.x + z.stat


def attention(z: Sizes) -> float:
    """Queries, keys and values, T(q + 2k)e, the output, Tqe, and the inside: with fused attention
    4Ta (one fp32 number per query and head), otherwise the scores."""
    if z.fused:
        cache = 2 * z.k if z.shape.family == "gpt2" and z.cached else 0
        return z.q + 2 * z.k + z.q + z.lse + cache
    return scores(z) + sum(z.factors) + z.q


def scores(z: Sizes) -> float:
    """Attention scores after softmax, b·a·s·s·e; where softmax is taken in fp32 both copies; with
    dropout its mask and its result too."""
    scale = z.constants(1) if z.attention == "eager" else 0
    softmax = z.scores32 if z.softmax_upcast else 0
    if z.attention_dropout:
        behind = z.dropped_scores + z.scores
        return scale + (softmax or z.scores) + behind
    return scale + softmax + z.scores


def feed_forward(z: Sizes) -> float:
    """SwiGLU: gate, its SiLU, up and their product, 4Tfe. GPT-2's GELU is written out in Python
    and saves five tensors, 5Tfe, where a fused one saves two."""
    if z.shape.family != "gpt2":
        return 4 * z.f
    if z.shape.activation == "gelu_new":
        return 5 * z.f + z.constants(3)
    return (1 if z.shape.activation == "relu" else 2) * z.f


def embedding(z: Sizes) -> float:
    """GPT-2: positions (int64), and a dropout mask. Llama, Qwen2: cosines and sines, 2sde."""
    if z.shape.family != "gpt2":
        return 2 * z.rotary
    return 8 * z.sequence + (z.dropped(z.x) if z.shape.dropout[0] else 0)


def loss(z: Sizes) -> float:
    """Log-softmax in fp32 whatever the model computes in, 4TV, the shifted labels (int64), and the
    loss's weight. The logits themselves are not saved."""
    return z.logits32 + z.labels + 4

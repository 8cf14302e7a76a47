"""How many parameters a model has, in closed form: GPT-2, Llama and Qwen2 families.

Sources: transformers 5, models/gpt2/modeling_gpt2.py, models/llama/modeling_llama.py and
models/qwen2/modeling_qwen2.py; grouped-query attention: Ainslie et al., 2023, section 2.2;
SwiGLU: Shazeer, 2020.
"""

from dataclasses import dataclass

FAMILIES = ("gpt2", "llama", "qwen2")


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. heads: query heads; positions: the learned ones (0 with rotary
    embedding); tied: the head's matrix is the embedding's; *_bias: whether the matrices of queries,
    keys and values, of attention's output and of the feed-forward part have biases."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int = 0
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads together; values are as wide."""
        return self.kv_heads * self.head_dim


def shape_of(config) -> Shape:
    """The sizes in a Hugging Face configuration (or a `Shape`, which is returned as it is)."""
    if isinstance(config, Shape):
        return config
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ValueError(f"no closed form for model type {family!r}: choose {', '.join(FAMILIES)}")
    return _gpt2(config) if family == "gpt2" else _llama(config)


def _gpt2(config) -> Shape:
    hidden, heads = config.n_embd, config.n_head
    return Shape(
        "gpt2", hidden, config.n_layer, heads, heads, hidden // heads,
        config.n_inner or 4 * hidden, config.vocab_size, positions=config.n_positions,
        tied=config.tie_word_embeddings, qkv_bias=True, out_bias=True, mlp_bias=True)


def _llama(config) -> Shape:
    qwen2 = config.model_type == "qwen2"
    bias = bool(getattr(config, "attention_bias", False))
    heads = config.num_attention_heads
    return Shape(
        config.model_type, config.hidden_size, config.num_hidden_layers, heads,
        config.num_key_value_heads or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        config.intermediate_size, config.vocab_size, tied=bool(config.tie_word_embeddings),
        qkv_bias=qwen2 or bias, out_bias=bias and not qwen2,
        mlp_bias=bool(getattr(config, "mlp_bias", False)))


def count(config) -> int:
    """All parameters of the model; a tied one once."""
    return sum(unit_sizes(config).values())


def unit_sizes(config) -> dict[str, int]:
    """Unit -> number of parameters: "embedding", "block 0" ..., "final norm", "head". The head of a
    model with tied embeddings has none of its own."""
    shape = shape_of(config)
    words = shape.vocabulary * shape.hidden
    return {"embedding": words + shape.positions * shape.hidden,
            **{f"block {i}": block_size(shape) for i in range(shape.layers)},
            "final norm": norm_size(shape), "head": 0 if shape.tied else words}


def block_size(shape: Shape) -> int:
    """Parameters of one transformer block: attention, feed-forward part and two norms.

    Attention has matrices of h·q, h·k, h·k and q·h, where q and k are the widths of all query and
    of all key heads. GPT-2's feed-forward part has two matrices of h·f; SwiGLU has three.
    """
    h, f, q, k = shape.hidden, shape.ffn, shape.query, shape.key
    up = 1 if shape.family == "gpt2" else 2
    attention = h * (q + 2 * k) + q * h + shape.qkv_bias * (q + 2 * k) + shape.out_bias * h
    feed_forward = (up + 1) * h * f + shape.mlp_bias * (up * f + h)
    return attention + feed_forward + 2 * norm_size(shape)


def norm_size(shape: Shape) -> int:
    """Parameters of a norm: RMSNorm has a weight for each feature, GPT-2's LayerNorm a bias too."""
    return (2 if shape.family == "gpt2" else 1) * shape.hidden

"""How many parameters a model has, from its configuration alone: GPT-2, Llama and Qwen2 families.

Sources: transformers 5, models/gpt2/modeling_gpt2.py, models/llama/modeling_llama.py and
models/qwen2/modeling_qwen2.py; grouped-query attention: Ainslie et al., 2023, section 2.2;
SwiGLU: Shazeer, 2020. Names and shapes are those of the Hugging Face modules, so that what is
counted here can be laid beside `model.named_parameters()`.
"""

from dataclasses import dataclass
from math import prod

FAMILIES = ("gpt2", "llama", "qwen2")


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. heads are query heads, positions the learned ones (0 with rotary
    embedding), dropout the probabilities (embedding, attention, residual)."""

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
    activation: str = "silu"
    dropout: tuple = (0.0, 0.0, 0.0)
    use_cache: bool = True

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
        raise ValueError(f"no closed form for model type {family!r}: choose {', '.join(FAMILIES)}, "
                         "or use the dry run, which takes any model")
    return _gpt2(config) if family == "gpt2" else _llama(config)


def _gpt2(config) -> Shape:
    hidden, heads = config.n_embd, config.n_head
    return Shape(
        "gpt2", hidden, config.n_layer, heads, heads, hidden // heads,
        config.n_inner or 4 * hidden, config.vocab_size, positions=config.n_positions,
        tied=config.tie_word_embeddings, qkv_bias=True, out_bias=True, mlp_bias=True,
        activation=config.activation_function, use_cache=bool(config.use_cache),
        dropout=(config.embd_pdrop, config.attn_pdrop, config.resid_pdrop))


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
        mlp_bias=bool(getattr(config, "mlp_bias", False)), activation=config.hidden_act,
        dropout=(0.0, config.attention_dropout, 0.0), use_cache=bool(config.use_cache))


def count(config) -> int:
    """All parameters of the model; a tied one once."""
    return sum(unit_sizes(config).values())


def unit_sizes(config) -> dict:
    """Unit -> number of parameters: "embedding", "block 0" ..., "final norm", "head". The head of a
    model with tied embeddings has none of its own."""
    return {unit: sum(prod(size) for size in sizes.values())
            for unit, sizes in units(config).items()}


def units(config) -> dict:
    """Unit -> {parameter name: shape}, in the order of forward; names as in the unit's module."""
    shape = shape_of(config)
    one = block(shape)
    return {"embedding": embedding(shape),
            **{f"block {i}": one for i in range(shape.layers)},
            "final norm": _norm(shape, "norm"),
            "head": {} if shape.tied else {"lm_head.weight": (shape.vocabulary, shape.hidden)}}


def embedding(shape: Shape) -> dict:
    """Token embedding, and GPT-2's learned positions."""
    tokens = {"wte.weight": (shape.vocabulary, shape.hidden)}
    return tokens | ({"wpe.weight": (shape.positions, shape.hidden)} if shape.positions else {})


def block_sizes(shape: Shape) -> dict:
    """One transformer block: parameter name -> elements."""
    return {name: prod(size) for name, size in block(shape).items()}


def block(shape: Shape) -> dict:
    """One transformer block: parameter name -> shape."""
    return _gpt2_block(shape) if shape.family == "gpt2" else _llama_block(shape)


def _gpt2_block(shape: Shape) -> dict:
    h, f = shape.hidden, shape.ffn
    return {**_norm(shape, "ln_1"),
            **_conv1d("attn.c_attn", h, 3 * h), **_conv1d("attn.c_proj", h, h),
            **_norm(shape, "ln_2"),
            **_conv1d("mlp.c_fc", h, f), **_conv1d("mlp.c_proj", f, h)}


def _llama_block(shape: Shape) -> dict:
    h, f, q, k = shape.hidden, shape.ffn, shape.query, shape.key
    return {**_linear("self_attn.q_proj", h, q, shape.qkv_bias),
            **_linear("self_attn.k_proj", h, k, shape.qkv_bias),
            **_linear("self_attn.v_proj", h, k, shape.qkv_bias),
            **_linear("self_attn.o_proj", q, h, shape.out_bias),
            **_linear("mlp.gate_proj", h, f, shape.mlp_bias),
            **_linear("mlp.up_proj", h, f, shape.mlp_bias),
            **_linear("mlp.down_proj", f, h, shape.mlp_bias),
            **_norm(shape, "input_layernorm"), **_norm(shape, "post_attention_layernorm")}


def _norm(shape: Shape, name: str) -> dict:
    weight = {f"{name}.weight": (shape.hidden,)}
    return weight | ({f"{name}.bias": (shape.hidden,)} if shape.family == "gpt2" else {})


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> dict:
    weight = {f"{name}.weight": (outputs, inputs)}
    return weight | ({f"{name}.bias": (outputs,)} if bias else {})


def _conv1d(name: str, inputs: int, outputs: int) -> dict:
    """GPT-2's layer: a linear one whose weight lies transposed."""
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def buffer_bytes(config) -> int:
    """Bytes of the model's own buffers: rotary embedding keeps its frequencies twice, in fp32
    (modeling_llama.py, LlamaRotaryEmbedding); GPT-2 has none in transformers 5."""
    shape = shape_of(config)
    return 0 if shape.family == "gpt2" else 2 * (shape.head_dim // 2) * 4

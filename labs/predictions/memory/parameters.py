"""How many parameters a decoder has, in closed form, for the families in FAMILIES.

Sources: transformers 5, models/<family>/modeling_<family>.py; grouped-query attention: Ainslie et
al., 2023, section 2.2; SwiGLU: Shazeer, 2020; mixture of experts: Jiang et al., 2024 (Mixtral,
arXiv 2401.04088), section 2.1; latent attention and shared experts: DeepSeek-AI, "DeepSeek-V3",
2024 (arXiv 2412.19437), section 2.1.
"""

from labs.predictions.memory.shape import Shape


def shape_of(config) -> Shape:
    """The sizes in a Hugging Face configuration (or a `Shape`, which is returned as it is). Raises
    ValueError where the model type has no closed form here."""
    if isinstance(config, Shape):
        return config
    family = getattr(config, "model_type", None)
    if family not in _TRAITS:
        raise ValueError(f"no closed form for model type {family!r}{_reason(config)}: "
                         f"choose {', '.join(FAMILIES)}")
    return _gpt2(config) if family == "gpt2" else _decoder(config, _TRAITS[family](config))


# Attribute of a configuration -> what it stands for, which is not counted here
_NOT_COUNTED = {"kv_lora_rank": ", which has multi-head latent attention of another kind",
                "state_size": ", which has state-space layers",
                "mamba_d_state": ", which has state-space layers",
                "text_config": ", which has more than a decoder (give its text_config)"}


def _reason(config) -> str:
    return next((words for name, words in _NOT_COUNTED.items() if hasattr(config, name)), "")


def _gpt2(config) -> Shape:
    hidden, heads = config.n_embd, config.n_head
    return Shape(
        "gpt2", hidden, config.n_layer, heads, heads, hidden // heads,
        config.n_inner or 4 * hidden, config.vocab_size, positions=config.n_positions,
        tied=config.tie_word_embeddings, qkv_bias=True, out_bias=True, mlp_bias=True)


def _decoder(config, traits) -> Shape:
    """A decoder with rotary embedding, in the names that all families but GPT-2 share."""
    heads = config.num_attention_heads
    return Shape(
        config.model_type, config.hidden_size, config.num_hidden_layers, heads,
        config.num_key_value_heads or heads, traits.pop("head_dim", 0) or _head_dim(config),
        config.intermediate_size, config.vocab_size, tied=bool(config.tie_word_embeddings),
        **traits)


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _llama(config) -> dict:
    return _attention_biases(config) | dict(mlp_bias=bool(getattr(config, "mlp_bias", False)))


def _attention_biases(config) -> dict:
    bias = bool(getattr(config, "attention_bias", False))
    return dict(qkv_bias=bias, out_bias=bias)


def _gemma2(config) -> dict:
    # A norm before and one after both attention and the feed-forward part.
    return _attention_biases(config) | dict(norms=4)


def _qwen3(config) -> dict:
    # One norm for all query heads and one for all key heads, each as wide as a head.
    return _attention_biases(config) | dict(qk_norm=2 * _head_dim(config))


def _olmo2(config) -> dict:
    # These norms are as wide as all query heads and as all key heads together. transformers sizes
    # OLMoE's by hidden_size // heads, which is a head's width in every model that can run.
    heads = config.num_attention_heads + config.num_key_value_heads
    return _attention_biases(config) | dict(qk_norm=heads * _head_dim(config))


def _phi(config) -> dict:
    # Attention and the feed-forward part run in parallel, after one LayerNorm. The norms of queries
    # and keys have a weight and a bias too.
    width = config.hidden_size // config.num_attention_heads
    return dict(mlp_matrices=2, norms=1, norm_bias=True, head_bias=True, qkv_bias=True,
                out_bias=True, mlp_bias=True, qk_norm=4 * width * config.qk_layernorm)


def _starcoder2(config) -> dict:
    bias = bool(config.use_bias)
    return dict(mlp_matrices=2, norm_bias=True, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def _stablelm(config) -> dict:
    # Each head has a norm of its own for its queries or keys, without a bias.
    width = config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads + config.num_key_value_heads
    return dict(norms=1 if config.use_parallel_residual else 2, norm_bias=True,
                qkv_bias=bool(config.use_qkv_bias), qk_norm=heads * width * config.qk_layernorm)


def _experts(config) -> dict:
    # transformers 4.57 knows Qwen3's and OLMoE's by another name, which 5 maps to this one.
    experts = (config.num_local_experts if hasattr(config, "num_local_experts")
               else config.num_experts)
    return dict(experts=experts, active_experts=config.num_experts_per_tok,
                expert_ffn=config.intermediate_size)


def _qwen3_moe(config) -> dict:
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    blocks = range(config.num_hidden_layers)
    return _qwen3(config) | _experts(config) | dict(
        expert_ffn=config.moe_intermediate_size,
        dense_blocks=tuple(i for i in blocks if i in dense or (i + 1) % step))


def _phimoe(config) -> dict:
    return _attention_biases(config) | _experts(config) | dict(
        norm_bias=True, head_bias=bool(config.lm_head_bias))


def _deepseek_v3(config) -> dict:
    # Queries are made from q_lora_rank numbers, keys and values from kv_lora_rank; keys have some
    # elements more, with rotary embedding, which all heads share.
    h, heads, value = config.hidden_size, config.num_attention_heads, config.v_head_dim
    low, latent, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    key = config.qk_nope_head_dim + rope
    queries = ((h, low), (low, heads * key)) if low else ((h, heads * key),)
    matrices = (*queries, (h, latent + rope), (latent, heads * (key - rope + value)),
                (heads * value, h))
    biases = (low or 0) + latent + rope + h
    return dict(
        latent=matrices, head_dim=(key + value) // 2, experts=config.n_routed_experts,
        qk_norm=(low or 0) + latent + biases * bool(config.attention_bias),
        active_experts=config.num_experts_per_tok, expert_ffn=config.moe_intermediate_size,
        shared_ffn=config.n_shared_experts * config.moe_intermediate_size,
        dense_blocks=tuple(range(min(config.first_k_dense_replace, config.num_hidden_layers))))


# Family -> the traits of a configuration that differ from a Llama without biases
_TRAITS = {
    "gpt2": None, "llama": _llama, "qwen2": lambda config: dict(qkv_bias=True), "qwen3": _qwen3,
    "mistral": lambda config: {}, "gemma": _attention_biases, "gemma2": _gemma2,
    "gemma3_text": lambda config: _gemma2(config) | dict(qk_norm=2 * _head_dim(config)),
    "phi": _phi, "phi3": lambda config: {}, "olmo2": _olmo2, "starcoder2": _starcoder2,
    "stablelm": _stablelm, "granite": _llama, "mixtral": _experts,
    "olmoe": lambda config: _olmo2(config) | _experts(config), "qwen3_moe": _qwen3_moe,
    "phimoe": _phimoe, "granitemoe": lambda config: _attention_biases(config) | _experts(config),
    "deepseek_v3": _deepseek_v3}
FAMILIES = tuple(_TRAITS)


def count(config) -> int:
    """All parameters of the model; a tied one once."""
    return sum(unit_sizes(config).values())


def active_count(config) -> int:
    """Parameters of the model that one token uses: in each block with experts, those of the experts
    to which it is sent. In a dense model, all."""
    shape = shape_of(config)
    return count(shape) - (shape.layers - len(shape.dense_blocks)) * _unused(shape)


def unit_sizes(config) -> dict[str, int]:
    """Unit -> number of parameters: "embedding", "block 0" ..., "final norm", "head". The head of a
    model with tied embeddings has no matrix of its own."""
    shape = shape_of(config)
    words = shape.vocabulary * shape.hidden
    return {"embedding": words + shape.positions * shape.hidden,
            **{f"block {i}": block_size(shape, i) for i in range(shape.layers)},
            "final norm": norm_size(shape),
            "head": words * (not shape.tied) + shape.vocabulary * shape.head_bias}


def block_size(shape: Shape, block: int | None = None) -> int:
    """Parameters of one transformer block: attention, feed-forward part and norms. block: its
    index; None: a block with experts if the model has one.

    Attention has matrices of h·q, h·k, h·k and q·h, where q and k are the widths of all query and
    of all key heads; latent attention has those of `Shape.latent`. GPT-2's feed-forward part has
    two matrices of h·f; SwiGLU has three. A block of E experts of width f has a router of h·E and E
    such parts, and one more as wide as its shared experts.
    """
    h, q, k = shape.hidden, shape.query, shape.key
    attention = h * (q + 2 * k) + q * h + shape.qkv_bias * (q + 2 * k) + shape.out_bias * h
    if shape.latent:
        attention = sum(inputs * outputs for inputs, outputs in shape.latent)
    if shape.is_mixture and block not in shape.dense_blocks:
        feed_forward = (shape.router + experts_size(shape)
                        + _feed_forward(shape, shape.shared_ffn))
    else:
        feed_forward = _feed_forward(shape, shape.ffn)
    return attention + feed_forward + norms_size(shape)


def active_block_size(shape: Shape) -> int:
    """Parameters of one block that one token uses: of the experts, those to which it is sent; the
    router counts. As in `block_size`, a block with experts if the model has one."""
    return block_size(shape) - _unused(shape)


def _unused(shape) -> int:
    idle = (shape.experts - shape.active_experts) * shape.is_mixture
    return idle * _feed_forward(shape, shape.expert_ffn)


def experts_size(shape: Shape) -> int:
    """Parameters of all experts of a block that has experts; 0 in a dense model."""
    return shape.experts * _feed_forward(shape, shape.expert_ffn) if shape.is_mixture else 0


def _feed_forward(shape, f) -> int:
    h, up = shape.hidden, shape.mlp_matrices - 1
    return ((up + 1) * h * f + shape.mlp_bias * (up * f + h)) * (f > 0)


def norms_size(shape: Shape) -> int:
    """Parameters of all norms of a block, those of queries and keys too."""
    return shape.norms * norm_size(shape) + shape.qk_norm


def norm_size(shape: Shape) -> int:
    """Parameters of a norm: RMSNorm has a weight for each feature, LayerNorm a bias too."""
    return (2 if shape.norm_bias else 1) * shape.hidden

"""Every family of decoders: parameters in closed form against models on the meta device, unit by
unit, and predictions of a step."""

import random

import pytest
import transformers
from measured_memory import phases_of_plain

from labs.predictions.memory import parameters
from labs.predictions.memory.parameters import active_block_size, block_size, shape_of
from labs.predictions.memory.predict import predict
from labs.predictions.memory.shape import Shape
from labs.training.hf_configs import on_meta

QUIET = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None, use_cache=False)
CLASSES = {
    "gpt2": "GPT2Config", "llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config",
    "mistral": "MistralConfig", "gemma": "GemmaConfig", "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig", "phi": "PhiConfig", "phi3": "Phi3Config",
    "olmo2": "Olmo2Config", "starcoder2": "Starcoder2Config", "stablelm": "StableLmConfig",
    "granite": "GraniteConfig", "mixtral": "MixtralConfig", "olmoe": "OlmoeConfig",
    "qwen3_moe": "Qwen3MoeConfig", "phimoe": "PhimoeConfig", "granitemoe": "GraniteMoeConfig",
    "deepseek_v3": "DeepseekV3Config"}
WITH_EXPERTS = ("mixtral", "olmoe", "qwen3_moe", "phimoe", "granitemoe")
# Options that change the number of parameters
OPTIONS = {"phi": ["qk_layernorm"], "starcoder2": ["use_bias"], "phimoe": ["lm_head_bias"],
           "stablelm": ["qk_layernorm", "use_qkv_bias", "use_parallel_residual"],
           "llama": ["mlp_bias"], "granite": ["mlp_bias"]}
# Their heads can have another width than hidden / heads.
FREE_HEADS = ("llama", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")


def config_of(family, rng, **more):
    """A configuration of odd sizes."""
    kv, group, width = rng.randint(1, 3), rng.randint(1, 3), 2 * rng.randint(2, 6)
    hidden, heads, experts = kv * group * width, kv * group, rng.randint(2, 7)
    sizes = dict(hidden_size=hidden, num_hidden_layers=rng.randint(1, 5), num_attention_heads=heads,
                 num_key_value_heads=kv, intermediate_size=rng.randint(3, 50),
                 vocab_size=rng.randint(5, 99), tie_word_embeddings=rng.random() < 0.5)
    if family == "gpt2":
        sizes["n_inner"] = sizes.pop("intermediate_size")
        sizes["n_positions"] = rng.randint(1, 40)
        del sizes["num_key_value_heads"]
    if family in FREE_HEADS and rng.random() < 0.7:
        sizes |= dict(head_dim=width, hidden_size=heads * (width + rng.choice([-1, 1, 3])))
    if family in WITH_EXPERTS:
        sizes |= dict(num_local_experts=experts, num_experts_per_tok=rng.randint(1, experts))
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = rng.randint(3, 50)
    if family == "deepseek_v3":
        sizes |= dict(num_key_value_heads=heads, n_routed_experts=2 * experts, n_group=2,
                      topk_group=1, num_experts_per_tok=rng.randint(1, experts),
                      n_shared_experts=rng.randint(1, 2), kv_lora_rank=rng.randint(3, 20),
                      moe_intermediate_size=rng.randint(3, 50), v_head_dim=2 * rng.randint(1, 5),
                      first_k_dense_replace=rng.randint(0, 3), qk_nope_head_dim=width,
                      qk_rope_head_dim=2 * rng.randint(1, 4),
                      q_lora_rank=rng.choice([None, rng.randint(3, 20)]))
    # A family whose model has no such option ignores it, and the count must too.
    for option in ["attention_bias", *OPTIONS.get(family, [])]:
        sizes[option] = rng.random() < 0.5
    return getattr(transformers, CLASSES[family])(**QUIET | sizes | more)


def require_units(config):
    """Holds the count of every unit against the model's own parameters."""
    model, sizes = on_meta(config), parameters.unit_sizes(config)
    assert parameters.count(config) == sum(p.numel() for p in model.parameters())
    found = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for number, block in enumerate(found):
        assert sizes[f"block {number}"] == sum(p.numel() for p in block.parameters()), number
    # Of parameters that are tied, named_parameters has the first name only, the embedding's.
    assert sizes["head"] == sum(p.numel() for name, p in model.named_parameters()
                                if name.startswith("lm_head."))


def test_every_family_is_tried():
    assert set(CLASSES) == set(parameters.FAMILIES)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", CLASSES)
def test_counts_of_odd_sizes(family, seed):
    require_units(config_of(family, random.Random(seed)))


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_counts_once(family, tied):
    config = config_of(family, random.Random(7), tie_word_embeddings=tied)
    require_units(config)
    assert shape_of(config).tied == tied


@pytest.mark.parametrize("family, option", [
    *((family, option) for family, options in OPTIONS.items() for option in options),
    *((family, "attention_bias") for family in CLASSES if hasattr(
        getattr(transformers, CLASSES[family])(), "attention_bias"))])
def test_an_option_adds_parameters(family, option):
    off, on = (config_of(family, random.Random(8), **{option: value}) for value in (False, True))
    require_units(off)
    require_units(on)
    assert parameters.count(off) != parameters.count(on)


@pytest.mark.parametrize("more", [
    dict(decoder_sparse_step=2), dict(mlp_only_layers=[0, 3]),
    dict(decoder_sparse_step=3, mlp_only_layers=[2]), dict(mlp_only_layers=[0, 1, 2, 3, 4]),
    dict(num_local_experts=0)])
def test_blocks_without_experts(more):
    config = config_of("qwen3_moe", random.Random(9), num_hidden_layers=5, **more)
    require_units(config)
    shape = shape_of(config)
    assert shape.is_mixture == any("experts" in name for name, _ in
                                   on_meta(config).named_parameters())
    if not shape.is_mixture:
        assert shape.active_ffn == config.intermediate_size and shape.router == 0
        assert active_block_size(shape) == block_size(shape)


PUBLISHED = {  # configuration, all parameters, billions that one token uses
    # Jiang et al., 2024 (arXiv 2401.04088): 47B, of which a token uses 13B.
    "Mixtral-8x7B": (transformers.MixtralConfig(vocab_size=32000), 46_702_792_704, 12.9),
    # Muennighoff et al., 2024 (arXiv 2409.02060), table 1: 6.9B, of which a token uses 1.3B.
    "OLMoE-1B-7B": (transformers.OlmoeConfig(intermediate_size=1024), 6_919_161_856, 1.3),
    # Qwen3 technical report (arXiv 2505.09388), table 2; model card: 30.5B, a token uses 3.3B.
    "Qwen3-30B-A3B": (transformers.Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936), 30_532_122_624, 3.3)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_that_one_token_uses(name):
    config, published, active = PUBLISHED[name]
    shape = shape_of(config)
    assert parameters.count(config) == published
    assert parameters.active_count(config) / 1e9 == pytest.approx(active, abs=0.06)
    unused = published - parameters.active_count(config)
    assert unused == shape.layers * (block_size(shape) - active_block_size(shape))
    assert shape.active_ffn == shape.active_experts * shape.expert_ffn


def test_active_parameters_where_some_blocks_have_no_experts():
    config = config_of("qwen3_moe", random.Random(9), num_hidden_layers=5, mlp_only_layers=[1, 2],
                       num_local_experts=6, num_experts_per_tok=2)
    # Of each expert's gate, up and down matrix, a token does not use 4 in 6, in 3 blocks.
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    assert parameters.count(config) - parameters.active_count(config) == 3 * 4 * expert


def test_a_dense_model_uses_all_parameters():
    shape = shape_of(config_of("gemma2", random.Random(1)))
    assert active_block_size(shape) == block_size(shape) and shape.active_ffn == shape.ffn
    assert parameters.active_count(shape) == parameters.count(shape)


def test_shapes_made_by_hand_follow_their_family():
    sizes = (8, 2, 2, 1, 4, 12, 99)
    assert Shape("gpt2", *sizes).mlp_matrices == 2 and Shape("gpt2", *sizes).norm_bias
    assert Shape("llama", *sizes).mlp_matrices == 3 and not Shape("llama", *sizes).norm_bias
    other = Shape("llama", *sizes, mlp_matrices=2, norm_bias=True)
    assert block_size(Shape("llama", *sizes)) - block_size(other) == 8 * 12 - 2 * 8


@pytest.mark.parametrize("name, words", [
    ("DeepseekV2Config", "'deepseek_v2', which has multi-head latent attention of another kind: "
     "choose gpt2, "),
    ("MambaConfig", "'mamba', which has state-space layers: choose gpt2, "),
    ("JambaConfig", "'jamba', which has state-space layers: choose gpt2, "),
    ("Gemma3Config", "'gemma3', which has more than a decoder \\(give its text_config\\): choose "),
    ("BertConfig", "'bert': choose gpt2, ")])
def test_what_is_not_counted_is_refused_in_one_sentence(name, words):
    with pytest.raises(ValueError, match=f"no closed form for model type {words}"):
        parameters.count(getattr(transformers, name)())


def step_of(family, **more):
    """A configuration whose step is recorded in less than a second, and the job to predict."""
    sizes = dict(num_hidden_layers=2, hidden_size=48, num_attention_heads=6, vocab_size=2000,
                 tie_word_embeddings=False, attention_bias=False, lm_head_bias=False,
                 qk_layernorm=False)  # StableLM's norms per head take minutes to record
    if family == "gpt2":
        sizes |= dict(n_positions=40)
    else:
        sizes |= dict(num_key_value_heads=2, intermediate_size=40)
    if family in FREE_HEADS:
        sizes["head_dim"] = 8
    if family in WITH_EXPERTS:
        # torch's grouped product needs rows of multiples of 16 bytes.
        sizes |= dict(num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    config = config_of(family, random.Random(3), **sizes | more)
    # transformers has no SDPA attention for Gemma 2, whose scores are capped.
    attention = "eager" if family == "gemma2" else "sdpa"
    config._attn_implementation = attention
    return config, dict(attention=attention, batch=2, sequence=16, threads=2)


@pytest.mark.parametrize("family", CLASSES)
def test_a_fused_loss_holds_no_logits(family):
    config, job = step_of(family)
    if family == "deepseek_v3":  # its sizes are no products of those that are recorded
        with pytest.raises(ValueError, match="A step of a deepseek_v3 model cannot be recorded"):
            predict(config, **job)
        return
    if shape_of(config).head_bias:
        with pytest.raises(ValueError, match="needs a model with a linear head without a bias"):
            predict(config, loss="fused", **job)
        return
    usual, fused = (predict(config, loss=loss, **job)["forward"].activations
                    for loss in ("fp32", "fused"))
    # 4 bytes of each logit, that forward would hold until backward
    assert usual - fused > 0.9 * 4 * 2 * 16 * config.vocab_size


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe", "gemma3_text"])
def test_a_loss_in_bf16(family):
    config, job = step_of(family)
    usual, other = (predict(config, loss=loss, recipe="bf16", **job)["peak"].activations
                    for loss in ("fp32", "bf16"))
    assert other < usual


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "phi", *WITH_EXPERTS])
def test_a_step_on_a_real_rank(family):
    config, job = step_of(family)
    said, real = predict(config, **job), phases_of_plain(config, 2, 16)
    for phase in ("build", "forward", "backward", "step", "peak"):
        assert said[phase].total == pytest.approx(real[phase], abs=256), phase

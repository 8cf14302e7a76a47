"""Parameter counts from formulas against models on the meta device, and against published ones."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from labs.predictions.memory import parameters
from labs.predictions.memory.recorder import Mode
from labs.predictions.memory.scaled_step import Step
from labs.predictions.memory.shape import Shape


def llama(hidden, layers, heads, kv, ffn, vocabulary, tied=False, cls=LlamaConfig, **more):
    return cls(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
               num_key_value_heads=kv, intermediate_size=ffn, vocab_size=vocabulary,
               tie_word_embeddings=tied, **more)


def qwen2(*sizes, **more):
    return llama(*sizes, cls=Qwen2Config, **more)


def gpt2(hidden, layers, heads, **more):
    return GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, **more)


KNOWN = {
    "GPT-2": (gpt2(768, 12, 12), 124_439_808),
    "GPT-2 medium": (gpt2(1024, 24, 16), 354_823_168),
    "GPT-2 large": (gpt2(1280, 36, 20), 774_030_080),
    "GPT-2 XL": (gpt2(1600, 48, 25), 1_557_611_200),
    "Llama-2-7B": (llama(4096, 32, 32, 32, 11008, 32000), 6_738_415_616),
    "Llama-2-13B": (llama(5120, 40, 40, 40, 13824, 32000), 13_015_864_320),
    "Llama-2-70B": (llama(8192, 80, 64, 8, 28672, 32000), 68_976_648_192),
    "Llama-3-8B": (llama(4096, 32, 32, 8, 14336, 128256), 8_030_261_248),
    "Llama-3-70B": (llama(8192, 80, 64, 8, 28672, 128256), 70_553_706_496),
    "Qwen2-0.5B": (qwen2(896, 24, 14, 2, 4864, 151936, tied=True), 494_032_768),
    "Qwen2-7B": (qwen2(3584, 28, 28, 4, 18944, 152064), 7_615_616_512),
}


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", KNOWN)
def test_count_is_the_published_one(name):
    config, published = KNOWN[name]
    assert parameters.count(config) == published


@pytest.mark.parametrize("name", ["GPT-2", "GPT-2 XL", "Llama-2-7B", "Llama-3-8B", "Llama-3-70B",
                                  "Qwen2-0.5B", "Qwen2-7B"])
def test_count_is_the_meta_models(name):
    config, _ = KNOWN[name]
    assert parameters.count(config) == sum(p.numel() for p in on_meta(config).parameters())


def random_config(seed):
    rng = random.Random(seed)
    kv, group, dim = rng.randint(1, 3), rng.randint(1, 3), 2 * rng.randint(1, 6)
    layers, vocabulary, ffn = rng.randint(0, 4), rng.randint(5, 99), rng.randint(3, 50)
    tied = rng.random() < 0.5
    common = dict(tied=tied, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    sizes = (kv * group * dim, layers, kv * group, kv, ffn, vocabulary)
    if seed % 3 == 0:
        return gpt2(sizes[0], layers, sizes[2], vocab_size=vocabulary, n_inner=ffn,
                    n_positions=rng.randint(1, 40), tie_word_embeddings=tied)
    if seed % 3 == 1:
        return llama(*sizes, attention_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5,
                     head_dim=2 * rng.randint(1, 6), **common)
    return qwen2(*sizes, **common)


def blocks_of(model):
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


@pytest.mark.parametrize("seed", range(24))
def test_counts_of_random_models(seed):
    config = random_config(seed)
    model = on_meta(config)
    sizes = parameters.unit_sizes(config)
    assert parameters.count(config) == sum(p.numel() for p in model.parameters())
    # Unit by unit, not only the sum: each block, and what has an embedding's or a head's name.
    for number, block in enumerate(blocks_of(model)):
        assert sizes[f"block {number}"] == sum(p.numel() for p in block.parameters())
    by_name = {name: p.numel() for name, p in model.named_parameters()}
    assert sizes["embedding"] == sum(size for name, size in by_name.items()
                                     if ".wte." in name or ".wpe." in name or ".embed_" in name)
    assert sizes["head"] == by_name.get("lm_head.weight", 0)


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 9, 10])
def test_shapes_of_random_models(seed):
    # The same parameters in the same order, shape by shape, scaled from a recording.
    config = random_config(seed)
    assert config.num_hidden_layers
    model = on_meta(config)
    step = Step(config, 2, 1, Mode(4, "none", "sdpa", "cpu"))
    assert [shape for _, shape in step.tensors] == [tuple(p.shape) for p in model.parameters()]
    assert step.buffers == sum(b.nbytes for b in model.buffers())


def test_units_add_up():
    config, total = KNOWN["Llama-3-8B"]
    sizes = parameters.unit_sizes(config)
    assert sizes["block 7"] == 218_112_000
    assert sizes["embedding"] == sizes["head"] == 128256 * 4096
    assert sum(sizes.values()) == total


def mpt(row):
    """MPT is GPT-2 with other sizes: tied embeddings, learned positions, biases everywhere."""
    h, heads = row["hidden"], row["n_heads"]
    return Shape("gpt2", h, row["n_layers"], heads, heads, h // heads, row["ffn_hidden"],
                 row["vocab"], positions=row["seq_len"], tied=True, qkv_bias=True, out_bias=True,
                 mlp_bias=True)


# llm-foundry, scripts/train/benchmarking/README.md @8c8dd48: hidden, layers, heads, length, count.
@pytest.mark.parametrize("hidden, layers, heads, length, published", [
    (768, 12, 12, 512, 124_131_840), (768, 12, 12, 2048, 125_311_488),
    (768, 12, 12, 65536, 174_070_272), (1024, 24, 16, 2048, 355_985_408),
    (1536, 24, 12, 2048, 760_470_528), (2048, 24, 16, 2048, 1_315_950_592),
    (2560, 32, 20, 2048, 2_651_837_440), (4096, 32, 32, 2048, 6_658_859_008),
    (5120, 40, 40, 2048, 12_853_954_560), (7168, 48, 56, 2048, 29_975_214_080),
    (8192, 80, 64, 2048, 64_862_437_376)])
def test_mpt_counts(hidden, layers, heads, length, published):
    row = dict(hidden=hidden, n_layers=layers, n_heads=heads, ffn_hidden=4 * hidden, vocab=50368,
               seq_len=length)
    assert parameters.count(mpt(row)) == published


def test_another_model_type_is_turned_away_in_one_sentence():
    class Bert:
        model_type = "bert"

    with pytest.raises(ValueError, match="no closed form for model type 'bert'"):
        parameters.count(Bert())

"""What the checks of this notebook hold answers against: models on the meta device, tensors that
autograd saves, products that a step really makes. No formula of `labs.predictions` is in here."""

import functools
import random
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from labs.predictions.parameters import shape_of
from labs.training import hf_configs
from labs.training.models import count_trainable


@functools.cache
def known_model(name: str) -> tuple:
    """(Shape, parameters of a block, parameters of the model) of a well-known model."""
    return _counted(hf_configs.config(name))


def drawn_models() -> list:
    """[(name, Shape, parameters of a block, parameters of the model)]: new sizes at every call, so
    that no table holds them; between them they have every trait that a formula can forget."""
    dice = random.Random()
    traits = (("gpt2", dict(tie_word_embeddings=False)),
              ("llama", dict(attention_bias=True, mlp_bias=True)),
              ("qwen2", dict(tie_word_embeddings=True)))
    return [(f"a {_NAMES[family]} of sizes drawn at random",
             *_counted(hf_configs.make(family, **_sizes(family, dice), **more)))
            for family, more in traits]


_NAMES = {"gpt2": "GPT-2", "llama": "Llama", "qwen2": "Qwen2"}


def _sizes(family, dice) -> dict:
    keys, group, width = dice.randint(2, 4), dice.randint(2, 4), 2 * dice.randint(3, 9)
    hidden, vocabulary = keys * group * width, dice.randint(50, 99)
    layers, ffn = dice.randint(2, 4), 3 * hidden + dice.randint(1, 40)
    if family == "gpt2":
        return dict(n_embd=hidden, n_layer=layers, n_head=keys * group, n_inner=ffn,
                    vocab_size=vocabulary, n_positions=dice.randint(20, 49))
    head = dict(head_dim=width + 2) if family == "llama" else {}
    return dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=keys * group,
                num_key_value_heads=keys, intermediate_size=ffn, vocab_size=vocabulary, **head)


def _counted(config) -> tuple:
    model = hf_configs.on_meta(config)
    return shape_of(config), count_trainable(block_of(model)), count_trainable(model)


def block_of(model):
    """The first block of a Hugging Face GPT-2, Llama or Qwen2."""
    return (model.transformer.h if hasattr(model, "transformer") else model.model.layers)[0]


@functools.cache
def saved(batch: int, sequence: int, hidden: int, heads: int, fused: bool) -> tuple:
    """((bytes, shape, dtype) of each tensor that a real GPT-2 block in bf16 saves for backward).

    With dropout, and none inside fused attention; Hugging Face's block with PyTorch's fused GELU,
    dropout masks of one byte as on CUDA. Parameters do not count.
    """
    block = _gpt2_block(hidden, heads, fused)
    x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, requires_grad=True) * 1
    mask = None if fused else torch.zeros(1, 1, sequence, sequence, dtype=torch.bfloat16)
    with _masks_of_one_byte():
        return _saved_by(lambda: block(x, attention_mask=mask), list(block.parameters()))


def saved_by_llama(batch: int, sequence: int, hidden: int) -> tuple:
    """The same of a block with Llama-3-8B's proportions: a quarter as many key heads as query
    heads, a feed-forward part 3.5 times as wide as the model, fused attention."""
    sizes = dict(hidden_size=hidden, num_hidden_layers=1, num_attention_heads=8,
                 num_key_value_heads=2, intermediate_size=7 * hidden // 2, vocab_size=8)
    config = hf_configs.make("llama", attn_implementation="sdpa", use_cache=False, **sizes)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, requires_grad=True) * 1
    rotary = model.model.rotary_emb(x, torch.arange(sequence)[None])
    known_tensors = [*model.parameters(), *rotary]  # rotary: one for all layers
    return _saved_by(lambda: block_of(model)(x, position_embeddings=rotary), known_tensors)


def _gpt2_block(hidden, heads, fused):
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = hf_configs.make("gpt2", n_embd=hidden, n_head=heads, n_layer=1, use_cache=False,
                        attn_pdrop=0.0 if fused else 0.1, activation_function="gelu_pytorch_tanh")
    config._attn_implementation = "sdpa" if fused else "eager"
    return GPT2Block(config, layer_idx=0).to(torch.bfloat16).train()


@contextmanager
def _masks_of_one_byte():
    """CUDA's dropout keeps one byte for each element; the CPU's a factor of the tensor's type."""
    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p and training else x

    with mock.patch.object(nn.functional, "dropout", dropout):
        yield


def _saved_by(forward, known_tensors) -> tuple:
    own = {tensor.untyped_storage().data_ptr() for tensor in known_tensors}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found.setdefault(storage.data_ptr(), (storage.nbytes(), tuple(tensor.shape),
                                                  tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    del output  # kept until here, so that no address was used twice
    return tuple(found.values())


def counted_flops(widths: tuple, tokens: int, checkpointed: bool) -> tuple:
    """(parameters, FLOPs of forward and backward) of a stack of linear layers of these widths, as
    torch counts the operations that it really does."""
    layers = nn.Sequential(*(part for a, b in zip(widths, widths[1:], strict=False)
                             for part in (nn.Linear(a, b, bias=False), nn.ReLU())))
    x = torch.ones(tokens, widths[0], requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = checkpoint(layers, x, use_reentrant=False) if checkpointed else layers(x)
        y.sum().backward()
    return count_trainable(layers), counter.get_total_flops()


def drawn_sizes(dice=None) -> tuple:
    """(batch, sequence, hidden, heads) drawn at random, small enough to run."""
    dice = dice or random.Random()
    heads = dice.choice([2, 4, 6])
    return dice.randint(1, 3), 8 * dice.randint(3, 9), heads * 8 * dice.randint(1, 3), heads


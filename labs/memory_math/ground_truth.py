"""The ground truth of this notebook's checks: models on the meta device, tensors that autograd
saves, FLOPs that torch counts, recipes as real tensors. Nothing here is a formula of
`labs.predictions`.

All of it runs on the CPU, also where there are GPUs. Nothing is timed, and FLOPs and the bytes of a
weight's states follow from shapes and types alone. What attention saves depends on the kernel, of
which GPUs have several, so the formula is compared with the CPU's, the same one everywhere.
"""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from labs.checks.generator import new_generator
from labs.predictions.memory.parameters import shape_of
from labs.predictions.memory.shape import Shape
from labs.training import hf_configs
from labs.training.memory_categories import Memory
from labs.training.models import count_trainable


class CountedModel(NamedTuple):
    """A model's sizes, and the parameters of one block and of all of it, counted on the model."""

    name: str
    sizes: Shape
    block: int
    total: int


@functools.cache
def counted_model(name: str) -> CountedModel:
    """A well-known model, counted on the meta device."""
    return _counted(name, hf_configs.config(name))


def random_models() -> list[CountedModel]:
    """Three models of random sizes, new ones at every call, so that no table can list them;
    between them they have every trait that a formula can forget."""
    rng = new_generator()
    traits = {"gpt2": dict(tie_word_embeddings=False),
              "llama": dict(attention_bias=True, mlp_bias=True),
              "qwen2": dict(tie_word_embeddings=True)}
    names = {"gpt2": "GPT-2", "llama": "Llama", "qwen2": "Qwen2"}
    return [_counted(f"a {names[family]} of sizes drawn at random",
                     hf_configs.make(family, **_random_config(family, rng), **more))
            for family, more in traits.items()]


def _random_config(family, rng) -> dict:
    keys, group, width = rng.randint(2, 4), rng.randint(2, 4), 2 * rng.randint(3, 9)
    hidden, vocabulary = keys * group * width, rng.randint(50, 99)
    layers, ffn = rng.randint(2, 4), 3 * hidden + rng.randint(1, 40)
    if family == "gpt2":
        return dict(n_embd=hidden, n_layer=layers, n_head=keys * group, n_inner=ffn,
                    vocab_size=vocabulary, n_positions=rng.randint(20, 49))
    # Not hidden / heads: rejects a formula that takes head_dim for that.
    head = dict(head_dim=width + 2) if family == "llama" else {}
    return dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=keys * group,
                num_key_value_heads=keys, intermediate_size=ffn, vocab_size=vocabulary, **head)


def _counted(name, config) -> CountedModel:
    model = hf_configs.on_meta(config)
    return CountedModel(name, shape_of(config), count_trainable(first_block(model)),
                        count_trainable(model))


def first_block(model: nn.Module) -> nn.Module:
    """The first block of a Hugging Face GPT-2, Llama or Qwen2."""
    return (model.transformer.h if hasattr(model, "transformer") else model.model.layers)[0]


class SavedTensor(NamedTuple):
    """A tensor that autograd saves for backward: its bytes, shape and type."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


SAVED_PARTS = (
    "norm 1: input", "norm 1: mean", "norm 1: 1 / deviation", "q, k, v: input", "scores: keys",
    "scores: queries", "softmax: output", "dropout of scores: mask", "weighted sum: values",
    "weighted sum: scores", "attention's output: input", "dropout: mask", "norm 2: input",
    "norm 2: mean", "norm 2: 1 / deviation", "up: input", "GELU: input", "down: input",
    "dropout: mask")
"""What `saved_tensors` are with eager attention, in their order."""


@functools.cache
def saved_tensors(batch: int, sequence: int, hidden: int, heads: int,
                  fused: bool) -> tuple[SavedTensor, ...]:
    """The tensors that a real GPT-2 block in bf16 with dropout saves for backward, without its
    parameters. It is Hugging Face's block with PyTorch's fused GELU and CUDA's dropout masks of one
    byte; fused attention has no dropout of its own."""
    block = _gpt2_block(hidden, heads, fused)
    # `* 1`: no leaf, as a block's input is the output of the layer before it.
    x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, requires_grad=True) * 1
    # (batch, heads, query, key), broadcast over the first two
    mask = None if fused else torch.zeros(1, 1, sequence, sequence, dtype=torch.bfloat16)
    with _masks_of_one_byte():
        return _saved_by(lambda: block(x, attention_mask=mask), list(block.parameters()))


def saved_bytes(batch: int, sequence: int, hidden: int, heads: int, fused: bool) -> int:
    """Bytes of `saved_tensors` in total."""
    return sum(tensor.nbytes for tensor in saved_tensors(batch, sequence, hidden, heads, fused))


def llama_saved_bytes(batch: int, sequence: int, hidden: int) -> int:
    """Bytes that a real block in bf16 with Llama-3-8B's proportions saves for backward: a quarter
    as many key heads as query heads, a feed-forward part 3.5 times as wide as the model, fused
    attention."""
    block, rotary = _llama_block(sequence, hidden)
    x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, requires_grad=True) * 1
    found = _saved_by(lambda: block(x, position_embeddings=rotary), [*block.parameters(), *rotary])
    return sum(tensor.nbytes for tensor in found)


def _llama_block(sequence, hidden) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A block in bf16 with Llama-3-8B's proportions, and the rotary embedding of all layers."""
    from transformers import AutoModelForCausalLM

    sizes = dict(hidden_size=hidden, num_hidden_layers=1, num_attention_heads=8,
                 num_key_value_heads=2, intermediate_size=7 * hidden // 2, vocab_size=8)
    config = hf_configs.make("llama", attn_implementation="sdpa", use_cache=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    x = torch.zeros(1, sequence, hidden, dtype=torch.bfloat16)
    return first_block(model), model.model.rotary_emb(x, torch.arange(sequence)[None])


class BlockPart(NamedTuple):
    """A part of a block: its name, its forward with an input of its own, and the tensors that are
    in memory without it."""

    name: str
    forward: Callable[[], torch.Tensor]
    held: list[torch.Tensor]


def block_parts(batch: int, sequence: int, hidden: int) -> dict[str, list[BlockPart]]:
    """Model -> the full block, the block checkpointed, its norms, its attention and its
    feed-forward part: of GPT-2 as in `saved_tensors`, and with Llama-3-8B's proportions; attention
    is fused."""
    block = _gpt2_block(hidden, 4, fused=True)
    llama, rotary = _llama_block(sequence, hidden)
    x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, requires_grad=True)

    def parts(block, held, norms, attention, feed_forward, **options):
        first, second = norms
        forwards = {
            "whole": lambda y: block(y, **options),
            # Each norm with an input of its own, as in a block: one shared input would be saved
            # once.
            "two norms": lambda y: first(y) + second(x.clone()),
            "attention": lambda y: attention(y, **options)[0], "feed-forward": feed_forward,
            "checkpointed": lambda y: checkpoint(block, y, use_reentrant=False, **options)}
        return [BlockPart(name, _with_own_input(forward, x), [x, *block.parameters(), *held])
                for name, forward in forwards.items()]

    return {"GPT-2": parts(block, [], [block.ln_1, block.ln_2], block.attn, block.mlp),
            "Llama-3's proportions": parts(
                llama, rotary, [llama.input_layernorm, llama.post_attention_layernorm],
                llama.self_attn, llama.mlp, position_embeddings=rotary, attention_mask=None)}


def _with_own_input(forward, x) -> Callable[[], torch.Tensor]:
    """A forward with a copy of x: its input is the output of another operation, as in a model."""
    def run():
        with _masks_of_one_byte():
            return forward(x.clone())

    return run


def _gpt2_block(hidden, heads, fused) -> nn.Module:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = hf_configs.make("gpt2", n_embd=hidden, n_head=heads, n_layer=1, use_cache=False,
                             attn_pdrop=0.0 if fused else 0.1,
                             activation_function="gelu_pytorch_tanh")
    config._attn_implementation = "sdpa" if fused else "eager"
    block = GPT2Block(config, layer_idx=0).to(torch.bfloat16).train()
    for parameter in block.parameters():
        # GPT-2 keeps its weights as (in, out). On a CPU without AVX-512, torch's product with such
        # a matrix in bf16 takes 20 times as long as with (out, in), and 120 times as long as fp32.
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    return block


@contextmanager
def _masks_of_one_byte():
    """CUDA's dropout saves a mask of one byte per element; the CPU's a factor of the tensor's
    type, which would count twice as much in bf16."""
    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p and training else x

    with mock.patch.object(nn.functional, "dropout", dropout):
        yield


def _saved_by(forward: Callable, excluded: list[torch.Tensor]) -> tuple[SavedTensor, ...]:
    excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    found = {}

    def pack(tensor):
        # Several operations may save one storage, which is held once.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            found.setdefault(storage.data_ptr(), SavedTensor(storage.nbytes(), tuple(tensor.shape),
                                                             tensor.dtype))
        return tensor.detach()  # the tensor itself would keep the graph that keeps it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    del output  # alive until here: a freed tensor's address could be used a second time
    return tuple(found.values())


class CountedStep(NamedTuple):
    """Parameters in the matrices of all blocks, in the last matrix of each block, and in the head;
    FLOPs of forward and backward, as torch counts the operations that run."""

    blocks: int
    last: int
    head: int
    flops: int


def counted_step(widths: tuple[int, ...], blocks: int, vocabulary: int, tokens: int,
                 checkpointed: bool) -> CountedStep:
    """One step of equal blocks, each of linear layers of these widths, which begin and end with the
    same; and of a head, which is never checkpointed."""
    found = [_linear_block(widths) for _ in range(blocks)]
    head = nn.Linear(widths[0], vocabulary, bias=False)
    # (tokens, width). It needs a gradient, as inside a model: otherwise the first layer's backward
    # would leave out the product for its input.
    x = torch.ones(tokens, widths[0], requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = x
        for block in found:
            y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
        head(y).sum().backward()
    return CountedStep(sum(map(count_trainable, found)), blocks * widths[-2] * widths[-1],
                       count_trainable(head), counter.get_total_flops())


def _linear_block(widths) -> nn.Sequential:
    layers = [nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False)]
    parts = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*parts[:-1])  # a block ends with a product, like a transformer's


def random_sizes() -> tuple[int, int, int, int]:
    """(batch, sequence, hidden, heads) drawn at random, small enough to run."""
    rng = new_generator()
    heads = rng.choice([2, 4, 6])
    return rng.randint(1, 3), 8 * rng.randint(3, 9), heads * 8 * rng.randint(1, 3), heads


def measured_recipes() -> dict[str, Memory]:
    """Recipe -> bytes per parameter of real tensors after a step of torch's AdamW."""
    recipes = (("fp32", torch.float32, False), ("bf16", torch.bfloat16, False),
               ("bf16, fp32 master", torch.bfloat16, True))
    return {name: _after_a_step(dtype, master) for name, dtype, master in recipes}


def _after_a_step(dtype, master) -> Memory:
    """Bytes per parameter of one weight matrix; with a master copy the optimizer updates that."""
    weight = nn.Parameter(torch.ones(256, 256, dtype=dtype))
    updated = nn.Parameter(weight.detach().float()) if master else weight
    optimizer = torch.optim.AdamW([updated])
    weight.sum().backward()
    # The optimizer updates the master copy, so that is what needs the gradient.
    updated.grad = weight.grad.to(updated.dtype)
    optimizer.step()
    state = [value for state in optimizer.state.values() for value in state.values()
             if value.numel() > 1]  # without the counter of steps
    groups = ([weight], [weight.grad], state + [updated] * master)
    return Memory(*(sum(tensor.nbytes for tensor in group) / weight.numel() for group in groups))

"""What a layer of Hugging Face's Llama saves for backward, by formula and measured, in numbers of
b·s·h (batch, sequence, hidden size).

The count is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), section 4: a layer of a GPT in 16 bits keeps s·b·h·(10 + 24/t) bytes under tensor
parallelism and s·b·h·34/t under sequence parallelism, attention's scores apart. A Llama has other
terms, and torch's fused attention saves no scores.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from labs.training.models import blocks

NORMS, INPUTS, INSIDE = "norms", "inputs of attention and MLP", "inside attention and MLP"
_COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class LayerActivations:
    """b·s·h numbers that one layer saves on a rank, by part. norms: what the two norms read, and
    their normalized inputs. inputs: the norms' outputs, which the first matrices read."""

    norms: float
    inputs: float
    inside: float

    @property
    def total(self) -> float:
        """All parts together."""
        return self.norms + self.inputs + self.inside

    def by_part(self) -> dict[str, float]:
        """Name of a part -> b·s·h numbers."""
        return {NORMS: self.norms, INPUTS: self.inputs, INSIDE: self.inside}

    def divided(self, norms: int = 1, inputs: int = 1, inside: int = 1) -> "LayerActivations":
        """The parts divided by so many ranks each."""
        return LayerActivations(self.norms / norms, self.inputs / inputs, self.inside / inside)


def whole_layer(config) -> LayerActivations:
    """Returns what a layer saves without sharding, of a Llama's configuration.

    norms: 2 each, and one number for each token. inside: queries, keys, values, attention's output,
    its log-sum-exp (one number for each head and token); of the MLP the output of both first
    matrices, of the activation function, and the product.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    keys_and_values = 2 * config.num_key_value_heads / heads
    return LayerActivations(
        norms=2 * (2 + 1 / hidden), inputs=2,
        inside=2 + keys_and_values + heads / hidden + 4 * config.intermediate_size / hidden)


def predicted(config, ranks: int) -> dict[str, LayerActivations]:
    """Returns way -> what a layer saves on a rank. The last way gathers the inputs of attention and
    MLP once more in backward, in place of saving them, as the paper does."""
    whole = whole_layer(config)
    return {"reference": whole,
            "tensor parallel": whole.divided(inside=ranks),
            "sequence parallel": whole.divided(norms=ranks, inside=ranks),
            "and gathered again": whole.divided(ranks, ranks, ranks)}


@contextlib.contextmanager
def saved_by_part(model: nn.Module) -> Iterator[dict[str, int]]:
    """While open, counts the bytes that the layers of `model` save in forward for backward, by
    part; each memory once, parameters left out."""
    found = dict.fromkeys((NORMS, INPUTS, INSIDE), 0)
    inside_of: list[str] = []
    handles = [handle for layer in blocks(model) for name, module in layer.named_modules()
               for handle in _tracked(module, _part(name), inside_of)]
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}

    # What is saved stays alive until backward, so no other memory gets its address meanwhile.
    def pack(tensor):
        storage = tensor.untyped_storage()
        if inside_of and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[inside_of[-1]] += storage.nbytes()
        # Detached: an operation that saves its own output (softmax, exp) would otherwise keep a
        # tensor whose grad_fn is that operation, a cycle that only a backward breaks. Autograd
        # sets the history again when it unpacks.
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    for handle in handles:
        handle.remove()


def _part(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    return NORMS if "norm" in last else INPUTS if last in _COLUMN_PARALLEL else INSIDE


def _tracked(module, part, inside_of):
    """Hooks that keep the part of the innermost module that computes at the end of the list."""
    # prepend: before the pre-hooks of a strategy, so that what a gather at the module's entry saves
    # counts for this module. A forward hook must return None, or it replaces the output.
    return (module.register_forward_pre_hook(lambda *_: inside_of.append(part), prepend=True),
            module.register_forward_hook(lambda *_: inside_of.pop() and None))


def activation_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Returns what the layers of a model save in forward on this batch, by part, in bytes."""
    with saved_by_part(model) as found:
        model(**batch).loss.backward()
    model.zero_grad()
    return found

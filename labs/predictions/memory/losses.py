"""Cross-entropy as other training programs compute it, for a step that is recorded."""

import torch
from torch import nn
from torch.nn import functional as F


def replace(model: nn.Module, kind: str) -> None:
    """Replaces a decoder's loss. "fp32": as transformers has it. "bf16": without a copy of the
    logits in fp32. "fused": with the head's product, piece by piece, so that no logits are kept.
    Raises ValueError where the model has no head of its own."""
    if kind == "fp32":
        return
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(f"loss={kind!r} needs a model with a linear head without a bias")
    # Some models give the vocabulary's size as a third argument (Mixtral), others by its name.
    if kind == "fused":
        weight = head.weight
        head.forward = lambda hidden: hidden
        model.loss_function = lambda logits, labels, *_, **__: FusedCrossEntropy.apply(
            logits, weight, labels)
    else:
        model.loss_function = lambda logits, labels, *_, **__: F.cross_entropy(
            logits.flatten(0, 1), _shifted(labels))


def _shifted(labels) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()


class FusedCrossEntropy(torch.autograd.Function):
    """What Liger-Kernel's fused linear cross-entropy allocates (ops/fused_linear_cross_entropy.py):
    gradients of the head's input and weight, made in forward from one piece of the logits after the
    other; a piece has about as many numbers as the head's input, and is left out here."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        _shifted(labels)
        ctx.save_for_backward(torch.zeros_like(hidden), torch.zeros_like(weight))
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        # One gradient for each argument of forward: hidden, weight, and none for the labels.
        return *ctx.saved_tensors, None

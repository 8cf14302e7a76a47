"""What a student of notebook 07a calls or subclasses."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def map_input(module: nn.Module,
              function: Callable[[torch.Tensor], torch.Tensor]) -> RemovableHandle:
    """Registers a pre-hook: whenever `module` is called, `function` is applied to its hidden states
    first, which are its first positional argument or its argument `hidden_states`. Returns the
    hook's handle."""
    def hook(_, arguments, named):
        if arguments:
            return (function(arguments[0]), *arguments[1:]), named
        return arguments, {**named, "hidden_states": function(named["hidden_states"])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def set_loss(model: nn.Module,
             function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Makes function(logits, targets) the loss of a Hugging Face language model: logits (b, s, ·)
    as its head returns them, targets (b, s), at each place the next token; -100 at the last place,
    which has none, and where the labels have it."""
    def loss(logits, labels, **_):
        # Labels shifted to the left by one: at place i stands the token of place i + 1.
        return function(logits, nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous())

    model.loss_function = loss


def map_output(module: nn.Module,
               function: Callable[[torch.Tensor], torch.Tensor]) -> RemovableHandle:
    """Registers a hook: whenever `module` has been called, `function` is applied to its output, a
    tensor. Returns the hook's handle."""
    return module.register_forward_hook(lambda _, __, output: function(output))

"""What a student of notebook 07a calls or subclasses."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from labs.tensor_parallel.sequence_collectives import join_sequence, split_sequence


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


def split_hidden_states(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes the hidden states of a Hugging Face Llama s/t tokens on each rank, from its first layer
    to its last norm. Backward gathers the gradients before the first layer; after the last norm it
    takes this rank's tokens of a gradient that all ranks have alike."""
    map_input(model.model.layers[0], lambda hidden: split_sequence(hidden, group))
    # A forward hook's result replaces the module's output.
    model.model.norm.register_forward_hook(lambda _, __, piece: join_sequence(piece, group))

"""The backward of one stage and micro-batch, whole or in two parts: the gradient of the input
first, which the stage before waits for, and the gradients of the weights whenever there is time."""

from collections.abc import Sequence

import torch

try:  # private, there since torch 2.5
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
except ImportError:
    stage_backward_input = stage_backward_weight = None


def backward(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """The whole backward: all gradients add up in `.grad`. gradient: of the output; None for a
    loss."""
    torch.autograd.backward(output, gradient)


class InputThenWeights:
    """The two parts of a backward. `input_gradient()` computes the gradient of `received` alone and
    returns it; `weights()`, later, adds those of the parameters to their `.grad`.

    With torch's private functions each part runs its own half of the graph: the gradients where a
    weight is used are kept from one part to the other. Without them, the second part runs the whole
    backward once more: same gradients, more time.
    """

    def __init__(self, output: torch.Tensor, received: torch.Tensor | None,
                 gradient: torch.Tensor | None, parameters: Sequence[torch.nn.Parameter]):
        self._output, self._received, self._gradient = output, received, gradient
        self._parameters = [p for p in parameters if p.requires_grad]
        self._groups: list | None = None

    def input_gradient(self) -> torch.Tensor | None:
        """The gradient of the stage's input; None in the first stage, which has nothing to do."""
        if self._received is None:
            return None
        if stage_backward_input is None:
            found, = torch.autograd.grad(self._output, self._received, self._gradient,
                                         retain_graph=True)
            return found
        gradients = None if self._gradient is None else [self._gradient]
        (found,), self._groups = stage_backward_input([self._output], gradients, [self._received],
                                                      iter(self._parameters))
        self._output = self._gradient = None  # the graph above the weights is freed
        self._received.grad = None
        return found

    def weights(self) -> None:
        """Adds the gradients of the parameters to what they have."""
        if self._groups is not None:
            stage_backward_weight(iter(self._parameters), self._groups)
        else:
            torch.autograd.backward(self._output, self._gradient, inputs=self._parameters)
        self._groups = self._output = self._gradient = None

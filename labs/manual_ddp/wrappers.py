"""The shells that a student's data-parallel modules are built in."""

from torch import nn
from torch.autograd import Variable


class Wrapper(nn.Module):
    """A module around `module` that is called as `module` is."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs, **named_inputs):
        return self.module(*inputs, **named_inputs)


class Bucketed(Wrapper):
    """A wrapper that says when gradients are complete.

    During backward it calls `self.gradient_ready(parameter)` for every trainable parameter, the
    moment its gradient is complete, and `self.backward_done()` once, at the end of backward, after
    all of them. A parameter that a step does not use is never ready. While `self.synchronize` is
    False it calls neither. self.ready (a set) and self.started (a list) are the subclass's own, and
    empty again after every backward.
    """

    def __init__(self, module, buckets):
        super().__init__(module)
        self.buckets = buckets
        self.ready, self.started = set(), []
        self.synchronize = True
        self._in_backward = False
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._complete)

    def gradient_ready(self, parameter):
        """For a subclass to fill."""

    def backward_done(self):
        """For a subclass to fill."""

    def _complete(self, parameter):
        if not self.synchronize:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end)
        self.gradient_ready(parameter)

    def _end(self):
        self._in_backward = False
        self.backward_done()
        self.ready, self.started = set(), []

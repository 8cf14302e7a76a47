"""What a student's data-parallel modules are built on."""

from torch import nn
from torch.autograd import Variable


class Wrapper(nn.Module):
    """A module that holds `module` and is called as `module` is."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs, **named_inputs):
        return self.module(*inputs, **named_inputs)


class BucketedWrapper(Wrapper):
    """A wrapper that calls its own methods when gradients are complete.

    During backward it calls `self.gradient_ready(parameter)` for every trainable parameter as soon
    as its gradient is complete, and `self.backward_done()` once, at the end of backward. Of a
    parameter that a step does not use, no gradient is ever ready. While `self.synchronize` is False
    neither is called. self.ready (a set) and self.started (a list) are for the subclass; each
    backward begins with them empty. buckets: lists of parameters, in the order in which they leave.
    """

    def __init__(self, module: nn.Module, buckets: list[list[nn.Parameter]]):
        super().__init__(module)
        self.buckets = buckets
        self.synchronize = True
        self._begin()
        for parameter in module.parameters():
            if parameter.requires_grad:
                # unlike a tensor hook, it runs after .grad was written, and gets the parameter;
                # for a tied weight it runs once, when all its uses have added to .grad
                parameter.register_post_accumulate_grad_hook(self._complete)

    def forward(self, *inputs, **named_inputs):
        # A backward that raised never reached _end, and the engine dropped its callback: without
        # this the module would take every later backward for a part of that one.
        if self._in_backward:
            self._begin()
        return super().forward(*inputs, **named_inputs)

    def gradient_ready(self, parameter: nn.Parameter):
        """Called when the parameter's gradient is complete; does nothing unless overridden."""

    def backward_done(self):
        """Called at the end of backward; does nothing unless overridden."""

    def _begin(self):
        self.ready, self.started = set(), []
        self._in_backward = False

    def _complete(self, parameter):
        if not self.synchronize:
            return
        if not self._in_backward:
            # the engine forgets its callbacks after each backward and takes new ones only during
            # one, so the first gradient of every backward queues it again, as torch's DDP does
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end)
        self.gradient_ready(parameter)

    def _end(self):
        try:
            self.backward_done()
        finally:
            self._begin()

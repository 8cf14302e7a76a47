"""Marks where forward, backward and the optimizer's step of any training loop begin, and labels
what each leaves behind."""

import contextlib
import unittest.mock
from collections.abc import Iterator

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from labs.predictions.dryrun.tracker import Tracker


@contextlib.contextmanager
def phases(module: torch.nn.Module, tracker: Tracker, marked: bool) -> Iterator[None]:
    """Labels gradients and the optimizer's state while one step runs inside. marked: begin phases
    too, so that the step counts in the result."""
    watch = _Phases(module, tracker, marked)
    with contextlib.ExitStack() as stack:
        for handle in (module.register_forward_pre_hook(watch.forward, prepend=True),
                       register_optimizer_step_pre_hook(watch.before_step),
                       register_optimizer_step_post_hook(watch.after_step)):
            stack.callback(handle.remove)
        stack.enter_context(watch.backward())
        watch.begin("forward")
        yield
        if watch.phase != "end":  # an optimizer that is none of torch's
            watch.begin("end")


class _Phases:
    """What happens at the borders of phases."""

    def __init__(self, module, tracker, marked):
        self._module, self._tracker, self._marked = module, tracker, marked
        self._stepping = contextlib.ExitStack()
        self._depth = 0
        self.phase = None

    def begin(self, phase):
        if self._marked and phase != self.phase:
            self._tracker.mark((phase, "start"))
        self.phase = phase

    def forward(self, *_):
        if self.phase != "step":  # of L-BFGS, which computes gradients inside its step
            self.begin("forward")

    def backward(self):
        original = torch.autograd.backward

        def backward(*args, **kwargs):
            self.begin("backward")
            original(*args, **kwargs)
            found = (p.grad for p in self._module.parameters())
            self._tracker.label("gradients", *(grad for grad in found if grad is not None))

        return unittest.mock.patch.object(torch.autograd, "backward", backward)

    def before_step(self, optimizer, *_):
        if not self._depth:  # ZeroRedundancyOptimizer's step calls that of another one inside
            self.begin("step")
            self._stepping.enter_context(self._tracker.labelled("other"))
            self._stepping.enter_context(self._tracker.stepping(optimizer))
        self._depth += 1

    def after_step(self, optimizer, *_):
        self._depth -= 1
        if not self._depth:
            self._stepping.close()
            self._tracker.label("optimizer state", *optimizer.state.values())
            self.begin("end")

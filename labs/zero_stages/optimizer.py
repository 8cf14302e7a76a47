"""The shell of an optimizer that works on shards."""

import torch


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer around another, `inner`, which updates the shards of `flats`: a step is
    `reduce()`, `inner.step()` and `gather()`.

    Its groups and its state are the inner one's, so that a schedule, `state_dict` and whatever
    else knows torch's optimizers works on it. zero_grad forgets the gradients of the shards and
    those of the model's own parameters.
    """

    def __init__(self, inner, flats):
        super().__init__([flat.shard for flat in flats], {})
        self.inner, self.flats = inner, list(flats)
        self._share()

    def step(self, closure=None):
        """One update. A closure, which torch's optimizers may be given, is called before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():  # as in every optimizer of torch: it writes parameters
            self.reduce()
            self.inner.step()
            self.gather()
        return loss

    def reduce(self):
        """For a subclass to fill: the gradients of the shards, before the update."""

    def gather(self):
        """For a subclass to fill: the parameters, after the update."""

    def _share(self):
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def zero_grad(self, set_to_none: bool = True):
        self.inner.zero_grad(set_to_none)
        for flat in self.flats:
            for parameter in flat.parameters:
                parameter.grad = None

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self._share()

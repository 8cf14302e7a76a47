"""An optimizer around another, which updates this rank's shards only."""

from collections.abc import Callable

import torch

from labs.zero_stages.flat_parameter import FlatParameter


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer around another, `inner`, which updates the shards of `flats`: a step is
    `reduce()`, `inner.step()` and `gather()`.

    Its groups, its defaults and its state are those of `inner`, so that a learning rate schedule,
    `state_dict` and whatever else expects a torch optimizer works on it. All parameters of one flat
    parameter are in one group: they have one learning rate and one weight decay.
    """

    def __init__(self, inner: torch.optim.Optimizer, flats: list[FlatParameter]):
        super().__init__([flat.shard for flat in flats], {})
        self.inner, self.flats = inner, list(flats)
        self._reduced = False
        for flat in self.flats:
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(self._on_new_gradient)
        self._share_state()

    def step(self, closure: Callable | None = None):
        """One update. A closure, which torch's optimizers accept, is called before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():  # as in torch's optimizers: the update writes to leaf tensors
            self.reduce_once()
            self.inner.step()
            self.gather()
        self._reduced = False
        return loss

    def reduce_once(self) -> None:
        """Calls `reduce()`, unless it has been called since the last backward. A step does so, and
        whatever reads the gradients of the shards before the step, such as clipping, must do so."""
        if not self._reduced:
            with torch.no_grad():
                self.reduce()
        self._reduced = True

    def reduce(self) -> None:
        """For a subclass: sets the gradients of the shards, before the update."""

    def gather(self) -> None:
        """For a subclass: fills the full parameters, after the update."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the shards and of the model's own parameters."""
        self.inner.zero_grad(set_to_none)
        self._reduced = False
        for flat in self.flats:
            for parameter in flat.parameters:
                parameter.grad = None

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group to the inner optimizer, whose groups are this one's."""
        if "inner" in vars(self):
            self.inner.add_param_group(param_group)
        else:  # torch.optim.Optimizer.__init__ makes the first group so
            super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads what `state_dict` returned on this rank."""
        self.inner.load_state_dict(state_dict)
        self._share_state()  # loading made new groups and a new state

    def _share_state(self):
        self.defaults = self.inner.defaults
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _on_new_gradient(self, parameter):
        self._reduced = False

"""What a student of notebook 03 calls or subclasses: a module that calls its own methods around
each unit, where a student says what is gathered, freed and reduced; an optimizer around another,
which updates this rank's shards only; saving and loading when no rank has everything; and the bytes
of each stage."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from labs.checks.verdicts import Wrong
from labs.predictions.memory.recipes import model_states
from labs.zero_stages.flat_parameter import FlatParameter, flatten_layers


class ShardedModule(nn.Module):
    """A module around `model` that is called as `model` is, and calls its own methods:

    before_forward(unit), after_forward(unit): around the forward of each unit;
    before_backward(unit): when backward reaches the unit;
    after_backward(unit): once all its gradients are there, last unit first, the root last, in the
    same order on every rank; units that backward did not use come at the end;
    backward_done(): after all of them.

    units: a FlatParameter for each layer, and one for the root, whose forward is that of the whole
    model. Frozen parameters are in none of them: every rank keeps them. A weight that two layers
    share, or a layer and the root, is in the root. A layer that no rank used gets a gradient of
    zeros, so its weight decay continues.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model
        self.units = flatten_layers(model)
        self._root = next((unit for unit in self.units if unit.module is model), None)
        # The root comes last: its tied embedding gets its last gradient at the end of backward.
        self._backward_order = sorted(self.units[::-1], key=lambda unit: unit is self._root)
        self._forget_backward()
        for unit in self.units:
            self._register_hooks(unit)

    def before_forward(self, unit: FlatParameter) -> None:
        """For a subclass."""

    def after_forward(self, unit: FlatParameter) -> None:
        """For a subclass."""

    def before_backward(self, unit: FlatParameter) -> None:
        """For a subclass."""

    def after_backward(self, unit: FlatParameter) -> None:
        """For a subclass."""

    def backward_done(self) -> None:
        """For a subclass."""

    def next_unit(self, unit: FlatParameter) -> FlatParameter | None:
        """The unit that is used after this one, in the direction in which the model runs now; None
        after the last. The root is first in both: its backward begins with the loss."""
        order = self._backward_order if self._in_backward else self.units
        # sorted is stable: the root moves to the front, the others keep their order.
        order = sorted(order, key=lambda each: each is not self._root)
        place = order.index(unit) + 1
        return order[place] if place < len(order) else None

    def forward(self, *inputs, **named_inputs):
        # A backward that raised never reached _end_backward: the flag still says that one runs.
        if self._in_backward and not _autograd_runs():
            self._drop_failed_backward()
        if self._root:
            self._before_forward(self._root)
        output = self.module(*inputs, **named_inputs)
        if self._root:
            self._after_forward(self._root, None, None, output)
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's own parameters and of the shards."""
        super().zero_grad(set_to_none)
        for unit in self.units:
            unit.shard.grad = None

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Parameter name -> a copy of the full parameter, gathered unit by unit as in a forward. A
        tied one has all its names. All ranks must call it."""
        copies = {}
        for unit in self.units:
            self.before_forward(unit)
            # a copy: after_forward may free
            copies |= {id(p): p.detach().clone() for p in unit.parameters}
            self.after_forward(unit)
        return {name: copies.get(id(p), p.detach())
                for name, p in self.module.named_parameters(remove_duplicate=False)}

    def state_dict(self, *args, **options) -> dict[str, torch.Tensor]:
        """As of any module, with the full parameters. All ranks must call it."""
        full = {f"module.{name}": p for name, p in self.full_parameters().items()}
        return {name: full.get(name, value)
                for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], *args, **options):
        """As of any module; a rank keeps its shards of what is loaded. All ranks must call it."""
        for unit in self.units:
            self.before_forward(unit)
            # A gather that ends after the load would overwrite what was loaded.
            unit.wait()
        missing = super().load_state_dict(state_dict, *args, **options)
        for unit in self.units:
            unit.keep_own_piece()
            self.after_forward(unit)
        return missing

    def _apply(self, *_, **__):
        raise RuntimeError("move the model, or change its dtype, before you wrap it: now its "
                           "parameters are views of flat parameters, and stay what they are")

    def _register_hooks(self, unit):
        # The root's forward is this module's own, which calls the two methods itself.
        if unit is not self._root:
            unit.module.register_forward_pre_hook(lambda *_: self._before_forward(unit))
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        for parameter in unit.parameters:  # such a hook is called with the parameter
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def _before_forward(self, unit):
        if _autograd_runs():  # a checkpoint computes the layer again, for its backward
            self._reach(unit, computes_again=True)
        else:
            self.before_forward(unit)
        _require_gathered(unit, "forward")

    def _after_forward(self, unit, module, inputs, output):
        if _autograd_runs():  # computed again by a checkpoint: backward still needs the parameters
            return
        # Backward reaches a unit when it has the gradient of an output. Hooks on these tensors see
        # it; a module's backward hooks do not see tensors inside a ModelOutput or a dataclass.
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                reentrant = "CheckpointFunction" in type(tensor.grad_fn).__name__
                tensor.register_hook(lambda _, reentrant=reentrant: self._reach(unit, reentrant))
        self.after_forward(unit)

    def _reach(self, unit, computes_again=False):
        self._begin_backward()
        if computes_again and unit in self._backward_order[:self._completed]:
            raise _second_gradient(unit)
        if unit in self._reached:  # a unit may have several outputs, or be used several times
            return
        self._reached.add(unit)
        self.before_backward(unit)
        _require_gathered(unit, "backward")

    def _gradient_ready(self, parameter):
        # Ranks may use different layers, but must issue collectives in one order: a unit whose
        # gradients are there waits for those before it.
        self._begin_backward()
        for unit in self._backward_order[:self._completed]:
            if any(parameter is one for one in unit.parameters):
                raise _second_gradient(unit)
        self._ready.add(parameter)
        while self._completed < len(self._backward_order):
            if not self._ready.issuperset(self._backward_order[self._completed].parameters):
                return
            self._complete_unit()

    def _begin_backward(self):
        if not self._in_backward:
            self._in_backward = True
            # Runs when backward is over (a private API that DDP and FSDP use, too). It can only be
            # queued while backward runs, so the first hook that is called does it.
            Variable._execution_engine.queue_callback(self._end_backward)

    def _complete_unit(self):
        self._completed += 1
        self.after_backward(self._backward_order[self._completed - 1])

    def _end_backward(self):
        while self._completed < len(self._backward_order):
            self._complete_unit()
        self.backward_done()
        self._forget_backward()

    def _forget_backward(self):
        self._ready, self._reached, self._completed = set(), set(), 0
        self._in_backward = False

    def _drop_failed_backward(self):
        # A backward that raised has left layers gathered and parts of gradients: the next one would
        # take them for its own.
        self.backward_done()
        self._forget_backward()
        for unit in self.units:
            if unit.is_sharded:
                unit.free()
        self.zero_grad()


def _autograd_runs() -> bool:
    """Whether a backward runs now, so that a forward is one that a checkpoint computes again."""
    return torch._C._current_graph_task_id() != -1


def _second_gradient(unit) -> RuntimeError:
    """For a gradient that comes when what was taken for all of it has been reduced."""
    return RuntimeError(
        f"{unit.name!r} gets another gradient in the same backward, after the first has been "
        "reduced: a reentrant checkpoint runs a backward of its own for each use of a layer. "
        "Checkpoint with use_reentrant=False")


def _require_gathered(unit, direction):
    """Raises Wrong: computing with a storage of size 0 reads address 0 and kills the process."""
    if not unit.is_gathered:
        raise Wrong(f"{direction} of {unit.name!r} begins, and its parameters are not there",
                    f"Gather them in before_{direction}, every time.", code="not_gathered")


def tensors_in(output) -> list[torch.Tensor]:
    """The tensors in what a module returns. pytree knows containers and Hugging Face's ModelOutput;
    of other objects, such as a SimpleNamespace, the attributes are searched."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += tensors_in(vars(leaf))
    return found


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


def sharded_state_dict(optimizer: ShardedOptimizer) -> list[dict]:
    """On a rank: what it must save to resume, a dict for each flat parameter: "elements", without
    padding, this rank's "shard", and the shards of its optimizer "state"."""
    def copied(tensor):  # to the CPU, as in a file: a machine that loads it may have no GPU
        return tensor.detach().to("cpu", copy=True)

    return [{"elements": flat.elements, "shard": copied(flat.shard), "state": {
        name: copied(value) for name, value in optimizer.state[flat.shard].items()}}
        for flat in optimizer.flats]


def load_sharded_state_dict(optimizer: ShardedOptimizer, saved: list[list[dict]],
                            reshard: Callable) -> None:
    """On a rank: loads what an earlier run saved, on however many ranks.

    saved[r]: what `sharded_state_dict` returned on its rank r. reshard(read, elements, before,
    after, rank): this rank's shard, where read(old, begin, end) is a slice of old rank's shard.
    """
    before, rank, after = len(saved), dist.get_rank(), dist.get_world_size()
    for number, flat in enumerate(optimizer.flats):
        parts = [by_flat[number] for by_flat in saved]

        def own(shards, flat=flat):
            return reshard(lambda old, begin, end: shards[int(old)][int(begin):int(end)],
                           flat.elements, before, after, rank)

        with torch.no_grad():
            flat.shard.copy_(own([part["shard"] for part in parts]))
        optimizer.state[flat.shard] = {  # AdamW's step, a scalar, is the same on all ranks
            name: own([part["state"][name] for part in parts]).to(flat.shard.device, copy=True)
            if value.dim() else value
            for name, value in parts[0]["state"].items()}
    # The full parameters still hold the numbers from before the load.
    optimizer.gather()


STATES_RECIPE = "bf16, fp32 master"  # K = 12: 16 bytes per parameter, as in the ZeRO paper


def state_bytes(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of parameters, gradients and optimizer state of one rank, in bf16 with an fp32 master
    copy; stage 0 is DDP."""
    return model_states(parameters, STATES_RECIPE, ranks=ranks, stage=stage).total

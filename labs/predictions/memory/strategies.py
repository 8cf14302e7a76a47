"""What a parallel strategy adds to a recorded step: buckets, shards, gathered parameters.

Sources: torch 2.13, nn/parallel/distributed.py and csrc/distributed/c10d/reducer.cpp (buckets are
allocated when DDP is built and stay); distributed/fsdp/_fully_shard/_fsdp_param_group.py
(wait_for_unshard, post_backward) and _fsdp_collectives.py; Rajbhandari et al., "ZeRO", section 5.
"""

from math import ceil, prod

from labs.predictions.memory.allocation_log import AllocationLog
from labs.predictions.memory.recipes import Recipe
from labs.predictions.memory.scaled_step import Step
from labs.predictions.memory.shards import fsdp_units, owned, padded

ACCUMULATION = ("none", "sync", "no sync")


class Plain:
    """No parallelism: one rank holds all states. Base class of the other strategies.

    gradient_bytes: of an element as autograd makes it; keep_gradients: whether they are kept in
    `.grad`, or freed as soon as they are copied somewhere else.
    """

    keep_gradients = True
    accumulation = "none"

    def __init__(self, log: AllocationLog, step: Step, recipe: Recipe, ranks: int = 1,
                 rank: int = 0):
        self.log, self.step, self.recipe = log, step, recipe
        self.ranks, self.rank = ranks, rank
        self.sizes = [prod(shape) for _, shape in step.tensors]
        self.elements = sum(self.sizes)
        self.gradient_bytes = recipe.gradients

    @property
    def owned(self) -> list[int]:
        """Elements of each tensor that this rank's optimizer updates."""
        return self.sizes

    def build(self):
        """Allocates what is there before the first step."""
        self.log.add(parameters=self.elements * self.recipe.parameters + self.step.buffers)

    def optimizer_state(self) -> float:
        """Bytes of moments and master weights."""
        return sum(self.owned) * self.recipe.optimizer_state

    def accumulated(self):
        """Allocates the gradients of earlier micro-batches; then autograd adds each new one to them
        at once. Under DDP they are unsharded, whether they were reduced or not."""
        if self.accumulation != "none" and self.keep_gradients:
            self.log.add(gradients=self.elements * self.gradient_bytes)
            self.keep_gradients = False

    def before_forward(self, unit):
        """A unit is about to run: a block's index, or "root", the full model."""

    def after_forward(self, unit):
        """A unit has run."""

    def before_backward(self, unit):
        """A unit's backward begins."""

    def after_backward(self, unit):
        """A unit's gradients are all there; the root's, when backward is over."""


class DDP(Plain):
    """Torch's DistributedDataParallel: a copy of all gradients in buckets, unless gradients are
    views of them (gradient_as_bucket_view)."""

    bucket_view = False

    def build(self):
        super().build()
        self.keep_gradients = not self.bucket_view
        category = "gradients" if self.bucket_view else "buffers"
        self.log.add(**{category: self.elements * self.recipe.gradients})


class ZeRO1(DDP):
    """DDP with the optimizer state sharded over the ranks."""

    @property
    def owned(self) -> list[int]:
        return [ceil(size / self.ranks) for size in self.sizes]


class ZeRO2(ZeRO1):
    """Gradients too are sharded: those that are there when a unit's backward ends are reduced in a
    bucket, then freed."""

    def build(self):
        Plain.build(self)
        self._kept = 0

    def accumulated(self):
        if self.accumulation != "none":
            raise ValueError("accumulation is not modelled for ZeRO-2: choose DDP, ZeRO-1 or FSDP")

    def after_backward(self, unit):
        size = self.log.held("gradients") - self._kept
        self._kept += size / self.ranks
        self.log.allocate("bucket", size)
        self.log.add(gradients=-size)
        self.log.add(gradients=size / self.ranks)
        self.log.free("bucket")


class FSDP(Plain):
    """FSDP2: everything sharded; a unit's parameters are gathered for its forward and backward.

    Gathering needs the parameters twice, temporarily: as all-gather's output, rank by rank, and
    copied out, parameter by parameter. In forward the first stays until the next unit's copy is
    done; in backward the previous unit is prefetched. ZeRO-3 is the same. Over gloo each
    collective allocates one more copy while it runs: all-gather of all outputs, reduce-scatter of
    its input (ProcessGroupGloo.cpp).
    """

    reshard = True
    copies = False
    wrap = "blocks"
    flat = False  # FSDP1 gathers straight into its flat parameter: no copy

    def __init__(self, *args):
        super().__init__(*args)
        self.units = fsdp_units(self.step.tensors, self.wrap)
        self.padded = {unit: sum(padded(shape, self.ranks) for shape in shapes)
                       for unit, shapes in self.units.items()}
        self.order = [unit for unit in self.units if unit != "root"] + ["root"]
        self.gradient_bytes = self.recipe.compute
        self._gathered = set()

    @property
    def owned(self) -> list[int]:
        return [owned(shape, self.rank, self.ranks) for _, shape in self.step.tensors]

    def build(self):
        self.log.add(parameters=sum(self.padded.values()) * self.recipe.parameters
                     + self.step.buffers)

    def accumulated(self):
        """Gradients of earlier micro-batches: shards where they were reduced, else full ones."""
        if self.accumulation == "sync":
            self.log.add(gradients=sum(self.padded.values()) * self.recipe.gradients)
        elif self.accumulation == "no sync":
            self.log.add(gradients=self.elements * self.recipe.gradients)
            self.keep_gradients = self.recipe.mixed  # bf16: added when all are there

    def _whole(self, unit) -> float:
        return self.padded[unit] * self.ranks * self.recipe.compute

    def _gather(self, unit):
        """All-gather's output; in mixed precision from a copy in fewer bytes."""
        if unit in self._gathered or self.log.holds((unit, "whole")):
            return
        if self.recipe.mixed:
            self.log.allocate("low", self.padded[unit] * self.recipe.compute)
        self.log.allocate((unit, "gathered"), self._whole(unit))
        self._gathered.add(unit)
        self._copied(self._whole(unit))
        self.log.free("low")

    def _copied(self, size):
        if self.copies:
            self.log.temporary(size)

    def _copy_out(self, unit):
        if unit not in self._gathered or self.log.holds((unit, "whole")):
            return
        if self.flat:
            self._drop_gathered(unit)
        self.log.allocate((unit, "whole"), self._whole(unit))

    def _drop_gathered(self, *units):
        self.log.free(*((unit, "gathered") for unit in units))
        self._gathered.difference_update(units)

    def before_forward(self, unit):
        if unit not in self.units:
            return
        self._gather(unit)
        self._drop_gathered(*(self._gathered - {unit}))
        self._copy_out(unit)

    def after_forward(self, unit):
        if unit == "root":
            self._drop_gathered(*self._gathered)
        elif unit in self.units and self.reshard:
            self.log.free((unit, "whole"))

    def before_backward(self, unit):
        if unit not in self.units:
            return
        self._gather(unit)
        self._copy_out(unit)
        self._drop_gathered(unit)
        place = self.order.index(unit)
        if place > 0:
            self._gather(self.order[place - 1])

    def after_backward(self, unit):
        if unit not in self.units:
            return
        reduced = self.padded[unit] * self.recipe.gradients
        sizes = [prod(shape) for shape in self.units[unit]]
        made = [size * self.recipe.compute for size in sizes]
        if self.accumulation == "no sync":
            self.log.add(gradients=-sum(made) * self.keep_gradients)
            made = [size * self.recipe.gradients for size in sizes]
        # The input of the previous unit's reduce-scatter stays allocated until this one begins.
        self.log.free((unit, "whole"), "reducing")
        # (ranks, padded) elements in the dtype of the reduction; gradients are copied into it and
        # freed.
        self.log.allocate("reducing", reduced * self.ranks)
        self.log.add(gradients=-sum(made[:-1]))
        self.log.add(gradients=reduced)
        self._copied(reduced * self.ranks)
        self.log.add(gradients=-made[-1])  # foreach_reduce's loop variable held the last one
        if self.accumulation == "sync":
            self.log.add(gradients=-reduced)  # added to the shard that was there
        if unit == "root":
            self.log.free("reducing")


STRATEGIES = {"plain": Plain, "ddp": DDP, "zero1": ZeRO1, "zero2": ZeRO2, "zero3": FSDP,
              "fsdp2": FSDP, "fsdp1": FSDP}

"""What a parallel strategy adds to the tape: buckets, shards, gathered parameters.

Sources: torch 2.13, nn/parallel/distributed.py and csrc/distributed/c10d/reducer.cpp (buckets are
allocated when DDP is built and stay); distributed/fsdp/_fully_shard/_fsdp_param_group.py
(wait_for_unshard, post_backward) and _fsdp_collectives.py; Rajbhandari et al., "ZeRO", section 5.
"""

from math import ceil, prod

from labs.predictions.memory_shards import fsdp_units, owned, padded
from labs.predictions.parameters import buffer_bytes, units


class Plain:
    """One rank, or as much of a rank as any strategy has: everything whole."""

    def __init__(self, tape, shape, recipe, ranks=1, rank=0):
        self.tape, self.shape, self.recipe = tape, shape, recipe
        self.ranks, self.rank = ranks, rank
        self.tensors = [size for unit in units(shape).values() for size in unit.values()]
        self.elements = sum(map(prod, self.tensors))
        tape.gradient = self.gradient

    @property
    def owned(self) -> list:
        """Elements of each tensor that this rank's optimizer updates."""
        return [prod(size) for size in self.tensors]

    def build(self):
        self.tape.add(parameters=self.elements * self.recipe.parameters + buffer_bytes(self.shape))

    def gradient(self, elements):
        self.tape.add(gradients=elements * self.recipe.gradients)

    def optimizer_state(self) -> float:
        """Bytes; AdamW counts its steps in one fp32 number per tensor, on the CPU."""
        return sum(self.owned) * self.recipe.optimizer_state

    def before_forward(self, unit):
        """A unit is about to run: "root" is the whole model."""

    def after_forward(self, unit):
        """A unit has run."""

    def before_backward(self, unit):
        """A unit's backward begins."""

    def after_backward(self, unit):
        """A unit's gradients are all there."""

    def finish(self):
        """Backward is over."""


class DDP(Plain):
    """Torch's DistributedDataParallel: a copy of all gradients in buckets, unless gradients are
    views of them (gradient_as_bucket_view)."""

    bucket_view = False

    def build(self):
        super().build()
        category = "gradients" if self.bucket_view else "buffers"
        self.tape.add(**{category: self.elements * self.recipe.gradients})

    def gradient(self, elements):
        if not self.bucket_view:
            return super().gradient(elements)
        self.tape.temporary(elements * self.recipe.gradients, "gradients")


class ZeRO1(DDP):
    """DDP with the optimizer state divided among the ranks."""

    @property
    def owned(self) -> list:
        return [ceil(prod(size) / self.ranks) for size in self.tensors]


class ZeRO2(ZeRO1):
    """Gradients too are divided: a unit's are reduced as soon as they are there, then freed."""

    def build(self):
        Plain.build(self)
        self.waiting = 0

    def gradient(self, elements):
        self.waiting += elements
        Plain.gradient(self, elements)

    def after_backward(self, unit):
        size, self.waiting = self.waiting * self.recipe.gradients, 0
        self.tape.make("buffers", bucket=size)
        self.tape.add(gradients=-size)
        self.tape.add(gradients=size / self.ranks)
        self.tape.free("bucket")

    def finish(self):
        self.after_backward("root")


class FSDP(Plain):
    """FSDP2: everything divided; a unit's parameters are gathered for its forward and backward.

    Gathering needs the parameters twice for a moment: as all-gather's output, rank by rank, and
    copied out, parameter by parameter. In forward the first stays until the next unit's copy is
    done; in backward the unit before is gathered ahead. ZeRO-3 is the same. Over gloo each
    collective holds one more copy while it runs: all-gather of all outputs, reduce-scatter of its
    input (ProcessGroupGloo.cpp).
    """

    reshard = True
    copies = False
    wrap = "blocks"
    flat = False  # FSDP1 gathers straight into its flat parameter: no copy

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.units = fsdp_units(units(self.shape), self.wrap)
        self.padded = {unit: sum(padded(size, self.ranks) for size in sizes)
                       for unit, sizes in self.units.items()}
        self.order = [unit for unit in self.units if unit != "root"] + ["root"]
        self.forward = True

    @property
    def owned(self) -> list:
        return [owned(size, self.rank, self.ranks) for size in self.tensors]

    def build(self):
        self.tape.add(parameters=sum(self.padded.values()) * self.recipe.parameters
                      + buffer_bytes(self.shape))

    def _whole(self, unit) -> float:
        return self.padded[unit] * self.ranks * self.recipe.compute

    def gradient(self, elements):
        self.tape.add(gradients=elements * self.recipe.compute)

    def _gather(self, unit):
        """All-gather's output; in mixed precision from a copy in fewer bytes."""
        if (unit, "gathered") in self.tape.live or (unit, "whole") in self.tape.live:
            return
        if self.recipe.mixed:
            self.tape.make("buffers", low=self.padded[unit] * self.recipe.compute)
        self.tape.make("buffers", **{"g": self._whole(unit)})
        self.tape.rename("g", (unit, "gathered"))
        self._copied(self._whole(unit))
        if self.recipe.mixed:
            self.tape.free("low")

    def _copied(self, size):
        if self.copies:
            self.tape.temporary(size, "buffers")

    def _copy_out(self, unit):
        if (unit, "gathered") not in self.tape.live or (unit, "whole") in self.tape.live:
            return
        if self.flat:
            return self.tape.rename((unit, "gathered"), (unit, "whole"))
        self.tape.make("buffers", w=self._whole(unit))
        self.tape.rename("w", (unit, "whole"))

    def before_forward(self, unit):
        if unit not in self.units:
            return
        self._gather(unit)
        for other in self.order:
            if other != unit:
                self.tape.drop((other, "gathered"))
        self._copy_out(unit)

    def after_forward(self, unit):
        if unit == "root":
            for other in self.order:
                self.tape.drop((other, "gathered"))
        elif unit in self.units and self.reshard:
            self.tape.drop((unit, "whole"))

    def before_backward(self, unit):
        if unit not in self.units:
            return
        self._gather(unit)
        self._copy_out(unit)
        self.tape.drop((unit, "gathered"))
        place = self.order.index(unit)
        if place > 0:
            self._gather(self.order[place - 1])

    def after_backward(self, unit):
        if unit not in self.units:
            return
        reduced = self.padded[unit] * self.recipe.gradients
        self.tape.drop((unit, "whole"))
        self.tape.drop("reducing")
        self.tape.make("buffers", reducing=reduced * self.ranks)
        made = [prod(size) * self.recipe.compute for size in self.units[unit]]
        self.tape.add(gradients=-sum(made[:-1]))
        self.tape.add(gradients=reduced)
        self._copied(reduced * self.ranks)
        self.tape.add(gradients=-made[-1])  # foreach_reduce's loop variable held the last one

    def finish(self):
        self.after_backward("root")
        self.tape.free("reducing")


STRATEGIES = {"plain": Plain, "ddp": DDP, "zero1": ZeRO1, "zero2": ZeRO2, "zero3": FSDP,
              "fsdp2": FSDP, "fsdp1": FSDP}

"""Exercise 9.11: all experts of a rank in a fixed number of operations, without a loop in Python,
and without a copy of a matrix for each token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labs.checks.generator import new_generator
from labs.checks.on_ranks import close
from labs.checks.verdicts import Wrong, check, kind_of
from labs.training.mixtures import gated_mlp

HIDDEN, FFN = 16, 24  # multiples of 16 bytes in fp32 and bf16: grouped_mm needs rows of these
MORE_ELEMENTS = 1.5  # times the largest tensor that is needed
_HINTS = {"strides should be multiple of 16 bytes": "grouped_mm takes the stacked matrices as they "
                                                    "lie: transpose(1, 2) is a view.",
          "Invalid strides/sizes": "grouped_mm refuses gradients with a stride of 0.",
          "Offsets tensor must be": "offs: int32, where each expert's rows end."}


@dataclass(frozen=True)
class Case:
    """Experts with so many copies each, in a dtype; words: how a verdict names it."""

    words: str
    counts: list[int]
    dtype: torch.dtype = torch.float32

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """copies (n, HIDDEN), gate_up (experts, 2 · FFN, HIDDEN), down (experts, HIDDEN, FFN)."""
        experts = len(self.counts)
        shapes = (sum(self.counts), HIDDEN), (experts, 2 * FFN, HIDDEN), (experts, HIDDEN, FFN)
        return tuple((torch.randn(shape) / shape[-1] ** 0.5).to(self.dtype) for shape in shapes)


@check("9.11", _HINTS)
def check_grouped_experts(GroupedExperts: Callable):
    """GroupedExperts(gate_up, down): a module whose forward(copies, counts) returns what the loop
    over experts returns, in as many operations for 16 experts as for 4."""
    for case in _cases():
        _judge(GroupedExperts, case)
    few, many = (_operations(GroupedExperts, [8] * experts) for experts in (4, 16))
    # Invariant: one kernel for all experts. A loop issues one for each; a GPU waits for the CPU.
    if many.calls > few.calls:
        raise Wrong(f"forward issues {few.calls} operations for 4 experts and {many.calls} for 16",
                    "F.grouped_mm multiplies the blocks of all experts in one call; or pad the "
                    "blocks to the largest, and use torch.bmm.", code="loops_over_experts")
    _judge_elements(many)
    return ("outputs and gradients are those of the loop, in bf16 too, where an expert has no "
            "copy, and where none has one; 16 experts take as many operations as 4, and no matrix "
            "is copied for each token")


def _cases() -> list[Case]:
    rng = new_generator()
    uneven = [rng.randint(1, 9) for _ in range(5)]
    return [Case("uneven counts", uneven), Case("one expert", [7]),
            Case("experts without a copy", [0, 6, 0, 0, 3, 0]),
            Case("all copies to one", [0, 0, 9]), Case("no copy at all", [0, 0, 0, 0]),
            Case("bf16", [5, 0, 8, 2], torch.bfloat16)]


def _judge(GroupedExperts, case):
    copies, gate_up, down = case.tensors()
    given = copies.clone().requires_grad_()
    experts = GroupedExperts(gate_up.clone(), down.clone())
    counts = list(case.counts)
    outputs = experts(given, counts)
    if not isinstance(outputs, torch.Tensor):
        raise Wrong(f"{case.words}: forward returned {kind_of(outputs)}", code="wrong_type")
    if counts != case.counts or not torch.equal(given.detach(), copies):
        raise Wrong(f"{case.words}: forward changed its input", "Write into tensors of your own.",
                    code="input_changed")
    leaves = [tensor.clone().float().requires_grad_() for tensor in (copies, gate_up, down)]
    parts = leaves[0].split(case.counts)
    want = torch.cat([gated_mlp(*each) for each in zip(parts, *leaves[1:], strict=True)])
    if outputs.shape != want.shape or outputs.dtype != case.dtype:
        raise Wrong(f"{case.words}: the outputs are {list(outputs.shape)} of {outputs.dtype}, not "
                    f"{list(want.shape)} of {case.dtype}", code="wrong_shape")
    if not _alike(outputs, want, case):
        raise _wrong_outputs(case, outputs, leaves, want)
    upstream = torch.randn_like(want)
    (want * upstream).sum().backward()
    if not outputs.requires_grad:
        raise Wrong(f"{case.words}: the outputs need no gradient", "Use self.gate_up and self.down "
                    "themselves: .data and .detach() have no graph.", code="gradient_missing")
    (outputs * upstream.to(case.dtype)).sum().backward()
    for name, tensor, leaf in zip(("copies", "gate_up", "down"),
                                  (given, experts.gate_up, experts.down), leaves, strict=True):
        if tensor.grad is None:
            raise Wrong(f"{case.words}: {name} gets no gradient", "Use self.gate_up and self.down "
                        "themselves: .data and .detach() have no graph.", code="gradient_missing")
        if not _alike(tensor.grad, leaf.grad, case):
            raise Wrong(f"{case.words}: outputs are right, the gradient of {name} is not",
                        code="wrong_gradient")


def _alike(got, want, case) -> bool:
    if case.dtype == torch.float32:
        return want.numel() == 0 or close(got, want)
    # bf16 has 8 bits of precision, and three products follow one another.
    return bool((got.float() - want).norm() <= 0.02 * want.norm())


def _wrong_outputs(case, outputs, leaves, want) -> Wrong:
    """What explains the outputs, where a known mistake does."""
    copies, gate_up, down = (leaf.detach() for leaf in leaves)
    swapped = torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1)

    def outputs_of(counts, gate_up, down):
        return torch.cat([gated_mlp(*each) for each in zip(
            copies.split(counts), gate_up, down, strict=True)])

    right = (outputs.float() - want).abs().amax(1) <= 1e-4 + 0.02 * want.abs().amax(1)
    if _alike(outputs, outputs_of(case.counts, swapped, down), case):
        return Wrong(f"{case.words}: gate and up are exchanged", "The first half of gate_up is the "
                     "gate, which goes through silu.", code="gate_and_up")
    if _alike(outputs, outputs_of(case.counts[::-1], gate_up.flip(0), down.flip(0)), case):
        return Wrong(f"{case.words}: the experts come in the opposite order", code="wrong_order")
    if right.any():
        return Wrong(f"{case.words}: some rows are those of the loop, others are not",
                     "Each expert has as many rows as counts says, also where they are many or "
                     "none; offs says where its rows end.", code="rows_of_other_experts")
    return Wrong(f"{case.words}: the outputs are not those of the loop over experts",
                 "down · (silu(gate · x) · (up · x)), with the matrices of each row's expert.",
                 code="wrong_outputs")


class _Operations(TorchDispatchMode):
    """Counts torch's operations inside the block, and the elements of their largest result."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest, self.name = 0, 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            # A view of a parameter takes no memory.
            if isinstance(tensor, torch.Tensor) and not tensor._is_view() and (
                    tensor.numel() > self.largest):
                self.largest, self.name = tensor.numel(), func.overloadpacket.__name__
        return result


def _operations(GroupedExperts, counts) -> _Operations:
    copies, gate_up, down = Case("", counts).tensors()
    experts = GroupedExperts(gate_up, down)
    with _Operations() as operations:
        experts(copies, counts)
    return operations


def _judge_elements(operations):
    """16 experts with 8 copies each: nothing larger than the stacked matrices is needed."""
    experts, copies = 16, 16 * 8
    needed = max(experts * 2 * FFN * HIDDEN, copies * 2 * FFN)
    # Catches a matrix gathered for each copy, and all experts computed for all copies.
    if operations.largest > MORE_ELEMENTS * needed:
        raise Wrong(f"forward makes a tensor of {operations.largest:,} elements "
                    f"({operations.name}); the matrices of all {experts} experts are {needed:,}",
                    "gate_up[expert of each copy] is a matrix for each copy, and all experts for "
                    "all copies are E times the work.", code="too_large")

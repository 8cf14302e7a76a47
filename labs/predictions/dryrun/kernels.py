"""What CPU kernels allocate inside one operator: a fake kernel makes the results, and nothing else.

Each rule was found by comparing the allocator's events of a real step with those of a fake one, and
read in the kernel that it names (torch 2.13, aten/src/ATen/native).
"""

from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

aten, c10d = torch.ops.aten, torch.ops.c10d


@dataclass(frozen=True)
class Scratch:
    """What an operator allocates inside: the name of its rule, the dimensions that the rule takes,
    and the bytes of an element."""

    rule: str
    sizes: tuple[int, ...]
    element: int

    def nbytes(self, threads: int) -> int:
        """Bytes at the operator's peak, without its arguments and results, on so many threads."""
        return _RULES[self.rule](*self.sizes, self.element, threads)


def scratch(func, args) -> Scratch | None:
    """The scratch space of an operator called with these arguments; None where it takes none."""
    rule, position = _OPERATORS.get(func.overloadpacket, (None, 0))
    if rule is None:
        return None
    if func.namespace == "c10d":
        return Scratch(rule, (sum(map(_nbytes, tree_leaves(args[position]))),), 1)
    query, key = args[position:position + 2]
    if rule == "layer_norm_backward":
        return Scratch(rule, (query.shape[-1],), query.element_size())
    return Scratch(rule, (query.shape[2], key.shape[2], query.shape[3]), query.element_size())


def _nbytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flash_forward(length, keys, width, element, threads):
    """cpu/FlashAttentionKernel.cpp: scores, row maxima and sums, and output of one tile."""
    rows, columns = _tile(length, keys)
    floats = rows * columns + 2 * rows + rows * width
    return threads * (4 * floats + _reduced(element) * rows * columns)


def _flash_backward(length, keys, width, element, threads):
    """cpu/FlashAttentionKernel.cpp: scores and their gradient, and row sums of one tile."""
    rows, columns = _tile(length, keys)
    return threads * (2 * rows * columns * (4 + _reduced(element)) + 4 * rows)


def _tile(length, keys):
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, keys)


def _reduced(element) -> int:
    """Bytes per number of the second buffer that types shorter than float need."""
    return element if element < 4 else 0


def _layer_norm_backward(width, element, threads):
    """layer_norm.cpp: one row of weight's and bias's gradient per thread."""
    return 2 * threads * width * element


def _copy(nbytes, element, threads):
    """ProcessGroupGloo.cpp: allgather lays all outputs flat before each goes to its place,
    reduce_scatter all-reduces a copy of its input in place."""
    return nbytes


_RULES = {"flash_forward": _flash_forward, "flash_backward": _flash_backward,
          "layer_norm_backward": _layer_norm_backward, "copy": _copy}
_OPERATORS = {  # operator -> (rule, position of the argument that it looks at)
    c10d._allgather_base_: ("copy", 0),
    c10d.allgather_: ("copy", 0),
    c10d._reduce_scatter_base_: ("copy", 1),
    c10d.reduce_scatter_: ("copy", 1),
    aten._scaled_dot_product_flash_attention_for_cpu: ("flash_forward", 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: ("flash_backward", 1),
    aten.native_layer_norm_backward: ("layer_norm_backward", 0),
}

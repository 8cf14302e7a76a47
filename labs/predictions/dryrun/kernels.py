"""What CPU kernels allocate inside one operator: a fake kernel makes the results, and nothing else.

Each rule was found by laying the allocator's events of a real step beside those of a fake one, and
read in the kernel named beside it (torch 2.13, aten/src/ATen/native).
"""

import torch

aten = torch.ops.aten


def temporaries(func, args, threads: int) -> int:
    """Bytes that the operator holds at its peak beside its arguments and results."""
    rule = _RULES.get(func.overloadpacket)
    return rule(args, threads) if rule else 0


def _flash_forward(args, threads):
    """cpu/FlashAttentionKernel.cpp: scores, row maxima and sums, and output of one tile."""
    query, key = args[:2]
    rows, columns = _tile(query, key)
    floats = rows * columns + 2 * rows + rows * query.shape[-1]
    return threads * (4 * floats + _reduced(query) * rows * columns)


def _flash_backward(args, threads):
    """cpu/FlashAttentionKernel.cpp: scores and their gradient, and row sums of one tile."""
    query, key = args[1:3]
    rows, columns = _tile(query, key)
    return threads * (2 * rows * columns * (4 + _reduced(query)) + 4 * rows)


def _tile(query, key):
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


def _reduced(tensor) -> int:
    """Bytes per number of the second buffer that types shorter than float need."""
    return tensor.element_size() if tensor.element_size() < 4 else 0


def _layer_norm_backward(args, threads):
    """layer_norm.cpp: one row of weight's and bias's gradient per thread."""
    return 2 * threads * args[1].shape[-1] * args[1].element_size()


def _gloo_all_gather(args, threads):
    """ProcessGroupGloo.cpp, allgather: all outputs flat, before each goes to its place."""
    return _bytes(args[0])


def _gloo_reduce_scatter(args, threads):
    """ProcessGroupGloo.cpp, reduce_scatter: a copy of the input, all-reduced in place."""
    return _bytes(args[1])


def _bytes(found) -> int:
    if isinstance(found, torch.Tensor):
        return found.numel() * found.element_size()
    return sum(_bytes(part) for part in found)


c10d = torch.ops.c10d
_RULES = {
    c10d._allgather_base_: _gloo_all_gather,
    c10d.allgather_: _gloo_all_gather,
    c10d._reduce_scatter_base_: _gloo_reduce_scatter,
    c10d.reduce_scatter_: _gloo_reduce_scatter,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    aten.native_layer_norm_backward: _layer_norm_backward,
}

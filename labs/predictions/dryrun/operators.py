"""Which operators allocate nothing but their results on a CPU, whatever their sizes.

The names were found under the allocator's events; tests/predictions/test_operators.py repeats that
at several sizes, types and numbers of threads. Operators without an entry are tried (probe.py).
"""

import torch

_NAMESPACES = ("aten", "prims", "prim", "c10d", "_c10d_functional", "fsdp", "profiler")
_FACTORIES = {
    "arange", "bernoulli_", "empty", "empty_like", "empty_permuted", "empty_strided",
    "exponential_", "eye", "fill_", "full", "full_like", "linspace", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal_", "ones", "ones_like",
    "rand", "rand_like", "randn", "randn_like", "scalar_tensor", "uniform_", "zero_", "zeros",
    "zeros_like"}
_OF_ANY_STRIDES = {"_to_copy", "_unsafe_view", "clone", "detach_", "lift_fresh",
                   "resize_", "_local_scalar_dense", "item", "equal"}
_OF_CONTIGUOUS = {
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "amax",
    "amin", "cat", "constant_pad_nd", "copy_", "embedding", "embedding_dense_backward", "gelu",
    "gelu_backward", "index", "nll_loss_backward", "nll_loss_forward", "select_backward",
    "slice_backward", "stack", "sum", "tril", "triu", "linalg_vector_norm", "native_layer_norm"}
_OF_CONTIGUOUS_FP32 = {"gather", "mean"}  # of shorter types they make copies
_OF_SEVERAL_KERNELS = {"float_power", "float_power_", "isfinite", "isinf", "ldexp", "ldexp_",
                       "rrelu", "rrelu_"}
_PRODUCTS = {"addmm", "baddbmm", "bmm", "mm"}


def allocates_results_only(func, args, kwargs) -> bool:
    """Whether an operator, called with these arguments, is known to allocate only its results: a
    view, a factory, a copy; a pointwise operator on numbers of one type; some others on contiguous
    tensors; products of matrices in fp32, which MKL takes as they lie."""
    if func.namespace not in _NAMESPACES:
        return False
    name = func.overloadpacket.__name__
    if func.namespace not in ("aten", "prims") or _is_view(func) or name in _FACTORIES:
        return True
    tensors = [leaf for leaf in _flat((*args, *kwargs.values())) if leaf.dim()]
    if name in _OF_ANY_STRIDES:
        return True
    if name in _PRODUCTS:
        return all(t.dtype is torch.float32 and _is_matrix(t) for t in tensors)
    if name in _OF_CONTIGUOUS:
        return _one_type(tensors) and all(t.is_contiguous() for t in tensors)
    if name in _OF_CONTIGUOUS_FP32:
        return all(t.is_contiguous() and t.dtype in (torch.float32, torch.int64) for t in tensors)
    if name in _OF_SEVERAL_KERNELS:
        return False
    return torch.Tag.pointwise in func.tags and _one_type(tensors)


def _flat(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _flat(value)
    return found


def _is_view(func) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write
                                 for r in returns)


def _one_type(tensors) -> bool:
    """Whether floating-point numbers are of one type: else a kernel makes copies."""
    floating = {t.dtype for t in tensors if t.is_floating_point()}
    others = {t.dtype for t in tensors if not t.is_floating_point()}
    return len(floating) <= 1 and (not floating or others <= {torch.bool, torch.int64})


def _is_matrix(tensor) -> bool:
    """Whether the matrices of a product lie dense, by rows or by columns."""
    *batch, rows, columns = tensor.shape if tensor.dim() > 1 else (1, *tensor.shape)
    *outer, down, along = tensor.stride() if tensor.dim() > 1 else (0, *tensor.stride())
    dense = along == 1 and down in (columns, 0) or down == 1 and along == rows or rows == 1
    return dense and (not batch or outer[0] == rows * columns or batch[0] == 1)

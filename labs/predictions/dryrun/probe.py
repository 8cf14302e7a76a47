"""What an operator really allocates: it runs once with real tensors, under the allocator's events.

A fake kernel makes the results alone. Many real ones also take scratch space for themselves, and
some make results of other sizes or strides: a convolution's, an LSTM's, a sort's. Which do so, and
how much, depends on the library, the processor and the sizes, so it is measured, not listed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

MOST_BYTES = 2**28  # of arguments and results; an operator with more is not tried
_SMALL = 2**24  # bytes of arguments; an operator with more is run only once


@dataclass(frozen=True)
class Layout:
    """Shape, strides and type of one result. hidden: its bytes, where a library keeps it in a form
    of its own, so that it has neither."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    hidden: int = 0


@dataclass(frozen=True)
class Probed:
    """scratch: bytes at the operator's highest moment in addition to its arguments and results.
    layouts: of its results; None for one that is no tensor."""

    scratch: int
    layouts: tuple[Layout | None, ...]


class Probe:
    """Runs operators on `threads` threads; each once for the same kinds and sizes of arguments."""

    def __init__(self, threads: int):
        self._threads = threads

    def __call__(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> Probed | None:
        """What func(*args, **kwargs) allocates, given fake tensors; None where it was not tried
        because it is too large, or failed on the numbers that it was tried with."""
        key = (func, self._threads, _described((args, kwargs)))
        if func.namespace != "aten":
            return None
        if key not in _PROBED:
            nbytes = sum(_nbytes(leaf) for leaf in tree_leaves((args, kwargs, result)))
            small = nbytes <= MOST_BYTES
            _PROBED[key] = _run(func, args, kwargs, self._threads) if small else None
        return _PROBED[key]


_PROBED = {}


def _nbytes(leaf) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def _described(arguments) -> str:
    def describe(leaf):
        if isinstance(leaf, torch.Tensor):
            return (*leaf.shape, leaf.stride(), leaf.dtype, leaf.device.type)
        return leaf
    return repr(tree_map(describe, arguments))


def _run(func, args, kwargs, threads) -> Probed | None:
    with unset_fake_temporarily():  # in the grad mode of the caller, on which some depend
        before, state = torch.get_num_threads(), torch.default_generator.get_state()
        torch.set_num_threads(threads)
        try:
            args, kwargs = tree_map(_real, (args, kwargs))
            return _measured(func, _REAL_ARGUMENTS.get(func, _unchanged)(*args), kwargs)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            return None
        finally:
            torch.set_num_threads(before)
            torch.default_generator.set_state(state)


def _unchanged(*args):
    return args


def _real(leaf):
    """A real tensor like a fake one: numbers between 0 and 1, and index 0, which always exists."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # Elements of memory that a strided tensor spans: those of an expanded one (stride 0) count
    # once.
    extent = 1 + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
    if leaf.is_floating_point() or leaf.is_complex():
        numbers = torch.rand(max(extent, 1), dtype=leaf.dtype)
    else:
        numbers = torch.zeros(max(extent, 1), dtype=leaf.dtype)
    return numbers.as_strided(leaf.shape, leaf.stride())


def _measured(func, args, kwargs) -> Probed:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr
    from torch.profiler import ProfilerActivity, profile

    if sum(map(_nbytes, tree_leaves((args, kwargs)))) < _SMALL:
        func(*args, **kwargs)  # libraries keep what they make for the first call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = func(*args, **kwargs)
    held = most = 0
    for event in sorted((e for e in recorded.profiler.kineto_results.events()
                         if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    leaves = tree_leaves(result)
    seen = sum(leaf.untyped_storage().nbytes() for leaf in leaves if _is_strided(leaf))
    return Probed(most - max(0, held), tuple(_layout(leaf, held - seen) for leaf in leaves))


def _is_strided(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _layout(leaf, hidden) -> Layout | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    if not _is_strided(leaf):
        return Layout((), (), leaf.dtype, hidden)
    return Layout(tuple(leaf.shape), leaf.stride(), leaf.dtype)


def _with_workspace(*args) -> tuple:
    """Arguments of an LSTM layer's backward, with the workspace that a real forward made: with any
    other one oneDNN writes outside of it."""
    inputs, (reverse, mode, hidden, layers, biases, train, both_ways, sizes, batch_first, _) = (
        args[:7], args[13:])
    with torch.enable_grad():
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
            *inputs, reverse, sizes, mode, hidden, layers, biases, both_ways, batch_first, train)
    return *args[:-1], workspace


_REAL_ARGUMENTS = {torch.ops.aten.mkldnn_rnn_layer_backward.default: _with_workspace}

"""DDP's C++ reducer under fake tensors: its all-reduce and its rebuilt buckets are replaced."""

import unittest.mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.predictions.dryrun.tracker import Tracker

_FIRST_BUCKET = 1 << 20  # bytes; dist._DEFAULT_FIRST_BUCKET_BYTES, where there is one


def prepare(module: nn.Module, order: list[nn.Parameter], tracker: Tracker) -> None:
    """Lets every DDP inside train with fake tensors. order: fills with parameters as their
    gradients are computed."""
    for inner in module.modules():
        if isinstance(inner, DistributedDataParallel):
            complete_all_reduces(inner)
            inner.reducer = _Reducer(inner, order, tracker)


def complete_all_reduces(module: nn.Module) -> None:
    """Registers a hook that all-reduces as DDP does. The fake process group's own future never gets
    a result, and the reducer would wait for it."""
    if not isinstance(module, DistributedDataParallel):
        return
    if module._comm_hooks:
        name = getattr(module._comm_hooks[0][0], "__qualname__", "a function")
        raise RuntimeError(f"DDP's communication hook {name} waits for other ranks, and in a dry "
                           "run there are none: leave it out, or measure on real ranks instead")
    module.register_comm_hook(None, _all_reduce)


def _all_reduce(state, bucket) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer(), async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _Reducer:
    """DDP's reducer, which rebuilds its buckets without looking at numbers."""

    def __init__(self, module, order, tracker):
        self._module, self._order, self._tracker = module, order, tracker
        self._reducer, self._rebuilt = module.reducer, False

    def __getattr__(self, name):
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        """Allocates the buckets that DDP allocates before the forward after its first reduction,
        from the order in which gradients were computed: its own code reads that order from a
        tensor, and a fake one has no numbers."""
        module = self._module
        looks_for_unused = module.find_unused_parameters and not module.static_graph
        if not self._order or looks_for_unused or self._rebuilt:
            return False
        parameters = self._reduced()
        self._reducer = module.reducer = module.logger = None  # the buckets of the first step go
        with (self._tracker.labelled("buffers"),
              unittest.mock.patch.object(dist, "_compute_bucket_assignment_by_size",
                                         _reversed(module.bucket_bytes_cap))):
            module._ddp_init_helper(parameters, [False] * len(parameters), {}, module.static_graph)
        # complete_all_reduces refuses a module that has a hook; the new reducer has none yet.
        module._comm_hooks.clear()
        complete_all_reduces(module)
        self._reducer, module.reducer, self._rebuilt = module.reducer, self, True
        return True

    def _reduced(self) -> list[nn.Parameter]:
        """The module's parameters in the order of their gradients. Raises RuntimeError where one
        got none, as DDP itself does in its second step."""
        names = {id(p): name for name, p in self._module.module.named_parameters()}
        trained = [id(p) for p in self._module._build_params_for_reducer()[0]]
        parameters = [p for p in dict.fromkeys(self._order) if id(p) in set(trained)]
        missing = set(trained) - {id(p) for p in parameters}
        if missing and not self._module.static_graph:
            raise RuntimeError(
                f"Parameter {names[missing.pop()]!r} got no gradient in the first step, and DDP "
                "would stop in the second: give find_unused_parameters=True")
        return parameters


def _reversed(cap):
    """The real assignment in reverse: DDP reverses it again, since it expects forward order."""
    assign = dist._compute_bucket_assignment_by_size
    first = getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST_BUCKET)

    def assigned(parameters, limits, sparse):
        indices, limits = assign(parameters, [first, cap], sparse)
        return indices[::-1], limits[::-1]
    return assigned


def bucket_sizes(gradients: list[int], cap: int) -> list[int]:
    """Bytes of DDP's buckets after the first step. gradients: bytes of each, in the order of their
    computation. A bucket closes when it reaches its limit, the first at 1 MiB, the others at `cap`
    (torch's reducer.cpp, compute_bucket_assignment_by_size)."""
    sizes, filled = [], 0
    for size in gradients:
        filled += size
        if filled >= (cap if sizes else _FIRST_BUCKET):
            sizes.append(filled)
            filled = 0
    return sizes + [filled] if filled else sizes

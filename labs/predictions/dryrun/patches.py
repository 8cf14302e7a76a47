"""What a dry run replaces in torch: functions that look at numbers, build meshes, or have a fake
kernel for GPUs only. Each has a real counterpart that allocates the same in a training step."""

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed
from torch.utils._pytree import tree_map

_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_concatenate", "_unflatten")


@contextlib.contextmanager
def patched(tracker) -> Iterator[None]:
    """Applies all of them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard

    def real(function):
        return _with_real_tensors(function, tracker)

    with contextlib.ExitStack() as stack:
        def replace(owner, name, changed: Callable):
            if hasattr(owner, name):  # private: it may go
                new = changed(getattr(owner, name))
                stack.enter_context(unittest.mock.patch.object(owner, name, new))

        stack.enter_context(
            unittest.mock.patch.object(FakeTensor, "__deepcopy__", _deepcopy, create=True))
        for name in _MESH_METHODS:
            replace(DeviceMesh, name, real)
        for module in (_fsdp_init, _fully_shard):
            replace(module, "_get_post_forward_mesh_info", real)
        replace(nn.init, "_no_grad_trunc_normal_", lambda _: _normal)
        replace(distributed, "_sync_module_states", lambda _: _nothing)
        replace(distributed, "_verify_param_shape_across_processes", lambda _: _nothing)
        yield


def _with_real_tensors(function, tracker):
    """A mesh's ranks are numbers, which fake tensors have not; a rank holds them before a step."""
    def called(*args, **kwargs):
        args, kwargs = tree_map(tracker.values.real, (args, kwargs))
        with unset_fake_temporarily(), tracker.paused():
            return function(*args, **kwargs)
    return called


def _deepcopy(tensor, memo) -> torch.Tensor:
    """A copy of a fake tensor in the same mode: the general one copies the mode as well."""
    if id(tensor) not in memo:
        with torch.no_grad():
            copied = tensor.detach().clone(memory_format=torch.preserve_format)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _nothing(*args, **kwargs) -> None:
    """In place of DDP's broadcast of the initial parameters: nothing would arrive."""


def _normal(tensor, mean, std, a, b, generator=None) -> torch.Tensor:
    """In place of trunc_normal_, which draws again until no number lies outside of the bounds."""
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


def grouped_mm(first, second, offs=None, bias=None, out_dtype=None) -> torch.Tensor:
    """The result of a grouped product of matrices in any type: the fake kernel asks for a GPU's."""
    flat, other_flat = first.dim() == 2, second.dim() == 2
    if flat and other_flat:
        shape = (offs.shape[0], first.shape[0], second.shape[1])
    elif flat:
        shape = (first.shape[0], second.shape[-1])
    else:
        shape = (first.shape[1] if other_flat else (*first.shape[:2],))
        shape = (shape, second.shape[1]) if other_flat else (*shape, second.shape[-1])
    return first.new_empty(shape, dtype=out_dtype or first.dtype)


FAKE_KERNELS: dict[Any, Callable] = {
    overload: grouped_mm for overload in
    [getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)] if overload}

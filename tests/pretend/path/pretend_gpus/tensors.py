"""Tensors on GPUs: they are made on the CPU, and say that they are on the GPU of this process.

Two levels. torch.empty and empty_strided get a kernel for the dispatch key CUDA that allocates on
the CPU: all other functions that make tensors, of Python or C++, end in these two. And in a process
that uses a GPU, every plain tensor says "cuda:k", but for those that were sent to the CPU.
"""

import functools
import math
import weakref
from types import SimpleNamespace

import torch

from pretend_gpus import allocator, host, machine, out_of_memory, private, state

_gpu = {}  # storage -> (weak reference, GPU), where that is not the one that this process uses
_BASE = torch._C.TensorBase if hasattr(torch._C, "TensorBase") else torch.Tensor.__mro__[1]


def _unseen(function):
    """torch's own function, of which a TorchFunctionMode does not hear: it would be told of the one
    that has its name now, which is ours."""
    def called(*args, **kwargs):
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)
    return out_of_memory.shown(called)


_device = SimpleNamespace(__get__=_unseen(_BASE.device.__get__))
_to, _get_device = _unseen(torch.Tensor.to), _unseen(torch.Tensor.get_device)
_CPU = torch.device("cpu")
_library = None


def patch(torch):
    """Patches what `import torch` has just made."""
    allocator.install()
    private.link_guard()
    _register_kernels(torch)
    _patch_methods(torch.Tensor)
    _patch_functions(torch)


def _register_kernels(torch):
    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", _empty, "CUDA")
    _library.impl("empty_strided", _empty_strided, "CUDA")
    for name in ("tril_indices", "triu_indices"):
        function = getattr(torch, name)
        _library.impl(name, lambda *args, function=function, **kwargs: function(
            *args, **{**kwargs, "device": "cpu"}), "CUDA")


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    _require_room(size, dtype)
    return _on(device, torch.empty(
        size, dtype=dtype, layout=layout or torch.strided, device=_CPU,
        memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    _require_room(size, dtype)
    return _on(device, torch.empty_strided(size, stride, dtype=dtype, device=_CPU))


def _require_room(size, dtype):
    """Refuses one tensor that is larger than the GPU: the host's memory may have room for it."""
    state.enter()
    nbytes = math.prod(size) * (dtype or torch.get_default_dtype()).itemsize
    if nbytes > machine.total():
        raise torch.OutOfMemoryError(out_of_memory.words(nbytes))


def _on(device, tensor):
    """A tensor that was asked for on another GPU than this process's says so."""
    if device is not None and device.index not in (None, -1, state.current):
        _mark(tensor.untyped_storage(), state.index(device))
    return tensor


def _mark(storage, number):
    key = storage._cdata
    _gpu[key] = weakref.ref(storage, lambda _: _gpu.pop(key, None)), number


def is_on_gpu(tensor) -> bool:
    """Whether a tensor that lives on the CPU stands for one on the GPU."""
    if state.current is None and not _gpu or _is_fake(tensor):
        return False
    if _gpu and host.key(tensor) in _gpu:
        return True
    return state.current is not None and not host.has(tensor)


def _is_fake(tensor):
    return type(tensor).__name__ == "FakeTensor"


def _shown_device(tensor):
    found = _device.__get__(tensor)
    if found.type == "cpu" and is_on_gpu(tensor):
        _, number = (_gpu and _gpu.get(host.key(tensor))) or (None, state.current)
        return torch.device("cuda", number)
    return found


def _split(args, kwargs):
    """Returns (device that Tensor.to is given, or None; the other arguments, for the CPU)."""
    kwargs = dict(kwargs)
    if isinstance(kwargs.get("other"), torch.Tensor):
        other = kwargs.pop("other")
        return other.device, (other.dtype, *args), kwargs
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, (args[0].dtype, *args[1:]), kwargs
    if args and isinstance(args[0], (str, torch.device, int)) and not isinstance(args[0], bool):
        given, args = args[0], args[1:]
        if args and (args[0] is None or isinstance(args[0], torch.dtype)):
            kwargs["dtype"], args = args[0], args[1:]
        if args:
            kwargs["non_blocking"], args = args[0], args[1:]
        if args:
            kwargs["copy"] = args[0]
    else:
        if args and args[0] is None:
            args = args[1:]
            if args and isinstance(args[0], torch.dtype):
                kwargs["dtype"], args = args[0], args[1:]
        given = kwargs.pop("device", None)
    if given is None:
        return None, args, kwargs
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    return device, (), kwargs


def _move(tensor, *args, **kwargs):
    """Tensor.to: to the GPU it stays where it is, unless it was sent to the CPU; to the CPU it is
    copied."""
    device, rest, options = _split(args, kwargs)
    if device is None or device.type not in ("cpu", "cuda") or _is_fake(tensor):
        return _to(tensor, *args, **kwargs)
    if _device.__get__(tensor).type != "cpu":  # of meta, which raises
        return _to(tensor, *args, **kwargs)
    options = {key: value for key, value in options.items() if value is not None}
    if device.type == "cuda":
        state.index(device)
        if state.current is None:
            state.use(device)
        copy = {} if is_on_gpu(tensor) else {"copy": True}
        return _to(tensor, _CPU, *_dtype_first(rest), **{**options, **copy})
    if is_on_gpu(tensor):
        options["copy"] = True
    if state.current is None:
        return _to(tensor, _CPU, *_dtype_first(rest), **options)
    return host.made(lambda: _to(tensor, _CPU, *_dtype_first(rest), **options))


def _dtype_first(rest):
    return rest[:1]


def _pin(tensor, device=None):
    return host.made(tensor.clone, pinned=True)


def _patch_methods(Tensor):
    Tensor.device = property(_shown_device)
    Tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    Tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    Tensor.get_device = lambda self: (self.device.index if self.device.type == "cuda"
                                      else _get_device(self))
    Tensor.to = _move
    Tensor.__getitem__ = _asserting(Tensor.__getitem__)
    Tensor.cpu = lambda self, memory_format=None: self.to("cpu")
    Tensor.cuda = lambda self, device=None, non_blocking=False, memory_format=None: self.to(
        torch.device("cuda", state.index(device)))
    Tensor.record_stream = lambda self, stream: None
    Tensor.pin_memory = _pin
    Tensor.is_pinned = lambda self, device=None: host.is_pinned(self)
    Tensor._make_wrapper_subclass = staticmethod(_on_cpu(Tensor._make_wrapper_subclass))


def _asserting(getitem):
    """A kernel that is given positions cannot raise IndexError: an assertion in it fails."""
    def called(tensor, index):
        try:
            return getitem(tensor, index)
        except IndexError as error:
            parts = index if isinstance(index, tuple) else (index,)
            if "out of bounds" in str(error) and is_on_gpu(tensor) and any(
                    isinstance(part, torch.Tensor) for part in parts):
                raise torch.AcceleratorError(
                    "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` "
                    "to enable device-side assertions.") from None
            raise
    return functools.wraps(getitem)(called)


def _on_cpu(function):
    """A function that is given the device "cuda", with the CPU in its place."""
    def called(*args, device=None, **kwargs):
        if device is not None and torch.device(device).type == "cuda":
            device = _CPU
        return function(*args, **({"device": device} if device is not None else {}), **kwargs)
    return called


def _patch_functions(torch):
    original_load, original_autocast = torch.load, torch.autocast.__init__

    def load(f, map_location=None, *args, **kwargs):
        return original_load(f, _for_load(map_location), *args, **kwargs)

    def autocast(self, device_type, dtype=None, *args, **kwargs):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original_autocast(self, device_type, dtype, *args, **kwargs)

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu")

    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"),
                        (torch.Tensor, "new_tensor")):
        setattr(owner, name, _with_number(getattr(owner, name)))
    likes = ("zeros_like", "ones_like", "empty_like", "full_like")
    for name in likes:
        setattr(torch, name, _where_its_model_is(getattr(torch, name)))
    # TorchScript knows its functions by identity
    for name in ("tensor", "as_tensor", "asarray", *likes):
        torch.jit._builtins._register_builtin(getattr(torch, name), f"aten::{name}")
    torch.load, torch.autocast.__init__, torch.Generator = load, autocast, Generator
    torch._C._get_accelerator = lambda check=None: torch.device("cuda")
    torch.version.cuda = "12.8"
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_: 0)
    torch.cuda.nccl.version = lambda: (2, 27, 7)
    torch.cuda.nccl.is_available = lambda tensors=None: True
    torch.backends.cuda.is_built = lambda: True
    torch.serialization.register_package(5, _location, _restore)
    _patch_accelerator(torch)


def _with_number(function):
    """A function that is given the device "cuda", with "cuda:k": C++ would ask the guard."""
    def called(*args, device=None, **kwargs):
        if device is None:
            return function(*args, **kwargs)
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda":
            state.enter()
            device = torch.device("cuda", state.index(device))
        return function(*args, device=device, **kwargs)
    return functools.wraps(function)(called)


def _where_its_model_is(function):
    """A function that makes a tensor like another: on the host if asked to, or like the host's."""
    def called(model, *args, device=None, **kwargs):
        if device is not None:
            kwargs["device"] = device = torch.device(device)
        on_host = device.type == "cpu" and state.current is not None if device else host.has(model)
        if on_host:
            return host.made(lambda: function(model, *args, **kwargs))
        return function(model, *args, **kwargs)
    return functools.wraps(function)(called)


def _for_load(map_location):
    if isinstance(map_location, dict):
        return {key: "cpu" if str(value).startswith("cuda") else value
                for key, value in map_location.items()}
    is_gpu = isinstance(map_location, (str, torch.device)) and str(map_location).startswith("cuda")
    return "cpu" if is_gpu else map_location


def _location(storage):
    """Where a file or another process shall find a storage: as of CUDA's."""
    key = storage._cdata
    if key in _gpu:
        return f"cuda:{_gpu[key][1]}"
    is_on_cpu = storage.device.type != "cpu" or state.current is None or host.has_storage(storage)
    return None if is_on_cpu else f"cuda:{state.current}"


def _restore(storage, location):
    """Only what comes back is then on a GPU: its process need not use one itself."""
    if not location.startswith("cuda"):
        return None
    _mark(storage, state.index(location))
    return storage


def _patch_accelerator(torch):
    cuda, accelerator = torch.cuda, torch.accelerator

    def current_accelerator(check_available=False):
        return torch.device("cuda") if machine.count() or not check_available else None

    functions = SimpleNamespace(
        is_available=cuda.is_available, device_count=machine.count,
        current_accelerator=current_accelerator,
        current_device_index=cuda.current_device, current_device_idx=cuda.current_device,
        set_device_index=cuda.set_device, set_device_idx=cuda.set_device,
        current_stream=cuda.current_stream, set_stream=cuda.set_stream,
        synchronize=cuda.synchronize, device_index=cuda.device,
        empty_cache=cuda.empty_cache, memory_stats=cuda.memory_stats,
        memory_allocated=cuda.memory_allocated, max_memory_allocated=cuda.max_memory_allocated,
        memory_reserved=cuda.memory_reserved, max_memory_reserved=cuda.max_memory_reserved,
        reset_peak_memory_stats=cuda.reset_peak_memory_stats, get_memory_info=cuda.mem_get_info)
    for name, function in vars(functions).items():
        setattr(accelerator, name, function)

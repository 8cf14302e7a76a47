"""How values are sent: a function with everything it closes over to the ranks, and what it returns
back, in pieces, so that a large result needs no second copy."""

import contextlib
import functools
import importlib
import inspect
import io
import operator
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator

import cloudpickle
import torch

from labs.words import with_article
from labs.workers import source_lines
from labs.workers.failures import LaunchError

LARGE = 50_000_000  # bytes that a function carries along, from which the student is warned
PIECE = 8_000_000  # bytes of one message
OUT_OF_BAND = 1_000_000  # bytes from which a tensor or an array is sent next to the pickle


class CannotSend(LaunchError):
    """Something that cannot be pickled: a function, argument, captured value or result."""


# a function, to the ranks


def pack(fn: Callable, args: tuple) -> bytes:
    """`(fn, args)` as bytes. Raises CannotSend, and warns above 50 MB, naming what is to blame."""
    if not callable(fn):
        raise TypeError(f"launch(fn, ...): fn must be a function, not {_described(fn)}")
    try:
        data = _dumps((fn, args))
    except Exception as error:
        name, value = next(((name, value) for name, value in _captured(fn, args)
                            if _size(value) is None), ("the function", fn))
        raise CannotSend(
            f"{name} cannot be sent to the ranks: it is {_described(value)}. "
            f"Make it inside the function, or pass what it is made from. ({_short(error)})"
        ) from None
    if len(data) > LARGE:
        name, size = max(((name, _size(value)) for name, value in _captured(fn, args)),
                         key=lambda pair: pair[1], default=("the function", len(data)))
        warnings.warn(f"{len(data) / 1e6:.0f} MB are sent to every rank, most of it {name} "
                      f"({size / 1e6:.0f} MB): make it inside the function instead",
                      stacklevel=source_lines.steps_to_caller())
    return data


def unpack(data: bytes) -> tuple[Callable, tuple]:
    """The `(fn, args)` that `pack` packed. The functions and classes of the notebook or script that
    came with it become attributes of this process's `__main__`: pickle, and so torch.save, object
    collectives and pools, look them up there."""
    file = io.BytesIO(data)
    unpickler = pickle.Unpickler(file)
    packed = unpickler.load()
    # Two parts: (fn, args), then dictionaries of definitions, as `_dumps` writes them.
    while file.tell() < len(data):
        definitions = unpickler.load()
        vars(sys.modules["__main__"]).update(definitions)
        for found in definitions.values():
            _name_inner_classes(found)
    return packed


def _name_inner_classes(outer):
    """Restores the qualified names of classes inside a class, which cloudpickle drops."""
    for name, inner in list(vars(outer).items()):
        if isinstance(inner, type) and (inner.__module__, inner.__qualname__) == ("__main__", name):
            inner.__qualname__ = f"{outer.__qualname__}.{name}"
            _name_inner_classes(inner)


def _captured(fn, args) -> Iterator[tuple[str, object]]:
    """(name, value) of everything that would be sent: arguments, closure, globals; functions of
    the same notebook are followed."""
    for number, value in enumerate(args, 1):
        yield f"argument {number}", value
    seen, todo = set(), [fn]
    while todo:
        function = inspect.unwrap(getattr(todo.pop(), "__func__", fn))
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        names = inspect.getclosurevars(function)
        for name, value in {**names.globals, **names.nonlocals}.items():
            if isinstance(value, types.ModuleType):
                continue
            if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
                todo.append(value)
            else:
                yield f"{name!r}, used in {function.__name__}(),", value


# a result, back to the caller


def pack_result(value) -> list[memoryview]:
    """A rank's return value as a pickle and the buffers of its large tensors and arrays. Raises
    CannotSend."""
    file, buffers = io.BytesIO(), []
    try:
        _Pickler(file, protocol=5, buffer_callback=lambda buffer: _in_band(buffer, buffers)
                 ).dump(value)
    except MemoryError:
        raise
    except Exception as error:
        raise CannotSend(f"returned {_described(value)}, which cannot be sent back "
                         f"({_short(error)}). Return numbers, tensors, lists or dicts.") from None
    return [file.getbuffer(), *buffers]


def send_result(channel, progress, packed: list[memoryview]) -> None:
    """Sends what `pack_result` packed, and how far the rank had come."""
    channel.send("result_sizes", (progress, [buffer.nbytes for buffer in packed]))
    for buffer in packed:
        for start in range(0, buffer.nbytes, PIECE):
            channel.send("result_piece", bytes(buffer[start:start + PIECE]))


class IncomingResult:
    """In the caller: a value that is still arriving. sizes: bytes of each buffer of it."""

    def __init__(self, sizes: list[int]):
        self.buffers = [bytearray(size) for size in sizes]
        self.total, self.received = sum(sizes), 0
        # Empty buffers have no piece that could complete them.
        self._unfilled = [memoryview(buffer) for buffer in self.buffers if buffer]

    def add(self, piece: bytes) -> None:
        self._unfilled[0][:len(piece)] = piece
        self._unfilled[0] = self._unfilled[0][len(piece):]
        self.received += len(piece)
        if not self._unfilled[0]:
            del self._unfilled[0]

    @property
    def complete(self) -> bool:
        return self.received == self.total

    def value(self):
        head, *rest = self.buffers
        return pickle.loads(head, buffers=rest)


class _Pickler(cloudpickle.Pickler):
    """definitions: name -> function or class of the caller's `__main__` that was met."""

    def __init__(self, file, **options):
        super().__init__(file, **options)
        self.definitions = {}

    def reducer_override(self, value):
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            self._note_definition(value.__qualname__)
        if type(value) is io.TextIOWrapper and value not in (sys.stdout, sys.stderr):
            raise TypeError("an open file stays where it is")  # cloudpickle would read all of it
        if type(value) is torch.Tensor and _is_plain_and_large(value):
            # torch's own pickling would copy it into the stream, and once more on the way there
            flat = value.detach().reshape(-1).view(torch.uint8).numpy()
            # flat: (bytes,), a view of the tensor's memory, which protocol 5 sends beside the
            # pickle
            return _tensor, (pickle.PickleBuffer(flat), value.dtype, value.shape,
                             value.requires_grad)
        if path := _operator_path(value):
            return _from_torch, path
        if _is_module_of_another_class(value):
            return importlib.import_module, (value.__name__,)
        # What follows is written in C, or holds a lock or weak references, which no pickle takes.
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__":
            return _cached, (value.cache_parameters(), value.__wrapped__)
        if type(value) is functools.cached_property:
            return _cached_property, (value.func, value.attrname)
        if type(value) in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
            return type(value), (dict(value),)
        return super().reducer_override(value)

    def _note_definition(self, qualified_name):
        name = qualified_name.split(".")[0]  # of an inner class: the outer one
        main = vars(sys.modules["__main__"])
        if isinstance(main.get(name), type | types.FunctionType):
            self.definitions[name] = main[name]


def _operator_path(value) -> tuple[str, ...]:
    """Where in torch an operator, a namespace of them, or a module that cannot be imported is
    found; empty for anything else. cloudpickle takes torch.ops along with each function that names
    it, and cannot pickle it."""
    if value is torch.ops:
        return ("ops",)
    if isinstance(value, types.ModuleType) and value.__name__ not in sys.modules:
        # torch._C._functions, which once_differentiable names, is an attribute only
        package, *path = value.__name__.split(".")
        with contextlib.suppress(AttributeError):
            if package == "torch" and operator.attrgetter(".".join(path))(torch) is value:
                return tuple(path)
    if isinstance(value, type(torch.ops.aten)):
        return "ops", value.name
    if isinstance(value, torch._ops.OpOverloadPacket):
        return "ops", *value._qualified_op_name.split("::")
    if isinstance(value, torch._ops.OpOverload):
        return "ops", value.namespace, value._opname, value._overloadname
    return ()


def _from_torch(*path):
    return functools.reduce(getattr, path, torch)


def _cached(parameters, function):
    """functools.cache and lru_cache; the ranks begin with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def _cached_property(function, name):
    made = functools.cached_property(function)
    made.attrname = name  # __set_name__ is not called on a class that cloudpickle makes
    return made


def _is_module_of_another_class(value) -> bool:
    """Whether this is a module that was replaced by an instance of a subclass, which cloudpickle
    cannot pickle. It takes torch.distributed.config along with each function that names `dist` and
    any attribute `config`, as in `model.config`."""
    return (isinstance(value, types.ModuleType) and type(value) is not types.ModuleType
            and sys.modules.get(value.__name__) is value)


def _is_plain_and_large(tensor) -> bool:
    return (tensor.device.type == "cpu" and tensor.layout == torch.strided
            and not tensor.is_quantized and tensor.is_contiguous() and not tensor.is_conj()
            and not tensor.is_neg() and not tensor.__dict__ and tensor.nbytes >= OUT_OF_BAND)


def _tensor(buffer, dtype, shape, requires_grad):
    return torch.frombuffer(buffer, dtype=dtype).view(shape).requires_grad_(requires_grad)


def _in_band(buffer, buffers) -> bool:
    """Whether pickle should keep a buffer in its stream; a large one goes to `buffers` instead."""
    raw = buffer.raw()
    if raw.nbytes < OUT_OF_BAND:
        return True
    buffers.append(raw)
    return False


def _dumps(value) -> bytes:
    """A pickle of the value, then pickles of the definitions that it needs: with one pickler, so
    that what they share stays one object."""
    file = io.BytesIO()
    pickler, sent = _Pickler(file), set()
    pickler.dump(value)
    while new := {name: found for name, found in pickler.definitions.items() if name not in sent}:
        sent.update(new)
        pickler.dump(new)
    return file.getvalue()


def _size(value) -> int | None:
    """Bytes that the value takes on its way, or None if it cannot be sent."""
    try:
        return len(_dumps(value))
    except Exception:
        return None


def _described(value) -> str:
    if isinstance(value, io.IOBase):
        return f"an open file ({getattr(value, 'name', '?')})"
    return with_article(type(value).__name__)


def _short(error) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"

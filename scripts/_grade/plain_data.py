"""Values as plain data: what the judge and a submission's process send each other.

A message is JSON and the bytes of its tensors behind it. To read one runs no code of the sender's:
there is no pickle, a class is one that labs defines, and everything has a limit. The JSON is a
value itself where it is None, a bool, a string, a float or a small int; else a list of a kind and
its content, for example ["list", [1, 2]].
"""

import dataclasses
import enum
import itertools
import json
import math
import re
import struct
import sys
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

LONGEST = 64 * 10**6  # bytes of a message
TEXT = 16 * 10**6  # bytes of its JSON
DEPTH = 60  # of nested containers
ITEMS = 10**6  # values in a message
BITS = 1 << 16  # of an int
_HEAD = struct.Struct(">QQ")  # bytes of JSON, bytes behind it
_SMALL = 1 << 53
_DTYPES = {str(found).removeprefix("torch."): found for found in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)}
_ARRAYS = "?bhilqBHILQefdgFD"  # numpy's dtypes that are plain numbers
_NAME = re.compile(r"[^\W\d]\w*")


class NotPlain(TypeError):
    """A value that has no plain form, or is too large: said in the words of the exception."""


class Malformed(ValueError):
    """A message that no honest process sends."""


class Other:
    """Stands for a value that has no plain form. Its class has the name of the value's class."""


def pack(value: Any, strict: bool = False) -> bytes:
    """The message of a value. strict: raises NotPlain where a part has no plain form, instead of
    sending the name of its class. Raises NotPlain too where it is beyond a limit."""
    buffers: list[bytes] = []
    counter = itertools.count()
    text = json.dumps(_encode(value, buffers, strict, 0, counter), separators=(",", ":")).encode()
    length = sum(map(len, buffers))
    if len(text) > TEXT or len(text) + length > LONGEST:
        raise NotPlain(f"is larger than {LONGEST / 1e6:g} MB")
    return b"".join([_HEAD.pack(len(text), length), text, *buffers])


def read(receive: Callable[[int], bytes]) -> Any:
    """The value of the next message. receive(n): exactly n bytes. Raises Malformed."""
    text, length = _HEAD.unpack(receive(_HEAD.size))
    if text > TEXT or text + length > LONGEST:
        raise Malformed(f"a message of {text + length:,} bytes")
    text = receive(text)
    data = receive(length)
    try:
        return _Reader(data).value(json.loads(text))
    except Malformed:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError,
            OverflowError, RuntimeError, ArithmeticError) as error:
        raise Malformed(f"a message that cannot be read ({type(error).__name__})") from None


def unpack(message: bytes) -> Any:
    """The value of a complete message. Raises Malformed."""
    place = 0

    def receive(size):
        nonlocal place
        piece = message[place:place + size]
        if len(piece) < size:
            raise Malformed("a message that ends too early")
        place += size
        return piece

    found = read(receive)
    if place != len(message):
        raise Malformed("a message with something behind it")
    return found


def _encode(value, buffers, strict, depth, counter):
    if next(counter) > ITEMS:
        raise NotPlain(f"has more than {ITEMS:,} parts")
    if depth > DEPTH:
        raise NotPlain(f"is nested more than {DEPTH} deep")

    def several(values):
        return [_encode(each, buffers, strict, depth + 1, counter) for each in values]

    kind = type(value)
    # first what has a type of its own and is also a float or a tuple
    if isinstance(value, torch.Tensor):
        if (found := _tensor(value, buffers, several)) is not None:
            return found
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.char in _ARRAYS:
            buffers.append(np.ascontiguousarray(value).astype(value.dtype.newbyteorder("="))
                           .tobytes())
            return ["array" if isinstance(value, np.ndarray) else "scalar", value.dtype.char,
                    list(value.shape)]
    elif value is None or kind is bool:
        return value
    elif isinstance(value, enum.Enum) and _is_of_labs(kind):
        return ["member", kind.__module__, kind.__name__, value.name]
    elif isinstance(value, int):
        value = int(value)
        if value.bit_length() > BITS:
            raise NotPlain(f"has an int of {value.bit_length():,} bits")
        return value if abs(value) < _SMALL else ["int", hex(value)]
    elif isinstance(value, float):
        return float(value)
    elif isinstance(value, str):
        return str.__str__(value)
    elif isinstance(value, complex):
        return ["complex", value.real, value.imag]
    elif isinstance(value, bytes | bytearray):
        buffers.append(bytes(value))
        return ["bytes", len(value)]
    elif isinstance(value, Fraction):
        return ["fraction", *several([value.numerator, value.denominator])]
    elif isinstance(value, Decimal):
        return ["decimal", str(value)[:10_000]]
    elif isinstance(value, range):
        return ["range", *several([value.start, value.stop, value.step])]
    elif isinstance(value, tuple):
        is_ours = kind is not tuple and _is_of_labs(kind) and hasattr(kind, "_fields")
        return (["named", kind.__module__, kind.__name__, several(value)] if is_ours
                else ["tuple", several(value)])
    elif isinstance(value, list):
        return ["list", several(value)]
    elif isinstance(value, Mapping):
        return ["dict", several(value.keys()), several(value.values())]
    elif isinstance(value, set | frozenset):
        return ["set", several(value)]
    elif isinstance(value, types.GeneratorType | map | zip | filter):
        return ["generator", several(itertools.islice(value, ITEMS + 1))]
    elif isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    elif kind is torch.device:
        return ["device", str(value)]
    elif value is ...:
        return ["ellipsis"]
    elif dataclasses.is_dataclass(value) and kind is not type and _is_of_labs(kind):
        names = [field.name for field in dataclasses.fields(value)]
        return ["object", kind.__module__, kind.__name__, names,
                several(getattr(value, name) for name in names)]
    if strict:
        raise NotPlain(f"{kind.__module__}.{kind.__qualname__} has no plain form")
    return ["other", kind.__name__]


def _tensor(value, buffers, several):
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES or value.layout != torch.strided or value.device.type != "cpu":
        return None
    grad = value.grad if value.is_leaf else None
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    if plain.nbytes > LONGEST:
        raise NotPlain(f"is larger than {LONGEST / 1e6:g} MB")
    buffers.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return ["tensor", name, list(value.shape), bool(value.requires_grad),
            isinstance(value, torch.nn.Parameter), *several([grad])]


def _is_of_labs(kind) -> bool:
    """Whether a class lies under its name in a module of labs, and is none of a check's own."""
    module = sys.modules.get(kind.__module__)
    return (_is_allowed(kind.__module__) and module is not None
            and vars(module).get(kind.__name__) is kind)


def _is_allowed(module: str) -> bool:
    """Classes of the checks are none of an answer's: a Verdict would be taken for one."""
    return (type(module) is str and module.startswith("labs.")
            and not module.startswith("labs.checks"))


class _Reader:
    """Reads a message's JSON; data: the bytes behind it, each of which is used once."""

    def __init__(self, data: bytes):
        self._data, self._place, self._items = data, 0, 0

    def value(self, found, depth: int = 0) -> Any:
        self._items += 1
        if depth > DEPTH + 1 or self._items > ITEMS + 1:
            raise Malformed("a value that is nested too deeply, or has too many parts")
        if found is None or isinstance(found, bool | int | float | str):
            return found
        if type(found) is not list or not found or type(found[0]) is not str:
            raise Malformed("a value of no kind")
        kind, *content = found
        read = _KINDS.get(kind)
        if read is None:
            raise Malformed("a value of an unknown kind")
        return read(self, depth + 1, *content)

    def several(self, found, depth) -> list:
        if type(found) is not list:
            raise Malformed("no list")
        return [self.value(each, depth) for each in found]

    def bytes(self, size) -> bytes:
        if type(size) is not int or not 0 <= size <= len(self._data) - self._place:
            raise Malformed("a size that does not fit")
        self._place += size
        return self._data[self._place - size:self._place]

    def _numbers(self, shape, size: int) -> bytes:
        if type(shape) is not list or len(shape) > 32 or not all(
                type(each) is int and 0 <= each <= LONGEST for each in shape):
            raise Malformed("a shape that is none")
        return self.bytes(math.prod(shape) * size)

    def _tensor(self, depth, dtype, shape, requires_grad, is_parameter, grad):
        dtype = _DTYPES[dtype]
        data = bytearray(self._numbers(shape, dtype.itemsize))
        found = (torch.frombuffer(data, dtype=dtype) if data
                 else torch.empty(0, dtype=dtype)).reshape(shape)
        requires_grad = requires_grad is True and (dtype.is_floating_point or dtype.is_complex)
        if is_parameter is True:
            found = torch.nn.Parameter(found, requires_grad)
        else:
            found.requires_grad_(requires_grad)
        grad = self.value(grad, depth)
        if isinstance(grad, torch.Tensor):
            found.grad = grad
        return found

    def _array(self, _, char, shape):
        dtype = self._dtype(char)
        return np.frombuffer(self._numbers(shape, dtype.itemsize), dtype).reshape(shape).copy()

    def _scalar(self, _, char, shape):
        if shape != []:
            raise Malformed("a scalar with a shape")
        dtype = self._dtype(char)
        return np.frombuffer(self.bytes(dtype.itemsize), dtype)[0]

    def _dtype(self, char) -> np.dtype:
        if type(char) is not str or len(char) != 1 or char not in _ARRAYS:
            raise Malformed("an unknown dtype")
        return np.dtype(char)

    def _int(self, _, text):
        if type(text) is not str or len(text) > BITS // 4 + 4:
            raise Malformed("an int that is too large")
        return int(text, 16)

    def _member(self, _, module, name, member):
        kind = _class_of(module, name)
        if not issubclass(kind, enum.Enum):
            raise Malformed("no enum")
        return kind.__members__[member]

    def _named(self, depth, module, name, values):
        kind = _class_of(module, name)
        if not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
            raise Malformed("no named tuple")
        values = self.several(values, depth)
        if len(values) != len(kind._fields):
            raise Malformed("wrong fields")
        return tuple.__new__(kind, values)

    def _object(self, depth, module, name, names, values):
        """A dataclass, made without its __init__ and __post_init__."""
        kind = _class_of(module, name)
        if not dataclasses.is_dataclass(kind):
            raise Malformed("no dataclass")
        if names != [field.name for field in dataclasses.fields(kind)]:
            raise Malformed("wrong fields")
        found, values = object.__new__(kind), self.several(values, depth)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(found, name, value)
        return found

    def _dict(self, depth, keys, values):
        return dict(zip(self.several(keys, depth), self.several(values, depth), strict=True))

    def _generator(self, depth, values):
        values = self.several(values, depth)
        return (value for value in values)

    def _range(self, depth, *numbers):
        return range(*self.several(list(numbers), depth))

    def _fraction(self, depth, above, below):
        above, below = self.several([above, below], depth)
        if type(above) is not int or type(below) is not int:
            raise Malformed("no fraction")
        return Fraction(above, below)

    def _decimal(self, _, text):
        if type(text) is not str or len(text) > 10_000:
            raise Malformed("no decimal")
        return Decimal(text)

    def _complex(self, _, real, imaginary):
        return complex(float(real), float(imaginary))

    def _device(self, _, text):
        if type(text) is not str or len(text) > 20:
            raise Malformed("no device")
        return torch.device(text)

    def _other(self, _, name):
        return type(identifier(name), (Other,), {})()


_KINDS = {
    "tensor": _Reader._tensor, "array": _Reader._array, "scalar": _Reader._scalar,
    "int": _Reader._int, "member": _Reader._member, "named": _Reader._named,
    "object": _Reader._object, "dict": _Reader._dict, "generator": _Reader._generator,
    "range": _Reader._range, "fraction": _Reader._fraction, "decimal": _Reader._decimal,
    "complex": _Reader._complex, "device": _Reader._device, "other": _Reader._other,
    "bytes": lambda reader, _, size: reader.bytes(size),
    "list": lambda reader, depth, values: reader.several(values, depth),
    "tuple": lambda reader, depth, values: tuple(reader.several(values, depth)),
    "set": lambda reader, depth, values: set(reader.several(values, depth)),
    "dtype": lambda reader, _, name: _DTYPES[name],
    "ellipsis": lambda *_: ...,
}


def identifier(name: Any) -> str:
    """The name, if it is one of Python's, of at most 100 characters. Raises Malformed."""
    if type(name) is not str or len(name) > 100 or not _NAME.fullmatch(name):
        raise Malformed("a name that is none")
    return name


def _class_of(module, name) -> type:
    """A class that labs has imported already. Nothing is imported for a message."""
    if type(name) is not str or not _is_allowed(module):
        raise Malformed("a class that is not labs'")
    found = vars(sys.modules[module])[name]
    if not isinstance(found, type) or not _is_of_labs(found):
        raise Malformed("a class that is not labs'")
    return found

"""Plain data to values: see plain_data."""

import dataclasses
import enum
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from _grade.plain_kinds import (
    ARRAYS,
    BITS,
    DEPTH,
    DTYPES,
    ITEMS,
    LONGEST,
    Malformed,
    Other,
    Shared,
    class_of,
    identifier,
)


class GivenFunction:
    """A function of the judge's: a call asks the judge."""

    def __init__(self, ask, number: int):
        self._ask, self._number = ask, number

    def __call__(self, *arguments, **named):
        return self._ask(self._number, list(arguments), named)


class GivenIterator(GivenFunction):
    """An iterator of the judge's."""

    def __iter__(self):
        return self

    def __next__(self):
        for value in self():
            return value
        raise StopIteration


class Reader:
    """Reads a message's JSON; data: the bytes behind it, each of which is used once."""

    def __init__(self, data: bytes, shared: Shared):
        self._data, self._place, self._items, self._shared = data, 0, 0, shared

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

    def _tensor(self, depth, dtype, place, offset, shape, strides, requires_grad, is_parameter,
                grad):
        dtype = DTYPES[dtype]
        storage = self._storage(place)
        _require_counts([offset], shape, strides)
        # torch would make a storage larger that is too small
        last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if math.prod(shape) * dtype.itemsize > LONGEST or (
                math.prod(shape) and (last + 1) * dtype.itemsize > storage.nbytes()):
            raise Malformed("a tensor that does not fit into its storage")
        found = torch.empty(0, dtype=dtype)
        if math.prod(shape):
            found.set_(storage, offset, shape, strides)
        else:
            found = found.reshape(shape)
        requires_grad = requires_grad is True and (dtype.is_floating_point or dtype.is_complex)
        if is_parameter is True:
            found = torch.nn.Parameter(found, requires_grad)
        else:
            found.requires_grad_(requires_grad)
        self._shared.tensors.append(found)
        grad = self.value(grad, depth)
        if isinstance(grad, torch.Tensor):
            found.grad = grad
        return found

    def _storage(self, place) -> torch.UntypedStorage:
        known = self._shared.storages
        if type(place) is not int or not 0 <= place <= len(known):
            raise Malformed("a storage that is not there")
        if place == len(known):
            data = bytearray(self.bytes(int.from_bytes(self.bytes(8), "big")))
            known.append((torch.frombuffer(data, dtype=torch.uint8) if data else
                          torch.empty(0, dtype=torch.uint8)).untyped_storage())
        return known[place]

    def _same(self, _, number):
        if type(number) is not int or not 0 <= number < len(self._shared.tensors):
            raise Malformed("a tensor that is not there")
        return self._shared.tensors[number]

    def _array(self, _, char, shape):
        dtype = self._dtype(char)
        _require_counts(shape)
        data = self.bytes(math.prod(shape) * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def _scalar(self, _, char, shape):
        if shape != []:
            raise Malformed("a scalar with a shape")
        dtype = self._dtype(char)
        return np.frombuffer(self.bytes(dtype.itemsize), dtype)[0]

    def _dtype(self, char) -> np.dtype:
        if type(char) is not str or len(char) != 1 or char not in ARRAYS:
            raise Malformed("an unknown dtype")
        return np.dtype(char)

    def _int(self, _, text):
        if type(text) is not str or len(text) > BITS // 4 + 4:
            raise Malformed("an int that is too large")
        return int(text, 16)

    def _member(self, _, module, name, member):
        kind = class_of(module, name)
        if not issubclass(kind, enum.Enum):
            raise Malformed("no enum")
        return kind.__members__[member]

    def _named(self, depth, module, name, values):
        kind = class_of(module, name)
        if not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
            raise Malformed("no named tuple")
        values = self.several(values, depth)
        if len(values) != len(kind._fields):
            raise Malformed("wrong fields")
        return tuple.__new__(kind, values)

    def _object(self, depth, module, name, names, values):
        """A dataclass, made without its __init__ and __post_init__."""
        kind = class_of(module, name)
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

    def _given(self, _, number, is_iterator):
        if self._shared.ask is None:
            raise Malformed("a function")
        return (GivenIterator if is_iterator else GivenFunction)(self._shared.ask, number)

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


def _require_counts(*lists):
    for each in lists:
        if type(each) is not list or len(each) > 32 or not all(
                type(one) is int and 0 <= one <= LONGEST for one in each):
            raise Malformed("a shape that is none")


_KINDS = {
    "tensor": Reader._tensor, "same": Reader._same, "array": Reader._array,
    "scalar": Reader._scalar, "int": Reader._int, "member": Reader._member, "named": Reader._named,
    "object": Reader._object, "dict": Reader._dict, "generator": Reader._generator,
    "given": Reader._given,
    "range": Reader._range, "fraction": Reader._fraction, "decimal": Reader._decimal,
    "complex": Reader._complex, "device": Reader._device, "other": Reader._other,
    "bytes": lambda reader, _, size: reader.bytes(size),
    "list": lambda reader, depth, values: reader.several(values, depth),
    "tuple": lambda reader, depth, values: tuple(reader.several(values, depth)),
    "set": lambda reader, depth, values: set(reader.several(values, depth)),
    "dtype": lambda reader, _, name: DTYPES[name],
    "ellipsis": lambda *_: ...,
}

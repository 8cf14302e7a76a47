"""Values to plain data: see plain_data."""

import dataclasses
import enum
import types
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

from _grade.plain_kinds import (
    ARRAYS,
    BITS,
    DEPTH,
    DTYPES,
    ITEMS,
    LARGE,
    LONGEST,
    SMALL,
    NotPlain,
    Shared,
    is_of_labs,
)


class Writer:
    """Makes JSON of a value; buffers: the bytes that come behind it. reads: whether generators are
    read to their end."""

    def __init__(self, strict: bool, shared: Shared, reads: bool):
        self.buffers: list[bytes] = []
        self._strict, self._shared, self._reads, self._count = strict, shared, reads, 0

    def value(self, value, depth: int = 0):
        self._count += 1
        if self._count > ITEMS:
            raise NotPlain(f"has more than {ITEMS:,} parts")
        if depth > DEPTH:
            raise NotPlain(f"is nested more than {DEPTH} deep")

        def several(values):
            return [self.value(each, depth + 1) for each in values]

        kind = type(value)
        if value is None or kind is bool:
            return value
        # before numbers: NumPy's float64 is a float, too
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            found = (self._tensor(value, depth) if isinstance(value, torch.Tensor) else
                     self._array(value))
            if found is not None:
                return found
        elif isinstance(value, enum.Enum) and is_of_labs(kind):
            return ["member", kind.__module__, kind.__name__, value.name]
        elif isinstance(value, int):
            value = int(value)
            if value.bit_length() > BITS:
                raise NotPlain(f"has an int of {value.bit_length():,} bits")
            return value if abs(value) < SMALL else ["int", hex(value)]
        elif isinstance(value, float):
            return float(value)
        elif isinstance(value, str):
            return str.__str__(value)
        elif isinstance(value, complex):
            return ["complex", value.real, value.imag]
        elif isinstance(value, bytes | bytearray):
            self.buffers.append(bytes(value))
            return ["bytes", len(value)]
        elif isinstance(value, Fraction):
            return ["fraction", *several([value.numerator, value.denominator])]
        elif isinstance(value, Decimal):
            return ["decimal", str(value)[:10_000]]
        elif isinstance(value, range):
            return ["range", *several([value.start, value.stop, value.step])]
        elif isinstance(value, tuple):
            is_ours = kind is not tuple and is_of_labs(kind) and hasattr(kind, "_fields")
            return (["named", kind.__module__, kind.__name__, several(value)] if is_ours
                    else ["tuple", several(value)])
        elif isinstance(value, list):
            return ["list", several(value)]
        elif isinstance(value, Mapping):
            return ["dict", several(value.keys()), several(value.values())]
        elif isinstance(value, set | frozenset):
            return ["set", several(value)]
        elif isinstance(value, types.GeneratorType | map | zip | filter) and self._reads:
            return ["generator", several(value)]
        elif isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        elif kind is torch.device:
            return ["device", str(value)]
        elif value is ...:
            return ["ellipsis"]
        elif dataclasses.is_dataclass(value) and kind is not type and is_of_labs(kind):
            names = [field.name for field in dataclasses.fields(value)]
            return ["object", kind.__module__, kind.__name__, names,
                    several(getattr(value, name) for name in names)]
        is_iterator = hasattr(kind, "__next__")
        if self._shared.given is not None and (is_iterator or callable(value)):
            self._shared.given.append(value)
            return ["given", len(self._shared.given) - 1, is_iterator]
        if self._strict:
            raise NotPlain(f"{kind.__module__}.{kind.__qualname__} has no plain form")
        return ["other", kind.__name__]

    def _tensor(self, value, depth):
        """A tensor is its storage, which is sent once, and where in it its numbers are."""
        for number, each in enumerate(self._shared.tensors):
            if each is value:
                return ["same", number]
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES or value.layout != torch.strided or value.device.type != "cpu":
            return None
        if value.nbytes > LONGEST:
            raise NotPlain(f"is larger than {LONGEST / 1e6:g} MB")
        plain = value.detach().resolve_conj().resolve_neg()
        if plain.untyped_storage().nbytes() > LARGE:  # a small view of much: only what is seen
            plain = plain.contiguous().clone()
        place = self._storage(plain.untyped_storage())
        self._shared.tensors.append(value)
        grad = value.grad if value.is_leaf else None
        return ["tensor", name, place, plain.storage_offset(), list(plain.shape),
                list(plain.stride()), bool(value.requires_grad),
                isinstance(value, torch.nn.Parameter), self.value(grad, depth + 1)]

    def _storage(self, storage) -> int:
        for number, each in enumerate(self._shared.storages):
            if each.data_ptr() == storage.data_ptr() and each.nbytes() == storage.nbytes():
                return number
        self._shared.storages.append(storage)
        size = storage.nbytes()
        self.buffers.append(size.to_bytes(8, "big") + (
            torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes() if size else b""))
        return len(self._shared.storages) - 1

    def _array(self, value):
        if value.dtype.char not in ARRAYS:
            return None
        # a storage may come before: each takes its bytes in the order of the JSON
        self.buffers.append(np.ascontiguousarray(value).astype(value.dtype.newbyteorder("="))
                            .tobytes())
        return ["array" if isinstance(value, np.ndarray) else "scalar", value.dtype.char,
                list(value.shape)]

"""What replaces labs' ways between a check and its ranks while an exercise is graded: results are
sealed on the rank, and read by an unpickler that runs no code.

A submission can reach this module by the functions that it puts into labs. So it knows nothing of
the guard but the names of events.
"""

import importlib
import io
import os
import pickle
import sys
import types
from enum import EnumType
from multiprocessing import reduction

from labs.workers import pickling, rank_handle

_RUNS_CODE = {"builtins", "os", "posix", "sys", "subprocess", "importlib", "runpy", "ctypes", "pty",
              "nt", "gc", "code", "shutil", "cloudpickle.cloudpickle", "operator", "torch.ops"}
_SAFE = {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
         ("labs.workers.pickling", "_tensor"), ("collections", "OrderedDict"),
         ("collections", "Counter"), ("collections", "defaultdict"), ("builtins", "set"),
         ("builtins", "frozenset"), ("builtins", "complex"), ("builtins", "range"),
         ("builtins", "slice"), ("builtins", "bytearray"), ("torch", "Size"), ("torch", "device"),
         ("torch.serialization", "_get_layout"), ("numpy.core.multiarray", "scalar"),
         ("numpy._core.multiarray", "scalar"), ("numpy", "dtype"), ("fractions", "Fraction"),
         ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
         ("numpy", "ndarray"), ("_codecs", "encode"), ("functools", "partial")}


def meet_in_a_file() -> None:
    """The memory of this process, where ranks would meet, is not to be seen."""
    if hasattr(os, "memfd_create"):
        del os.memfd_create


def prepare() -> None:
    """Each rank is looked at before and after it runs what it was sent."""
    unpack, pack_result, audit = pickling.unpack, pickling.pack_result, sys.audit

    def unpack_after_a_look(data):
        audit("workbook.begin")
        return unpack(data)

    def pack_after_a_look(value):
        audit("workbook.finished")
        packed, holder = pack_result(value), []
        audit("workbook.seal", holder, packed)
        return [*packed, memoryview(holder[0])]

    pickling.unpack, pickling.pack_result = unpack_after_a_look, pack_after_a_look


class _Unpickler(pickle.Unpickler):
    """Reads what ranks send: numbers, tensors and labs' own classes, nothing that runs code."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in _RUNS_CODE and name not in ("set", "frozenset", "complex", "range", "slice",
                                                 "bytearray") and not _is_exception(module, name):
            sys.audit("workbook.refused", f"sends what runs code when it is read, {module}.{name}")
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if "." in name:
            raise pickle.UnpicklingError(f"{module}.{name} in a result")
        found = getattr(importlib.import_module(module), name) if module in sys.modules else None
        is_class = isinstance(found, type) and found.__module__ == module
        if (module, name) in _SAFE or is_class and (
                module.split(".")[0] == "labs" or issubclass(found, BaseException)):
            return found
        if module == "torch" and type(found).__name__ == "dtype" or (
                is_class and module.split(".")[0] == "torch" and issubclass(found, Exception)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} in a result")


def _member(kind, name):
    """In the place of getattr, by which Python 3.11.2 sends a member of an enum."""
    if not (type(kind) is EnumType and type(name) is str and name in kind.__members__):
        sys.audit("workbook.refused", "sends what runs code when it is read, builtins.getattr")
    return kind[name]


def _is_exception(module, name) -> bool:
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def _storage(data):
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def restrict() -> None:
    """In the process of the check: what comes from ranks is looked at before it is read."""
    audit = sys.audit

    def loads(data, *, buffers=None, **_):
        return _Unpickler(io.BytesIO(data), buffers=buffers).load()

    safe = types.SimpleNamespace(loads=loads, Unpickler=_Unpickler,
                                 PickleBuffer=pickle.PickleBuffer)
    reduction.ForkingPickler.loads = staticmethod(loads)

    def value(result):
        *buffers, seal = result.buffers
        audit("workbook.sealed", buffers, bytes(seal))
        head, *rest = buffers
        return loads(head, buffers=rest)

    rank_handle.pickle = safe
    pickling.IncomingResult.value = value

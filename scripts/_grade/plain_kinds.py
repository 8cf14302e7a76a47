"""What plain data may consist of, and how much of it: see plain_data."""

import dataclasses
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

LONGEST = 64 * 10**6  # bytes of a message
TEXT = 16 * 10**6  # bytes of its JSON
DEPTH = 60  # of nested containers
ITEMS = 10**6  # values in a message
BITS = 1 << 16  # of an int
LARGE = 16 * 10**6  # bytes of a storage that is not sent for a view of it
SMALL = 1 << 53
DTYPES = {str(found).removeprefix("torch."): found for found in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)}
ARRAYS = "?bhilqBHILQefdgFD"  # numpy's dtypes that are plain numbers
_OF_RUNS = ("labs.checks.scripts.forked", "labs.checks.scripts.probe")
_NAME = re.compile(r"[^\W\d]\w*")


class NotPlain(TypeError):
    """A value that has no plain form, or is too large: said in the words of the exception."""

    own_place = None  # for labs.checks.student_code: no line of the submission's raised it


class Malformed(ValueError):
    """A message that no honest process sends."""


class Other:
    """Stands for a value that has no plain form. Its class has the name of the value's class."""


@dataclasses.dataclass
class Shared:
    """The tensors and storages of a message, in its order: an answer to it may consist of the same
    ones, or of views of them. given: the judge's functions and iterators in its message, None where
    none may be sent. ask: (number, arguments, named) -> what one of them returns, of an iterator
    the next value in a list, or an empty one; None where none may come."""

    given: list | None = None
    ask: Callable[[int, list, dict], Any] | None = None
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    storages: list[torch.UntypedStorage] = dataclasses.field(default_factory=list)


def is_of_labs(kind) -> bool:
    """Whether a class lies under its name in a module of labs, and is none of a check's own."""
    module = sys.modules.get(kind.__module__)
    return (_is_allowed(kind.__module__) and module is not None
            and vars(module).get(kind.__name__) is kind)


def _is_allowed(module: str) -> bool:
    """Classes of the checks are none of an answer's: a Verdict would be taken for one. What a run
    of a script left behind is made of those in _OF_RUNS."""
    return type(module) is str and (module in _OF_RUNS or module.startswith("labs.")
                                    and not module.startswith("labs.checks"))


def identifier(name: Any) -> str:
    """The name, if it is one of Python's, of at most 100 characters. Raises Malformed."""
    if type(name) is not str or len(name) > 100 or not _NAME.fullmatch(name):
        raise Malformed("a name that is none")
    return name


# Where a class is looked up. The judge imports nothing for a message; what a submission's process
# gets is the judge's, and names what it may not have imported yet.
modules: Callable[[str], ModuleType] = sys.modules.__getitem__


def class_of(module, name) -> type:
    """A class that labs has imported already."""
    if type(name) is not str or not _is_allowed(module):
        raise Malformed("a class that is not labs'")
    try:
        found = vars(modules(module))[name]
    except (ImportError, KeyError):
        raise Malformed(f"{module}.{name}, which is not there") from None
    if not isinstance(found, type) or not is_of_labs(found):
        raise Malformed("a class that is not labs'")
    return found

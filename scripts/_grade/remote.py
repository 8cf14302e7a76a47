"""A submission's function, called from the judge's process: its arguments go as plain data to the
process that has the function, and what comes back is plain data, too.

The judge's side makes proxies (`Remote`), the submission's side answers (`serve`). What an
exception says comes with it, and the line of the submission's that raised it.
"""

import builtins
import dataclasses
import inspect
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from _grade import plain_data
from _grade.plain_kinds import Malformed, NotPlain, Shared, identifier
from labs.checks.student_code import TooMuchOutput, guarded, message_of, own_place
from labs.workers.source_lines import Place

MESSAGE = 4000  # characters of an exception's text


class Ended(BaseException):
    """The submission's process has ended. No Exception: no check may take it for an answer's."""

    own_place = None  # for labs.checks.student_code: no line of the submission's raised it


class Forged(BaseException):
    """What came from the submission's process is nothing that our code there sends."""

    own_place = None


class Link:
    """Messages over a socket. Raises Ended where the other end is closed."""

    def __init__(self, descriptor: int):
        self._socket = socket.socket(fileno=descriptor)

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except OSError:
            raise Ended from None

    def receive(self, shared: Shared | None = None) -> Any:
        return plain_data.read(self._exactly, shared)

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                piece = self._socket.recv(min(size - len(found), 1 << 20))
            except OSError:
                piece = b""
            if not piece:
                raise Ended
            found += piece
        return bytes(found)


# ---- the judge's side

class Remote:
    """The other process, as the judge has it. cells: the names of the submission's cells."""

    def __init__(self, link: Link, cells: Sequence[str]):
        self._link, self._cells = link, frozenset(cells)

    def answers(self) -> list:
        """What the check is called with: a proxy for a function, or a value. Raises what the
        submission's definitions raised, Forged, and Ended."""
        found = self._received()
        if found[0] == "raised":
            raise self._exception(found)
        described = _listed(found, 2)[1]
        if type(described) is not list:
            raise Forged("sends what is no result")
        return [self._answer(number, each) for number, each in enumerate(described)]

    def _answer(self, number, described):
        if type(described) is list and len(described) == 2:
            return described[1]
        _, name, qualified, text, parameters = _listed(described, 5)

        def remote(*arguments, **named):
            return self._call(number, arguments, named)

        remote.__name__, remote.__qualname__ = str(name)[:200], str(qualified)[:200]
        remote.__doc__, remote.__module__ = None if text is None else str(text), "__main__"
        if parameters is not None:
            try:
                remote.__signature__ = _signature(parameters)
            except (ValueError, TypeError, IndexError) as error:
                raise Forged("describes a function that cannot be") from error
        return remote

    def start(self, name: str, arguments: tuple, named: dict) -> Any:
        """Calls one of `serve`'s `starts` there."""
        return self._call(name, arguments, named)

    def _call(self, number, arguments, named):
        # strict: what has no plain form is ours, and the exercise is none for a remote function
        shared = Shared(given=[])
        self._link.send(plain_data.pack([number, arguments, named], True, shared))
        given, shared.given, said = shared.given, None, []
        while (found := self._received(shared))[0] == "asks":
            self._link.send(_given(given, found, said))
        if said:
            raise said[0]
        error = self._exception(found) if found[0] == "raised" else None
        result, after = (None, found[4]) if error else _listed(found, 3)[1:]
        if after is not None:  # an input was changed: so that the check sees it
            try:
                positional, by_name = plain_data.unpack(after)
                _update(list(arguments), list(positional))
                _update(named, by_name)
            except Exception:
                raise Forged("sends arguments that are none") from None
        if error is not None:
            raise error
        return result

    def _received(self, shared=None):
        try:
            found = self._link.receive(shared)
        except Malformed as error:
            raise Forged(f"sends {error}") from None
        if type(found) is not list or not found or type(found[0]) is not str:
            raise Forged("sends what is no result")
        if found[0] not in ("answers", "returned", "raised", "asks"):
            raise Forged("sends what is no result")
        return found

    def _exception(self, found) -> BaseException:
        _, name, text, place, _ = _listed(found, 5)
        if type(name) is not str or type(text) is not str:
            raise Forged("sends an exception that is none")
        error = _exception_of(name, text[:MESSAGE])
        error.own_place = None
        if type(place) is list and [*map(type, place)] == [str, int, str] and (
                place[0] in self._cells):
            error.own_place = Place(place[0], place[1], place[2][:200])
        return error


def _given(given, found, said) -> bytes:
    """What a function or an iterator of ours returns, or raises, that the submission calls. said:
    gets what our own code says of the answer."""
    from labs.checks.verdicts import Wrong  # not in the submission's process

    _, number, arguments, named = _listed(found, 4)
    if not (type(number) is int and 0 <= number < len(given) and type(arguments) is list
            and type(named) is dict and set(map(type, named)) <= {str}):
        raise Forged("asks for what it was not given")
    asked = given[number]
    try:
        if callable(asked):
            return plain_data.pack(["given", asked(*arguments, **named)])
        return plain_data.pack(["given", list(itertools.islice(asked, 1))])
    except Exception as error:
        said += [error] * isinstance(error, Wrong)
        return pack_exception(error)


def _listed(found, length) -> list:
    if type(found) not in (list, tuple) or len(found) != length:
        raise Forged("sends what is no result")
    return found


def _exception_of(name, text) -> BaseException:
    """An exception of this type and text. A type that is not Python's becomes one of that name."""
    if name == TooMuchOutput.__name__:
        return TooMuchOutput()
    if name == "SystemExit":
        return SystemExit(text)
    try:
        name = identifier(name)
    except Malformed:
        raise Forged("sends an exception that is none") from None
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = Exception
    return type(name, (kind,), {"__str__": lambda self: text, "__init__": lambda self: None,
                                "__new__": lambda cls: kind.__new__(cls, *_NEEDS.get(name, ()))})()


_NEEDS = {"ExceptionGroup": ("", [Exception()])}


class _Shown:
    """An annotation or a default, as it is written."""

    def __init__(self, text):
        self._text = str(text)[:200]

    def __repr__(self):
        return self._text


def _signature(parameters) -> inspect.Signature:
    found = []
    for name, kind, default, annotation in (_listed(each, 4) for each in parameters):
        found.append(inspect.Parameter(
            name, inspect._ParameterKind(kind),
            default=inspect.Parameter.empty if default is None else _Shown(default),
            annotation=inspect.Parameter.empty if annotation is None else _Shown(annotation)))
    return inspect.Signature(found)


def _update(old, new) -> Any:
    """What stands for `old` after a call: the same object with new contents where it can change,
    else the new value."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if new.dtype != old.dtype:
            return new
        if new.shape == old.shape:
            old.data.copy_(new.data)
        else:
            old.data = new.data
        old.grad = new.grad
        return old
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if old.shape != new.shape or old.dtype != new.dtype:
            return new
        old[...] = new
        return old
    if type(old) is list and type(new) is list:
        old[:] = [_update(*each) for each in zip(old, new, strict=False)] + new[len(old):]
        return old
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        for each in zip(old, new, strict=True):
            _update(*each)
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        kept = {key: _update(old[key], value) if key in old else value
                for key, value in new.items()}
        old.clear()
        old.update(kept)
        return old
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        for field in dataclasses.fields(old):
            object.__setattr__(old, field.name, _update(getattr(old, field.name),
                                                        getattr(new, field.name)))
        return old
    return new


# ---- the submission's side

def serve(link: Link, answers: Sequence[Any], starts: dict[str, Callable] | None = None) -> None:
    """Describes the answers, then calls what the judge asks for, until it closes the link. starts:
    functions of ours that it may ask for by name, too."""
    link.send(_message(["answers", [_described(each) for each in answers]]))
    lock = threading.Lock()

    def ask(number, arguments, named):
        with lock:
            link.send(plain_data.pack(["asks", number, arguments, named]))
            found = link.receive()
        if found[0] == "raised":
            raise _exception_of(*found[1:3])
        return found[1]

    while True:
        shared = Shared(ask=ask)
        try:
            number, arguments, named = link.receive(shared)
        except Ended:
            return
        except Malformed as error:  # of the judge's: reach.NEEDED lacks a module
            link.send(pack_exception(error))
            continue
        asked = starts[number] if isinstance(number, str) else answers[number]
        link.send(_called(asked, arguments, named, shared))


def _called(function, arguments, named, shared) -> bytes:
    before = plain_data.pack([arguments, named], reads=False)
    try:
        with guarded():
            result = ["returned", function(*arguments, **named), None]
    except BaseException as error:
        result = _raised(error)
    try:
        # what has no plain form now becomes its class's name, which shows that it has changed
        after = plain_data.pack([arguments, named], reads=False)
    except NotPlain as error:
        return pack_exception(RuntimeError(f"an argument, after the call, {error}"))
    if after != before:
        result[-1] = after
    return _message(result, shared)


def _message(found, shared=None) -> bytes:
    try:
        with guarded():  # a generator runs now
            return plain_data.pack(found, shared=shared)
    except NotPlain as error:
        return pack_exception(RuntimeError(f"what was returned {error}"))
    except BaseException as error:
        return pack_exception(error)


def pack_exception(error: BaseException) -> bytes:
    """The message of an exception: its type's name, its text, the submission's line."""
    return plain_data.pack(_raised(error))


def _raised(error) -> list:
    place = own_place(error)
    text = str(error.code) if isinstance(error, SystemExit) and error.code is not None else (
        message_of(error).removeprefix(type(error).__name__).removeprefix(": "))
    return ["raised", type(error).__name__, text,
            place and [place.filename, place.line, place.function], None]


def _described(answer) -> list:
    if not callable(answer):
        return ["value", answer]
    try:
        parameters = [[each.name, int(each.kind), _written(each.default, repr),
                       _written(each.annotation, inspect.formatannotation)]
                      for each in inspect.signature(answer).parameters.values()]
    except (ValueError, TypeError):
        parameters = None
    name = getattr(answer, "__name__", type(answer).__name__)
    return ["function", name, getattr(answer, "__qualname__", name),
            getattr(answer, "__doc__", None), parameters]


def _written(value, write: Callable[[Any], str]) -> str | None:
    return None if value is inspect.Parameter.empty else write(value)[:200]

"""A submission's scripts, started for the judge by its own kit's functions in the submission's
process. What comes back is plain data, of the types that the function's annotations say; what the
judge has asked for, it fills in itself.

What a run says of its ranks, their samples, gradients and files comes from processes that run the
script: it is evidence, as good as what it is compared with. That is computed where the script has
never been.
"""

import dataclasses
import os
import shutil
import types
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

FILES, BYTES = 200, 32 * 10**6  # that a script may leave in a folder of the check's
# (module, function) of labs, as checks call them.
_STARTS = (("labs.checks.scripts.forked", "run"),
           ("labs.surviving_failure.forked_starts", "run_starts"),
           ("labs.start_here.scripts", "run_two_at_once"),
           ("labs.start_here.scripts", "run_failing"))


class Misfit(ValueError):
    """What came back is not of the type that it should be."""


# ---- the judge's side

def elsewhere(call: Callable[[str, tuple, dict], Any], refuse: Callable[[str], Exception]) -> None:
    """Lets the checks of this process start scripts in the other one. call: calls one of `starts()`
    there, by its name. refuse: makes what is raised where no honest process sends what came."""
    for module, name in _STARTS:
        original = getattr(import_module(module), name)
        setattr(import_module(module), name, _away(name, original, call, refuse))


def _away(name, original, call, refuse) -> Callable:
    result = typing.get_type_hints(original)["return"]

    def started(*arguments, **named):
        folder = named.get("shared")
        sent = read_files(folder) if folder else {}
        found = call(name, arguments, {**named, "sent": sent})
        try:
            _require(type(found) is tuple and len(found) == 2)
            found, files = found
            require_fits(found, result)
            found = _ours(name, found, *arguments)
            if folder:
                require_fits(files, dict[str, bytes])
                write_files(files, folder)
        except Misfit:
            raise refuse("sends what no run of a script leaves") from None
        return found

    return started


def _ours(name, found, *arguments):
    """With what was asked for, not what is said of it; and complete."""
    if name == "run":
        script, _, ranks, *_ = arguments
        each = (found.codes, found.records, found.output, found.batches, found.waiting)
        _require({len(of_ranks) for of_ranks in each} == {ranks})
        return dataclasses.replace(found, script=os.path.basename(str(script)), ranks=ranks)
    if name == "run_starts":
        starts = arguments[2]
        _require(0 < len(found) <= len(starts))
        for one, start in zip(found, starts, strict=False):
            each = (one.codes, one.batches, one.random_states, one.rates, one.calls, one.errors,
                    one.waiting, one.output)
            _require({len(of_ranks) for of_ranks in each} == {start.ranks})
        return [dataclasses.replace(one, start=start)
                for one, start in zip(found, starts, strict=False)]
    if name == "run_failing":
        return dataclasses.replace(found, ranks=2)
    first, second, same = found
    return (dataclasses.replace(first, ranks=2), second and dataclasses.replace(second, ranks=3),
            same)


def require_fits(value: Any, hint: Any) -> None:
    """Raises Misfit unless a value and all its parts are of an annotation's types."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            try:
                return require_fits(value, part)
            except Misfit:
                continue
        raise Misfit
    if origin is tuple and parts[-1:] != (...,):
        _require(type(value) is tuple and len(value) == len(parts))
        for one, part in zip(value, parts, strict=True):
            require_fits(one, part)
    elif origin in (list, tuple, frozenset):
        _require(isinstance(value, set | frozenset if origin is frozenset else origin))
        for one in value:
            require_fits(one, parts[0])
    elif origin is dict:
        _require(type(value) is dict)
        for key, one in value.items():
            require_fits(key, parts[0])
            require_fits(one, parts[1])
    elif dataclasses.is_dataclass(hint):
        _require(type(value) is hint)
        for name, part in typing.get_type_hints(hint).items():
            require_fits(getattr(value, name), part)
    elif hint is float:
        _require(type(value) in (int, float))
    else:
        _require(value is None if hint is type(None) else isinstance(value, hint) and (
            hint is not int or type(value) is int))


def _require(holds: bool):
    if not holds:
        raise Misfit


def read_files(folder: str) -> dict[str, bytes]:
    """The regular files of a folder, by their paths in it; raises Misfit beyond FILES or BYTES."""
    found, size = {}, 0
    for path in sorted(Path(folder).rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        size += path.stat().st_size
        if len(found) >= FILES or size > BYTES:
            raise Misfit(f"a script left more than {FILES} files, or {BYTES / 1e6:g} MB")
        found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def write_files(files: dict[str, bytes], folder: str) -> None:
    """Leaves these files in a folder, and nothing else."""
    if len(files) > FILES or sum(map(len, files.values())) > BYTES:
        raise Misfit
    for name in files:
        parts = Path(name).parts
        if not parts or len(name) > 500 or "\0" in name or os.path.isabs(name) or ".." in parts:
            raise Misfit
    for each in Path(folder).iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    for name, data in files.items():
        path = Path(folder, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError:  # a file where a folder should be, a name that is too long
            raise Misfit from None


# ---- the submission's side

def starts() -> dict[str, Callable]:
    """Name -> the function, which also takes the files of the check's folder, and returns those
    that are there afterwards."""
    return {name: _here(getattr(import_module(module), name)) for module, name in _STARTS}


def _here(function) -> Callable:
    def started(*arguments, sent, shared=None, **named):
        if not shared:
            return function(*arguments, **named), {}
        from labs.workers import processes

        with processes.temporary_folder() as folder:
            write_files(sent, folder)
            script, words, *others = arguments
            words = tuple(word.replace(shared, folder) for word in words)
            return function(script, words, *others, **named), read_files(folder)

    return started

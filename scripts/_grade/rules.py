"""What the guard holds against an audit event: rules, which ask who called.

`where` (of `places`) says which files are whose. No module but the guard's leads to these
functions, and none of them belongs to a class, which `object.__subclasses__` would find.
"""

import os
import re
import sys
import sysconfig
from importlib.machinery import SourceFileLoader
from inspect import CO_GENERATOR
from types import CodeType, FrameType, SimpleNamespace

from _grade.events import (
    CALLED_BY,
    CODE,
    FORKS,
    FRAMES,
    FUNCTIONS_MADE,
    INTROSPECTION_EVENTS,
    LOOK_FOR_OTHERS,
    MAY_LOOK,
    NETWORK,
)


def places(ours: tuple[str, ...]) -> SimpleNamespace:
    """Returns whose files lie where. ours: labs and scripts. made: code objects that were made
    while the submission ran, by their numbers."""
    import torch

    from _grade import ranks

    folders = tuple(folder + os.sep for folder in ours)
    library = sysconfig.get_paths()["stdlib"] + os.sep
    return SimpleNamespace(
        ours=folders, library=library, made={},
        trusted=(*folders, library, sys.prefix + os.sep, sys.base_prefix + os.sep),
        owners=(*folders, os.path.dirname(torch.__file__) + os.sep),
        grader=f"{ours[1]}/_grade/", unpacks=f"{ours[0]}/workers/pickling.py",
        unpickler=ranks.__file__, worker=f"{ours[0]}/workers/worker.py",
        inside=f"{ours[1]}/_grade/inside.py")


def objection(where: SimpleNamespace, event: str, arguments: tuple, frame: FrameType) -> str:
    """Returns what is wrong with an event that this frame raised; or empty."""
    if event in INTROSPECTION_EVENTS and frame.f_code.co_filename == where.unpickler:
        return f"sends what runs code when it is read ({event})"
    if event in INTROSPECTION_EVENTS:
        return _of_introspection(where, event, arguments, frame)
    if event in NETWORK:
        return _of_network(where, arguments[-1], frame)
    if event in FORKS:
        if _called_by_labs(where, frame) or not on_stack(where, frame):
            return ""  # launch starts ranks
        return f"forks the process of the check ({event})"
    return _of_opening(where, arguments[0], frame)


def on_stack(where: SimpleNamespace, frame: FrameType) -> bool:
    """Whether code of the submission is on the stack. Also where it has no frame of labs, torch or
    the grader: a thread whose function is Python's own was started by the submission."""
    owned = False
    while frame:
        if _is_submissions(where, frame):
            return True
        owned = owned or frame.f_code.co_filename.startswith(where.owners)
        frame = frame.f_back
    return not owned


def _is_submissions(where, frame) -> bool:
    code = frame.f_code
    if id(code) in where.made:
        return True
    name = code.co_filename
    if name.startswith("<"):  # dataclasses and the like make such code, on request
        return frame.f_globals.get("__name__") == "__main__" and not name.startswith("<frozen")
    return not name.startswith(where.trusted)


def _is_pythons(where, name) -> bool:
    return name.startswith("<") or name.startswith(where.library) and "-packages" not in name


def _asked_by_submission(where, frame) -> bool:
    """Whether the first code that is not Python's own is the submission's."""
    while frame:
        if _is_submissions(where, frame):
            return True
        if not _is_pythons(where, frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return True


def _called_by_labs(where, frame) -> bool:
    while frame and _is_pythons(where, frame.f_code.co_filename) and \
            not _is_submissions(where, frame):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(where.ours)


def _is_unnamed(where, event, arguments, frame) -> bool:
    """Whether somebody had a library call for them what it does not name itself: a file that calls
    map(exec, ...) names exec, and map's caller is no library then."""
    name = frame.f_code.co_filename
    unpacked = where.unpacks in (name, frame.f_back and frame.f_back.f_code.co_filename)
    if name.startswith(where.grader) or unpacked and event in FUNCTIONS_MADE:
        return False
    if (event in INTROSPECTION_EVENTS and not event.startswith("ctypes.")
            and not _is_submissions(where, frame)):
        word = arguments[1] if event.startswith("object.") else event.rpartition(".")[2]
        names = CALLED_BY.get(event, {word})
        if not names & {*frame.f_code.co_names, *map(str, frame.f_code.co_consts)}:
            return True
    return _is_called_unnamed(where, frame)


def _is_called_unnamed(where, frame) -> bool:
    """The same of the functions of Python's own through which it was called."""
    while (_is_pythons(where, frame.f_code.co_filename) and not _is_submissions(where, frame)
           and frame.f_back and not _is_submissions(where, frame.f_back)):
        callee, caller = frame.f_code, frame.f_back.f_code
        # what goes on in a generator is called by its reader, and labs names it elsewhere
        read = callee.co_flags & CO_GENERATOR and caller.co_filename.startswith(where.ours)
        known = (read or caller.co_filename == callee.co_filename
                 or callee.co_name.startswith("__"))
        python = callee.co_filename.removeprefix(where.library)
        if python.startswith("ctypes/") and not _is_pythons(where, caller.co_filename):
            if not {"ctypes", "CDLL", "PyDLL"} & {*caller.co_names}:
                return True
        elif python.startswith(LOOK_FOR_OTHERS) and not known \
                and callee.co_name not in caller.co_names:
            return True
        frame = frame.f_back
    return False


def _is_an_import(frame) -> bool:
    """Whether Python's own loader reads a file of a module."""
    reads = False
    while frame and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name in ("exec_module", "get_code"):
            loader = frame.f_locals.get("self")
            if type(loader) is not SourceFileLoader or vars(loader).keys() - {"name", "path"}:
                return False
            reads = True
        frame = frame.f_back
    return reads


def _of_introspection(where, event, arguments, frame) -> str:
    name = frame.f_code.co_filename
    if event.startswith("object.") and arguments[1] not in FRAMES | (
            set() if event == "object.__getattr__" else CODE):
        return ""
    if name.startswith("<frozen importlib") and (
            _is_an_import(frame) or not on_stack(where, frame)):
        return ""
    if event == "sys.setprofile" and name.endswith("torch/autograd/profiler.py"):
        return ""  # with torch.profiler.profile(with_stack=True)
    detail = f" ({arguments[1]})" if event.startswith("object.") else f" ({event})"
    if _is_unnamed(where, event, arguments, frame):
        return f"{INTROSPECTION_EVENTS[event]} by a library{detail}"
    asked, python = _asked_by_submission(where, frame), name.removeprefix(where.library)
    if event == "exec" and type(arguments[0]) is CodeType and on_stack(where, frame) and (
            asked or python not in MAY_LOOK):
        _remember(where, arguments[0])
    if not asked or not _is_submissions(where, frame) and _may_look(
            where, event, arguments, frame, python):
        return ""
    return INTROSPECTION_EVENTS[event] + detail


def _may_look(where, event, arguments, frame, python) -> bool:
    """Whether a module of Python's that the submission called does no more than its work."""
    direct = frame.f_back is not None and _is_submissions(where, frame.f_back)
    if event == "exec" and python == "typing.py":  # of an annotation, that makes no function
        return not any(type(each) is CodeType for each in arguments[0].co_consts)
    return (event in ("exec", "sys._getframe", "function.__new__")
            and python in MAY_LOOK or event.startswith("object.") and (
                arguments[1] in CODE or python == "typing.py"  # NamedTuple sets __bases__
                or python == "traceback.py" and not direct)
            or python.startswith(("logging", "traceback.py", "linecache.py")) and not direct)


def _remember(where, code) -> None:
    where.made[id(code)] = code
    for each in code.co_consts:
        if type(each) is CodeType:
            _remember(where, each)


def _of_opening(where, path, frame) -> str:
    """Of files only those matter that lead around Python: the rest bubblewrap keeps out of sight,
    or read-only. Compiled code could say that it lies in a file of ours."""
    if type(path) not in (str, bytes):
        return ""
    path = os.path.abspath(os.fsdecode(path))
    compiled = path.endswith((".pyc", ".so")) and not path.startswith(where.trusted)
    memory = re.fullmatch(r"/proc/(.*/)?(mem|maps|map_files/.*)", path)
    if not (compiled or memory) or not on_stack(where, frame):
        return ""
    return f"uses compiled code, {path}" if compiled else f"opens {path}"


def _of_network(where, address, frame) -> str:
    """What a submission sends itself would count as what its ranks sent each other."""
    return f"opens a socket to {str(address)[:80]}" if _asked_by_submission(where, frame) else ""

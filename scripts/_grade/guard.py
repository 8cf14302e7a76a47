"""Watches what a submission's code does while a check runs it, and ends the exercise with a name.

An audit hook cannot be removed, and what it knows stays in its closure, which only a walk over
frames or over the garbage collector's lists would find: it sees those, too. It distinguishes by
files who calls: the system's, labs' and these, or else the submission's.
"""

import ctypes
import hashlib
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from inspect import CO_GENERATOR
from types import CodeType, FrameType

from _grade import integrity
from _grade.events import (
    ANNOTATION,
    BEGIN,
    CALLED_BY,
    CODE,
    FILES,
    FINISHED,
    FLAGGED,
    FUNCTIONS_MADE,
    INTROSPECTION_EVENTS,
    LISTS,
    LOOK_FOR_OTHERS,
    MAY_LOOK,
    NETWORK,
    NEVER,
    OURS,
    PRIVATE_OF_A_PROCESS,
    RETURNED,
    SEAL,
    SEALED,
    SECRET,
    TELLING,
    VERDICT,
    WATCHED,
    WRITES,
)

EXIT_CODE = 70
MARK = "guard: "  # before what it flags; what else comes on the descriptor is the submission's


def install(alarm: int, ours: tuple[str, ...], own: tuple[str, ...]) -> None:
    """From now on this process, and its forks, name what a submission may not do on the descriptor
    `alarm`, and end. ours: folders whose code is not the submission's. own: folders that it may
    write into. One closure, because its cells are the only place that no code can look into."""
    frame_of, identity, write, leave = _frame_reader(), threading.get_ident, os.write, os._exit
    process, baselines, key, sha256 = os.getpid, {}, os.urandom(16), hashlib.sha256
    judge, on_stack = _judge_of(ours, own)
    new_baseline, deceptive_type = integrity.baseline, integrity.deceptive_type
    main, ranks, worker = identity(), ranks_file(), f"{ours[0]}/workers/worker.py"
    inside, secrets = f"{ours[1]}/_grade/inside.py", []

    def end(why: str):
        try:
            write(alarm, f"{MARK}{why}"[:1000].encode(errors="replace") + b"\n")
        finally:  # the submission may have closed it
            leave(EXIT_CODE)

    def hook(event, arguments):
        # f_code is what this code itself reads; whoever has a frame to read it of is past the guard
        if event not in watched or event == "object.__getattr__" and arguments[1] == "f_code":
            return
        # What this code does raises events, too, which are judged as all others: nothing is let
        # pass meanwhile, also not what a submission's __eq__ does that is called from here.
        try:
            frame = frame_of().f_back
            why = (own_event(event, arguments, frame) if event in own_events else
                   judge(event, arguments, frame))
        except RecursionError:
            raise
        except Exception as error:
            why = f"makes the guard fail at {event} ({type(error).__name__})"
        if why:
            end(why)

    def own_event(event, arguments, frame):
        if event == FLAGGED:
            return str(arguments[0])
        if event == SECRET:  # only the first counts, here too
            secrets[:] = secrets or arguments
            return ""
        if event == VERDICT:
            return verdict(*arguments, frame)
        if event == BEGIN:  # only the first counts: then no code of the submission has run here
            if process() not in baselines:
                baselines[process()] = new_baseline()
            return ""
        if event == SEAL:
            return seal(*arguments, frame)
        if event == SEALED:
            return "" if sealed(arguments[0]) == arguments[1] else "sends a result of its own make"
        found = baselines.get(process())
        if found is None:
            return ""
        return found(event == FINISHED) or (
            deceptive_type(arguments[0]) if event == RETURNED else "")

    def seal(holder, buffers, frame):
        """A result has a seal if a rank's main function has it packed, on its main thread, with no
        code of the submission below."""
        caller = frame.f_back
        if (identity() != main or on_stack(frame) or frame.f_code.co_filename != ranks
                or caller is None or caller.f_code.co_filename != worker
                or caller.f_code.co_name != "main"):
            return "makes a result of its own on a rank"
        holder.append(sealed(buffers))
        return ""

    def verdict(holder, said, frame):
        """What a check said gets its seal where this process's main function asks, and nobody
        else."""
        code = frame.f_code
        if (identity() != main or on_stack(frame) or code.co_filename != inside
                or code.co_name != "main"):
            return "asks for a verdict of its own"
        holder.append(sha256(secrets[0] + said + secrets[0]).hexdigest().encode())
        return ""

    def sealed(buffers):
        found = sha256(key)
        for buffer in buffers:
            found.update(buffer)
        return found.digest()

    watched, own_events = WATCHED, frozenset(OURS)
    sys.addaudithook(hook)


def _frame_reader() -> Callable[[], FrameType]:
    """Returns a function that returns its caller's frame, and raises no audit event: one that had
    to be let pass would be a gap. Its library handle is its own, because a function that was once
    looked up in ctypes.pythonapi stays there for all."""
    library = ctypes.PyDLL(None)
    state, frame = library.PyThreadState_Get, library.PyThreadState_GetFrame
    state.restype, state.argtypes = ctypes.c_void_p, ()
    frame.restype, frame.argtypes = ctypes.py_object, (ctypes.c_void_p,)
    return lambda: frame(state()).f_back


def ranks_file() -> str:
    """The file of what packs the results of ranks."""
    from _grade import ranks

    return ranks.__file__


def torch_file() -> str:
    """The file of torch's package."""
    import torch

    return torch.__file__


def _judge_of(ours, own) -> tuple[Callable, Callable]:
    """(judge(event, arguments, frame): what is wrong with an event, or empty; on_stack(frame):
    whether code of the submission is on the stack). One closure: functions of a module could be
    found there, and replaced."""
    library, unpickler = sysconfig.get_paths()["stdlib"] + os.sep, ranks_file()
    trusted = (*(folder + os.sep for folder in ours), library, sys.prefix + os.sep,
               sys.base_prefix + os.sep)
    owners = (*(folder + os.sep for folder in ours), os.path.dirname(torch_file()) + os.sep)
    grader, unpacks = f"{ours[1]}/_grade/", f"{ours[0]}/workers/pickling.py"
    own = tuple(folder + os.sep for folder in own)
    ours = owners[:-1]
    made = {}  # code objects that were made while the submission ran, by their numbers

    def is_submissions(frame):
        code = frame.f_code
        if id(code) in made:
            return True
        name = code.co_filename
        if name.startswith("<"):  # dataclasses and the like make such code, for whoever asks
            return frame.f_globals.get("__name__") == "__main__" and not name.startswith("<frozen")
        return not name.startswith(trusted)

    def is_pythons(name):
        return name.startswith("<") or name.startswith(library) and "-packages" not in name

    def on_stack(frame):
        """Also where the stack has no frame of labs, torch or the grader: a thread whose function
        is Python's own was started by the submission."""
        owned = False
        while frame:
            if is_submissions(frame):
                return True
            owned = owned or frame.f_code.co_filename.startswith(owners)
            frame = frame.f_back
        return not owned

    def asked_by_submission(frame):
        """Whether the first code that is not Python's own is the submission's."""
        while frame:
            if is_submissions(frame):
                return True
            if not is_pythons(frame.f_code.co_filename):
                return False
            frame = frame.f_back
        return True

    def called_by_labs(frame):
        while frame and is_pythons(frame.f_code.co_filename) and not is_submissions(frame):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(ours)

    def is_unnamed(event, arguments, frame):
        """Whether somebody had a library call for them what it does not name itself: whoever calls
        map(exec, ...) names exec, and map's caller is no library then."""
        name = frame.f_code.co_filename
        unpacked = unpacks in (name, frame.f_back and frame.f_back.f_code.co_filename)
        if name.startswith(grader) or unpacked and event in FUNCTIONS_MADE:
            return False
        if (event in INTROSPECTION_EVENTS and not event.startswith("ctypes.")
                and not is_submissions(frame)):
            word = arguments[1] if event.startswith("object.") else event.rpartition(".")[2]
            names = CALLED_BY.get(event, {word})
            if not names & {*frame.f_code.co_names, *map(str, frame.f_code.co_consts)}:
                return True
        while (is_pythons(frame.f_code.co_filename) and not is_submissions(frame)
               and frame.f_back and not is_submissions(frame.f_back)):
            callee, caller = frame.f_code, frame.f_back.f_code
            # what goes on in a generator is called by whoever reads it, and labs names it elsewhere
            read = callee.co_flags & CO_GENERATOR and caller.co_filename.startswith(ours)
            known = (read or caller.co_filename == callee.co_filename
                     or callee.co_name.startswith("__"))
            python = callee.co_filename.removeprefix(library)
            if python.startswith("ctypes/") and not is_pythons(caller.co_filename):
                if not {"ctypes", "CDLL", "PyDLL"} & {*caller.co_names}:
                    return True
            elif python.startswith(LOOK_FOR_OTHERS) and not known \
                    and callee.co_name not in caller.co_names:
                return True
            frame = frame.f_back
        return False

    def is_an_import(frame):
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

    def look(event, arguments, frame):
        name = frame.f_code.co_filename
        if event.startswith("object.") and arguments[1] not in TELLING:
            return ""
        if name.startswith("<frozen importlib") and (is_an_import(frame) or not on_stack(frame)):
            return ""
        detail = f" ({arguments[1]})" if event.startswith("object.") else f" ({event})"
        if is_unnamed(event, arguments, frame):
            return f"{INTROSPECTION_EVENTS[event]} by a library{detail}"
        asked, python = asked_by_submission(frame), name.removeprefix(library)
        if event == "exec" and type(arguments[0]) is CodeType and on_stack(frame) and (
                asked or python not in MAY_LOOK):
            remember(arguments[0])
        if not asked or not is_submissions(frame) and may_look(event, arguments, frame, python):
            return ""
        return INTROSPECTION_EVENTS[event] + detail

    def may_look(event, arguments, frame, python):
        """Whether a module of Python's that the submission called does no more than its work."""
        direct = frame.f_back is not None and is_submissions(frame.f_back)
        if event == "compile" and python == "typing.py":
            return type(arguments[0]) is str and ANNOTATION.fullmatch(arguments[0]) is not None
        return (event in ("exec", "compile", "sys._getframe", "function.__new__")
                and python in MAY_LOOK or event.startswith("object.") and (
                    arguments[1] in CODE or python == "traceback.py" and not direct)
                or python.startswith("logging") and not direct)

    def remember(code):
        made[id(code)] = code
        for each in code.co_consts:
            if type(each) is CodeType:
                remember(each)

    def file(event, arguments, frame):
        path = arguments[0]
        if type(path) is int or path is None or not on_stack(frame):
            return ""
        if type(path) not in (str, bytes):  # its methods would be the submission's
            return f"names a file by an object of its own ({event})"
        path = os.path.abspath(os.fsdecode(path))
        below = path + os.sep
        if below.startswith(own) and not below.startswith(ours):
            return f"uses compiled code, {path}" if path.endswith((".pyc", ".so")) else ""
        if event != "open":
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return ""
            return f"calls {event} on {path}" if asked_by_submission(frame) else ""
        flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
        if flags & WRITES:
            return "" if path.startswith("/dev/") else f"writes {path}"
        if path.startswith("/proc/"):
            secret = any(part in PRIVATE_OF_A_PROCESS for part in path.split("/")[3:])
            return f"opens {path}" if secret and asked_by_submission(frame) else ""
        if below.startswith(ours):
            return f"reads {path}" if asked_by_submission(frame) else ""
        return "" if path.startswith((*trusted, "/dev/", "/etc/", "/usr/", "/lib", "/sys/")) \
            else f"opens {path}"

    def network(event, arguments, frame):
        address = arguments[1] if event in ("socket.connect", "socket.bind", "socket.sendto") \
            else arguments[0]
        host = address[0] if isinstance(address, tuple) else address
        if event == "socket.connect" and not isinstance(address, tuple):
            return "opens a socket" if asked_by_submission(frame) else ""
        if asked_by_submission(frame) or on_stack(frame) and host not in (
                None, "", "localhost", "127.0.0.1", "::1"):
            return f"opens a socket ({event} {host})"
        return ""

    def judge(event, arguments, frame):
        if event in INTROSPECTION_EVENTS and frame.f_code.co_filename == unpickler:
            return f"sends what runs code when it is read ({event})"
        if event in NEVER:
            return f"{NEVER[event]} ({event})"
        if event in INTROSPECTION_EVENTS:
            return look(event, arguments, frame)
        if event in NETWORK:
            return network(event, arguments, frame)
        if event == "open" or event in FILES or event in LISTS:
            return file(event, arguments, frame)
        what = str(arguments[0])[:80] if arguments and type(arguments[0]) in (str, int) else ""
        if not is_unnamed(event, arguments, frame) and (
                called_by_labs(frame) or not on_stack(frame)):  # launch starts and ends ranks
            return ""
        return f"starts or ends a process ({event} {what})"

    return judge, on_stack

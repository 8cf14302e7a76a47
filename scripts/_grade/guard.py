"""Watches what a submission's code does while a check runs it, and ends the exercise with a name.

An audit hook cannot be removed, and what it knows stays in its closure, which only a walk over
frames or over the garbage collector's lists would find: it sees those, too. It distinguishes by
files who calls: the system's, labs' and these, or else the submission's.
"""

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

from _grade import integrity, rules
from _grade.events import (
    BEGIN,
    FINISHED,
    OURS,
    REFUSED,
    RETURNED,
    SEAL,
    SEALED,
    SECRET,
    VERDICT,
    WATCHED,
)

EXIT_CODE = 70
# Before what it says; what else comes on the descriptor is the submission's. Forged is what was
# seen: something of ours that was replaced, a result or a verdict that nobody else makes.
FORGED, NOT_ALLOWED = "forged: ", "not allowed: "


def install(alarm: int, ours: tuple[str, ...]) -> None:
    """From now on this process, and its forks, name what a submission may not do on the descriptor
    `alarm`, and end. ours: folders whose code is not the submission's. One closure, because its
    cells are the only place that no code can look into."""
    frame_of, identity, write, leave = _frame_reader(), threading.get_ident, os.write, os._exit
    process, baselines, key, sha256 = os.getpid, {}, os.urandom(16), hashlib.sha256
    where, objection, on_stack = rules.places(ours), rules.objection, rules.on_stack
    new_baseline, deceptive_type = integrity.baseline, integrity.deceptive_type
    main, secrets = identity(), []

    def end(why: str):
        try:
            write(alarm, why[:1000].encode(errors="replace") + b"\n")
        finally:  # the submission may have closed it
            leave(EXIT_CODE)

    def hook(event, arguments):
        # f_code is what this code itself reads; code with a frame is past the guard
        if event not in watched or event == "object.__getattr__" and arguments[1] == "f_code":
            return
        # What this code does raises events, too, which are judged as all others: nothing is let
        # pass meanwhile, also not what a submission's __eq__ does that is called from here.
        try:
            frame = frame_of().f_back
            why = own_event(event, arguments, frame) if event in own_events else not_allowed(
                objection(where, event, arguments, frame))
        except RecursionError:
            raise
        except Exception as error:
            why = not_allowed(f"makes the guard fail at {event} ({type(error).__name__})")
        if why:
            end(why)

    def forged(why):
        return why and f"{FORGED}{why}"

    def not_allowed(why):
        return why and f"{NOT_ALLOWED}{why}"

    def own_event(event, arguments, frame):
        if event == REFUSED:
            return not_allowed(str(arguments[0]))
        if event == SECRET:  # only the first counts, here too
            secrets[:] = secrets or arguments
            return ""
        if event == VERDICT:
            return forged(verdict(*arguments, frame))
        if event == BEGIN:  # only the first counts: then no code of the submission has run here
            if process() not in baselines:
                baselines[process()] = new_baseline()
            return ""
        if event == SEAL:
            return forged(seal(*arguments, frame))
        if event == SEALED:
            return "" if sealed(arguments[0]) == arguments[1] else forged(
                "sends a result of its own make")
        if process() not in baselines:
            return ""
        changed, deceptive = baselines[process()]
        return forged(changed(event == FINISHED)) or not_allowed(deceptive()) or (
            not_allowed(deceptive_type(arguments[0])) if event == RETURNED else "")

    def seal(holder, buffers, frame):
        """A result has a seal if a rank's main function has it packed, on its main thread, with no
        code of the submission below."""
        caller = frame.f_back
        if (identity() != main or on_stack(where, frame) or caller is None
                or frame.f_code.co_filename != where.unpickler
                or caller.f_code.co_filename != where.worker or caller.f_code.co_name != "main"):
            return "makes a result of its own on a rank"
        holder.append(sealed(buffers))
        return ""

    def verdict(holder, said, frame):
        """What a check said gets its seal where this process's main function asks, and nobody
        else."""
        code = frame.f_code
        if (identity() != main or on_stack(where, frame) or code.co_filename != where.inside
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

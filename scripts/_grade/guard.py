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
from types import FrameType

from _grade import integrity

BEGIN, RETURNED, FINISHED, NAMED, SEAL, SEALED = (
    "workbook.begin", "workbook.returned", "workbook.finished", "workbook.named", "workbook.seal",
    "workbook.sealed")
EXIT_CODE = 70
MARK = "guard: "  # before what it names; what else comes on the descriptor is the submission's

# What only a look into the interpreter needs; wrong where the submission's code asks for it.
_LOOKS = {"sys._getframe": "walks the stack", "sys._current_frames": "walks the stack",
          "sys._current_exceptions": "walks the stack", "sys.settrace": "traces other code",
          "sys.setprofile": "traces other code", "gc.get_objects": "searches the memory",
          "gc.get_referrers": "searches the memory", "gc.get_referents": "searches the memory",
          "object.__getattr__": "looks into frames or code",
          "object.__setattr__": "changes a function's code",
          "object.__delattr__": "changes a function's code", "code.__new__": "makes code objects",
          "function.__new__": "makes functions of code objects", "compile": "compiles code",
          "exec": "runs code that is made while it runs", "marshal.loads": "loads compiled code",
          "marshal.load": "loads compiled code", **dict.fromkeys(
              ("ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle", "ctypes.string_at",
               "ctypes.wstring_at", "ctypes.cdata", "ctypes.cdata/buffer", "ctypes.addressof",
               "ctypes.call_function", "ctypes.create_string_buffer", "ctypes.PyObj_FromPtr"),
              "reaches around Python")}
# Wrong wherever the submission's code is on the stack.
_PROCESSES = {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
              "subprocess.Popen", "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill"}
_NEVER = {"os.system": "starts a program", "os.exec": "starts a program",
          "pty.spawn": "starts a program", "sys.addaudithook": "adds an audit hook"}
_FILES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link",
          "os.symlink", "os.truncate", "os.utime", "shutil.rmtree", "os.chflags", "os.lockf"}
_NETWORK = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo",
            "socket.gethostbyname", "socket.gethostbyaddr"}
_LISTS = {"os.listdir", "os.scandir", "glob.glob"}
_OURS = {BEGIN, RETURNED, FINISHED, NAMED, SEAL, SEALED}
_WATCHED = frozenset({*_LOOKS, *_PROCESSES, *_NEVER, *_FILES, *_NETWORK, *_LISTS, *_OURS, "open"})
# Modules of Python that look at their caller's frame for a name, and hand no frame out.
_MAY_LOOK = {"collections/__init__.py", "typing.py", "enum.py", "dataclasses.py", "warnings.py"}
_CODE = {"__code__", "__defaults__", "__kwdefaults__"}
_TELLING = _CODE | {"tb_frame", "gi_frame", "gi_code", "cr_frame", "cr_code", "ag_frame", "ag_code",
                    "__bases__"}
_PRIVATE_OF_A_PROCESS = ("mem", "environ", "maps", "map_files", "fd", "root", "cwd", "task")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def install(alarm: int, ours: tuple[str, ...], own: tuple[str, ...]) -> None:
    """From now on this process, and its forks, name what a submission may not do on the descriptor
    `alarm`, and end. ours: folders whose code is not the submission's. own: folders that it may
    write into."""
    frame_of, identity, write, leave = _frame_reader(), threading.get_ident, os.write, os._exit
    process, baselines, key, sha256 = os.getpid, {}, os.urandom(16), hashlib.sha256
    judge, on_stack = _judge_of(ours, own)
    new_baseline, lie = integrity.baseline, integrity.lie
    main, ranks, worker = identity(), ranks_file(), f"{ours[0]}/workers/worker.py"

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
        if event == NAMED:
            return str(arguments[0])
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
        return found(event == FINISHED) or (lie(arguments[0]) if event == RETURNED else "")

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

    def sealed(buffers):
        found = sha256(key)
        for buffer in buffers:
            found.update(buffer)
        return found.digest()

    watched, own_events = _WATCHED, frozenset(_OURS)
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


def _judge_of(ours, own) -> tuple[Callable, Callable]:
    """(judge(event, arguments, frame): what is wrong with an event, or empty; on_stack(frame):
    whether code of the submission is on the stack)."""
    library, unpickler = sysconfig.get_paths()["stdlib"] + os.sep, ranks_file()
    trusted = (*(folder + os.sep for folder in ours), library, sys.prefix + os.sep,
               sys.base_prefix + os.sep)

    def is_submissions(frame):
        name = frame.f_code.co_filename
        if name.startswith("<"):  # dataclasses and the like make such code, for whoever asks
            return frame.f_globals.get("__name__") == "__main__" and not name.startswith("<frozen")
        return not name.startswith(trusted)

    def is_pythons(name):
        return name.startswith("<") or name.startswith(library) and "-packages" not in name

    def on_stack(frame):
        while frame:
            if is_submissions(frame):
                return True
            frame = frame.f_back
        return False

    def asked_by_submission(frame):
        """Whether the first code that is not Python's own is the submission's."""
        while frame:
            if is_submissions(frame):
                return True
            if not is_pythons(frame.f_code.co_filename):
                return False
            frame = frame.f_back
        return False

    def called_by_labs(frame):
        while frame and is_pythons(frame.f_code.co_filename) and not is_submissions(frame):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(ours)

    def look(event, arguments, frame):
        name = frame.f_code.co_filename
        if not asked_by_submission(frame) or name.startswith("<frozen importlib") or \
                event.startswith("object.") and arguments[1] not in _TELLING:
            return ""
        if not is_submissions(frame):
            python = name.removeprefix(library)
            direct = frame.f_back is not None and is_submissions(frame.f_back)
            if (event in ("exec", "compile", "sys._getframe", "function.__new__")
                    and python in _MAY_LOOK or event.startswith("object.") and (
                        arguments[1] in _CODE or python == "traceback.py" and not direct)
                    or python.startswith("logging") and not direct):
                return ""
        detail = f" ({arguments[1]})" if event.startswith("object.") else f" ({event})"
        return _LOOKS[event] + detail

    def file(event, arguments, frame):
        path = arguments[0]
        if type(path) is int or path is None or not on_stack(frame):
            return ""
        if type(path) not in (str, bytes):  # its methods would be the submission's
            return f"names a file by an object of its own ({event})"
        path = os.path.abspath(os.fsdecode(path))
        if path.startswith(own):
            return f"uses compiled code, {path}" if path.endswith((".pyc", ".so")) else ""
        if event != "open":
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return ""
            return f"calls {event} on {path}" if asked_by_submission(frame) else ""
        flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
        if flags & _WRITES:
            return "" if path.startswith("/dev/") else f"writes {path}"
        if path.startswith("/proc/"):
            secret = any(part in _PRIVATE_OF_A_PROCESS for part in path.split("/")[3:])
            return f"opens {path}" if secret and asked_by_submission(frame) else ""
        if path.startswith(ours):
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
        if event in _LOOKS and frame.f_code.co_filename == unpickler:
            return f"sends what runs code when it is read ({event})"
        if event in _NEVER:
            return f"{_NEVER[event]} ({event})"
        if event in _LOOKS:
            return look(event, arguments, frame)
        if event in _NETWORK:
            return network(event, arguments, frame)
        if event == "open" or event in _FILES or event in _LISTS:
            return file(event, arguments, frame)
        what = str(arguments[0])[:80] if arguments and type(arguments[0]) in (str, int) else ""
        if called_by_labs(frame) or not on_stack(frame):  # launch starts and ends ranks
            return ""
        return f"starts or ends a process ({event} {what})"

    return judge, on_stack

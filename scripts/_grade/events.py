"""The audit events that the guard judges, and what it holds against them."""

import os
import re

BEGIN, RETURNED, FINISHED, FLAGGED, SEAL, SEALED, SECRET, VERDICT = (
    "workbook.begin", "workbook.returned", "workbook.finished", "workbook.flagged",
    "workbook.seal", "workbook.sealed", "workbook.secret", "workbook.verdict")
SEPARATOR = b"\x1f"  # between the parts of a verdict

# What only a look into the interpreter needs; wrong where the submission's code asks for it.
INTROSPECTION_EVENTS = {
    "sys._getframe": "walks the stack", "sys._current_frames": "walks the stack",
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
PROCESSES = {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
              "subprocess.Popen", "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill"}
NEVER = {"os.system": "starts a program", "os.exec": "starts a program",
          "pty.spawn": "starts a program", "sys.addaudithook": "adds an audit hook"}
FILES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link",
          "os.symlink", "os.truncate", "os.utime", "shutil.rmtree", "os.chflags", "os.lockf"}
NETWORK = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo",
            "socket.gethostbyname", "socket.gethostbyaddr"}
LISTS = {"os.listdir", "os.scandir", "glob.glob"}
OURS = {BEGIN, RETURNED, FINISHED, FLAGGED, SEAL, SEALED, SECRET, VERDICT}
WATCHED = frozenset({*INTROSPECTION_EVENTS, *PROCESSES, *NEVER, *FILES, *NETWORK, *LISTS,
                      *OURS, "open"})
# Modules of Python that look at their caller's frame for a name, and hand no frame out.
MAY_LOOK = {"collections/__init__.py", "typing.py", "enum.py", "dataclasses.py", "warnings.py"}
# Modules of Python whose functions look around or start programs for their caller.
LOOK_FOR_OTHERS = ("inspect.py", "traceback.py", "ctypes/", "code.py", "codeop.py", "bdb.py",
                    "pdb.py", "runpy.py", "timeit.py", "trace.py", "profile.py", "doctest.py",
                    "os.py", "subprocess.py")
# What code that raises an event itself calls it by, where that is not the event's last word.
CALLED_BY = {"exec": {"exec", "eval"}, "compile": {"compile", "exec", "eval"},
              "function.__new__": {"FunctionType", "LambdaType"},
              "code.__new__": {"CodeType", "replace"}}
# What unpickling a function does; deleting is setting a default to None.
FUNCTIONS_MADE = {"code.__new__", "function.__new__", "object.__setattr__", "object.__delattr__"}
ANNOTATION = re.compile(r"[\w.\[\], |'\"]*")
CODE = {"__code__", "__defaults__", "__kwdefaults__"}
TELLING = CODE | {"tb_frame", "gi_frame", "gi_code", "cr_frame", "cr_code", "ag_frame", "ag_code",
                    "__bases__"}
PRIVATE_OF_A_PROCESS = ("mem", "environ", "maps", "map_files", "fd", "root", "cwd", "task")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

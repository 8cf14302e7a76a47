"""The audit events that the guard judges, and what it holds against them."""

BEGIN, RETURNED, FINISHED, REFUSED, SEAL, SEALED, SECRET, VERDICT = (
    "workbook.begin", "workbook.returned", "workbook.finished", "workbook.refused",
    "workbook.seal", "workbook.sealed", "workbook.secret", "workbook.verdict")
SEPARATOR = b"\x1f"  # between the parts of a verdict

# What only a look into the interpreter needs, by which the numbers that a check wants could be
# found, or its code changed; refused where the submission's code asks for it.
INTROSPECTION_EVENTS = {
    "sys._getframe": "walks the stack", "sys._current_frames": "walks the stack",
    "sys._current_exceptions": "walks the stack", "sys.settrace": "traces other code",
    "sys.setprofile": "traces other code", "sys.addaudithook": "adds an audit hook",
    "gc.get_objects": "searches the memory",
    "gc.get_referrers": "searches the memory", "gc.get_referents": "searches the memory",
    "object.__getattr__": "looks into frames or code",
    "object.__setattr__": "changes a function's code",
    "object.__delattr__": "changes a function's code", "code.__new__": "makes code objects",
    "function.__new__": "makes functions of code objects",
    "exec": "runs code that is made while it runs", "marshal.loads": "loads compiled code",
    "marshal.load": "loads compiled code", **dict.fromkeys(
        ("ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle", "ctypes.string_at",
         "ctypes.wstring_at", "ctypes.cdata", "ctypes.cdata/buffer", "ctypes.addressof",
         "ctypes.call_function", "ctypes.create_string_buffer", "ctypes.PyObj_FromPtr"),
        "reaches around Python")}
# A copy of the check's process would go on with the check, unwatched. A program cannot.
FORKS = {"os.fork", "os.forkpty"}
# The bytes on the loopback interface are evidence (evidence).
NETWORK = {"socket.connect", "socket.bind", "socket.sendto"}
OURS = {BEGIN, RETURNED, FINISHED, REFUSED, SEAL, SEALED, SECRET, VERDICT}
WATCHED = frozenset({*INTROSPECTION_EVENTS, *FORKS, *NETWORK, *OURS, "open"})
# Modules of Python that look at their caller's frame for a name, and hand no frame out.
MAY_LOOK = {"collections/__init__.py", "typing.py", "enum.py", "dataclasses.py", "warnings.py"}
# Modules of Python whose functions look around for their caller.
LOOK_FOR_OTHERS = ("inspect.py", "traceback.py", "ctypes/", "code.py", "codeop.py", "bdb.py",
                   "pdb.py", "runpy.py", "timeit.py", "trace.py", "profile.py", "doctest.py")
# What code that raises an event itself calls it by, where that is not the event's last word.
CALLED_BY = {"exec": {"exec", "eval"},
             "function.__new__": {"FunctionType", "LambdaType"},
             "code.__new__": {"CodeType", "replace"}}
# What unpickling a function does; deleting is setting a default to None.
FUNCTIONS_MADE = {"code.__new__", "function.__new__", "object.__setattr__", "object.__delattr__"}
CODE = {"__code__", "__defaults__", "__kwdefaults__"}  # to read them changes nothing
FRAMES = {"tb_frame", "gi_frame", "gi_code", "cr_frame", "cr_code", "ag_frame", "ag_code",
          "__bases__"}

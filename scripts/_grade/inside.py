"""In the namespaces: defines what a submission defines, calls our check, and says its verdict.

The verdict leaves on a descriptor that only this process has, with a seal made from a secret that
came before the submission's first line, and that only the guard's closure knows. After a check has
passed, a lazy answer must be rejected by the same check: else something of it was replaced.
"""

import ast
import inspect
import json
import linecache
import os
import random
import socket
import sys
import types
from collections.abc import Callable
from importlib import import_module
from multiprocessing import forkserver
from typing import Any

from _grade import guard, namespaces, ranks
from _grade.events import SEPARATOR

_WRAPPER = """
def wrapped(*arguments, **named):
    result = answer(*arguments, **named)
    audit(returned, result)
    return result
"""


def main(job: int, verdict: int, alarm: int, root: str) -> None:
    """Grades the exercise that comes on the descriptor `job`; never returns."""
    send, leave, audit = os.write, os._exit, sys.audit
    ranks.prepare()
    guard.install(alarm, (f"{root}/labs", f"{root}/scripts"))
    sys.modules["__main__"] = types.ModuleType("__main__")  # that of the zygote leads to all this
    start_fork_server(close=(job, verdict))
    ranks.restrict()
    _hide_ourselves()
    audit(guard.SECRET, os.read(job, 32))
    with open(job, "rb") as file:
        work = json.load(file)
    random.seed(0)
    sys.modules["torch"].manual_seed(0)
    sys.modules["numpy"].random.seed(0)
    sys.audit(guard.BEGIN)
    passed, sentence, hint = _graded(work)
    sys.audit(guard.FINISHED)
    # only C functions and exact types from here on: they cannot have been replaced
    said = SEPARATOR.join([b"1" if passed is True else b"0" if passed is False else b"-",
                           sentence.encode(errors="replace"), hint.encode(errors="replace")])
    audit("workbook.verdict", holder := [], said)
    send(verdict, holder[0] + SEPARATOR + said)
    leave(0)


def _hide_ourselves():
    """No module of the grader can be found from here on: what they know could be changed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "_grade"]:
        del sys.modules[name]
    vars(namespaces).clear()


def start_fork_server(close: tuple[int, ...]) -> None:
    """Starts the fork server that ranks come from, as a fork of this process, which has imported
    everything: a new Python would take seconds to do so."""
    from multiprocessing import resource_tracker, util

    ranks.meet_in_a_file()
    address = os.path.join(util.get_temp_dir(), "forkserver")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive, ours = os.pipe()
    resource_tracker.ensure_running()
    process = os.fork()
    if process == 0:
        namespaces.die_with_parent()
        for descriptor in (*close, ours):
            os.close(descriptor)
        _hide_ourselves()
        try:
            forkserver.main(listener.fileno(), alive, [])
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, ours
    server._forkserver_pid = process


def _graded(work) -> tuple[bool | None, str, str]:
    """(passed, sentence, hint)."""
    if "probe" in work:
        return True, "", ""
    from labs.checks import verdicts

    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    package = import_module(work["package"])
    check, arguments = getattr(package, work["check"]), work["arguments"]
    try:
        for cell in work["cells"]:
            if why := _define(cell, module):
                return False, why, ""
        answers = [eval(compile(ast.parse(text, mode="eval"), "<graded>", "eval"), vars(module))
                   for text in arguments]
    except BaseException as error:
        return False, _why(error), ""
    if early := next((one for one in answers if type(one) is verdicts.Verdict
                      and one.passed is not True), None):  # on work of an earlier notebook
        return None, str.__str__(early.sentence), str.__str__(early.hint)
    if any(isinstance(answer, verdicts.Verdict) for answer in answers):
        sys.audit(guard.REFUSED, "hands in a verdict instead of an answer")
    _watch_classes([*vars(module).values(), *answers])
    try:
        verdict = check(*(_watched(answer) for answer in answers))
    except BaseException as error:  # of no line of the submission's
        return False, f"the check could not go on: {_why(error)}", ""
    if type(verdict) is not verdicts.Verdict:
        sys.audit(guard.REFUSED, "hands in a verdict instead of an answer")
    if verdict.passed is not True:
        return verdict.passed, str.__str__(verdict.sentence), str.__str__(verdict.hint)
    if check(*map(_lazy, answers)).passed is True:
        sys.audit(guard.REFUSED, "makes the check accept a lazy answer")
    return True, str.__str__(verdict.sentence), ""


def _define(cell, module) -> str:
    """Runs the statements of a cell that the exercise needs, or writes the script that it is.
    Returns why it could not be compiled, or nothing."""
    name, source = cell["name"], cell["source"]
    if cell["file"]:
        with open(cell["file"], "w", encoding="utf-8") as file:
            file.write(source)
        return ""
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    tree = ast.parse(source, name)
    tree.body = [tree.body[number] for number in cell["keep"]]
    try:
        code = compile(tree, name, "exec")
    except RecursionError:
        return f"{name} is nested too deeply to be run"
    exec(code, vars(module))
    return ""


def _why(error) -> str:
    """What defining the answer raised, and the submission's line."""
    from labs.checks.student_code import message_of, own_place

    place = own_place(error)
    where = f"\n    {place}:  {place.source}" if place else ""
    return f"{message_of(error)}{where}"


def _watched(answer) -> Any:
    """The answer; a function tells after each call what it returned, so that what it replaced is
    found before the check goes on."""
    if not isinstance(answer, types.FunctionType):
        return answer
    space = {"answer": answer, "audit": sys.audit, "returned": guard.RETURNED}
    code = compile(_WRAPPER, "<graded>", "exec").co_consts[0]
    return _dressed(types.FunctionType(code, space), answer)


def _watch_classes(values) -> None:
    """The same for classes of the submission that a check makes objects of and calls."""
    import torch

    for kind in {value for value in values if isinstance(value, type)}:
        if kind.__module__ == "__main__" and issubclass(kind, torch.nn.Module
                                                        | torch.optim.Optimizer):
            for name in ("__init__", "__call__", "forward", "step"):
                if isinstance(method := vars(kind).get(name), types.FunctionType):
                    setattr(kind, name, _watched(method))


def _dressed(function, like) -> Callable:
    """The function under another's name and signature, as `functools.wraps` does it."""
    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(function, name, getattr(like, name, None))
    function.__module__ = "__main__"
    function.__signature__ = inspect.signature(like)
    return function


def _lazy(answer) -> Any:
    """An answer of the same kind that is wrong: it returns its first argument, of a list its first
    item; or it is nothing."""
    def lazy(*arguments, **named):
        first = next(iter([*arguments, *named.values()]), None)
        return first[0] if type(first) in (list, tuple) and first else first

    if isinstance(answer, types.FunctionType):
        return _dressed(lazy, answer)
    if callable(answer):
        lazy.__module__ = "__main__"
        return lazy
    return {str: "", int: -1, float: -1.0, list: [], dict: {}}.get(type(answer))


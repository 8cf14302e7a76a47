"""In the namespaces, in exercises that are judged apart: defines what a submission defines, and
calls it for the judge. Nothing here is a secret, and nothing that is done to it forges a verdict:
what leaves this process is plain data, which the judge compares with its own.
"""

import ast
import importlib
import json
import linecache
import os
import random
import sys
import types

from _grade import inside, plain_kinds, remote, started


def main(job: int, link: int) -> None:
    """Reads the job, and answers on the descriptor `link`; never returns."""
    inside.start_fork_server(close=(job, link))  # a cell may launch ranks
    with open(job, "rb") as file:
        work = json.load(file)
    random.seed(0)
    sys.modules["torch"].manual_seed(0)
    sys.modules["numpy"].random.seed(0)
    plain_kinds.modules = importlib.import_module
    judge = remote.Link(link)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        for cell in work["cells"]:
            define(cell, module)
        answers = [eval(compile(ast.parse(text, mode="eval"), "<graded>", "eval"), vars(module))
                   for text in work["arguments"]]
    except BaseException as error:
        judge.send(remote.pack_exception(error))
        os._exit(0)
    remote.serve(judge, answers, started.starts())
    os._exit(0)


def write_script(cell: dict) -> None:
    """Writes the script that a cell is."""
    with open(cell["file"], "w", encoding="utf-8", errors="replace") as file:
        file.write(cell["source"])


def define(cell: dict, module: types.ModuleType) -> None:
    """Runs the statements of a cell that the exercise needs."""
    name, source = cell["name"], cell["source"]
    if cell["file"]:  # a script: nothing of it runs here
        return write_script(cell)
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    tree = ast.parse(source, name)
    tree.body = [tree.body[number] for number in cell["keep"]]
    try:
        code = compile(tree, name, "exec")
    except RecursionError:
        raise RecursionError(f"{name} is nested too deeply to be run") from None
    exec(code, vars(module))

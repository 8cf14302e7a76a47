"""The lines of labs that only a machine with GPUs reaches, and which of them were run.

A statement is a GPU's if it stands in a module or function that is one's (`MODULES`, `FUNCTIONS`),
or if, where there is no GPU, a condition above it is false: `if devices.gpus(): ...`; not if it is
true. A private function is, if nothing else than such statements names it.

With PRETEND_LINES, a directory, every Python process that imports labs notes there which of them it
runs, each at its first time: ranks are killed at their end, so nothing could be written then, and
a tracer, as coverage's, would slow down torch's code too.
"""

import ast
import marshal
import os
import re
from functools import cache
from pathlib import Path
from types import CodeType

from import_hooks import spec_by_others

ROOT = Path(__file__).resolve().parents[3]
MODULES = ("workers/cuda", "workers/nccl", "workers/flight_recorder", "meters/gpu_allocator",
           "meters/host_copies", "meters/trace_gpu", "checks/gpu_notes")
FUNCTIONS = {"memory_math/measurements": {"measure_gpu_memory", "_gpu_moments", "_gpu_moment"},
             "fsdp/node_run": {"_name_and_memory", "measure", "run", "run_alone", "_started",
                                   "_build", "_held"}}
# What an expression is where there is no GPU; whatever is not found here is unknown.
FALSE = re.compile(
    r"(devices\.|cuda\.)?(gpus|count|has_nccl|are_shared|on_gpus_of_their_own)\([^()]*\)"
    r"|[\w.]*is_on_gpu\([^()]*\)|[\w.()]*\.type == 'cuda'|[\w.()]*\.type != 'cpu'"
    r"|(config\.)?device != 'cpu'|_gpu is not None|of_gpu|_GPU_SIGNS\.search\(\w+\)"
    r"|on_gpu|gpus|is_on_gpu|self\.has_nccl"
    r"|[\w.()]*\.library == 'nccl'|((devices\.)?gpus\(\)|gpus) > [01]")
TRUE = re.compile(
    r"[\w.()]*\.type == 'cpu'|[\w.()]*\.type != 'cuda'|(gpus|(devices\.)?gpus\(\)) == 0")
CODE = "code"  # folder in PRETEND_LINES: what is executed in place of each file
IN_WORKERS = re.compile(r"not found|device == 'cpu'")  # true there


def value(test: ast.expr, in_workers: bool = False) -> bool | None:
    """Whether a condition holds where there is no GPU; None: that depends on something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = value(test.operand, in_workers)
        return _of_text(test, in_workers) if found is None else not found
    if isinstance(test, ast.BoolOp):
        values = [value(each, in_workers) for each in test.values]
        decides = isinstance(test.op, ast.Or)
        return decides if decides in values else None if None in values else not decides
    return _of_text(test, in_workers)


def _of_text(test, in_workers):
    text = ast.unparse(test)
    is_true = TRUE.fullmatch(text) or in_workers and IN_WORKERS.fullmatch(text)
    return True if is_true else False if FALSE.fullmatch(text) else None


@cache
def lines_of(path: Path) -> frozenset[int]:
    """The GPU's lines of a file of labs: the first line of each statement."""
    name = str(path.relative_to(ROOT / "labs").with_suffix(""))
    tree = ast.parse(path.read_text())
    whole = name.startswith(MODULES)
    functions = set() if whole else set(FUNCTIONS.get(name, ()))
    while True:
        found = _Finder(functions, whole, name.startswith("workers/"))
        found.visit(tree)
        more = (found.private & found.used) - found.elsewhere
        if whole or more <= functions:
            return frozenset(found.lines)
        functions |= more


class _Finder(ast.NodeVisitor):
    """Walks through a module. lines: the GPU's. private: the names of its private functions. used,
    elsewhere: names that the GPU's lines have, and that others have."""

    def __init__(self, functions, whole, in_workers):
        self.functions, self.whole, self.in_workers = functions, whole, in_workers
        self.lines, self.private, self.used, self.elsewhere = set(), set(), set(), set()
        self.on_gpu = self.in_function = False

    def visit_FunctionDef(self, node):
        if node.name.startswith("_") and not node.name.startswith("__"):
            self.private.add(node.name)
        before = self.on_gpu, self.in_function
        for each in (*node.decorator_list, *node.args.defaults):
            self.visit(each)
        self.in_function = True
        self.on_gpu |= self.whole or node.name in self.functions
        self._block(node.body[ast.get_docstring(node, clean=False) is not None:])
        self.on_gpu, self.in_function = before

    def _block(self, statements):
        """The statements of one block, one after the other."""
        before = self.on_gpu
        for statement in statements:
            if self.on_gpu and self.in_function:
                self.lines.add(statement.lineno)
            if isinstance(statement, ast.If):
                self._if(statement)
            else:
                self.visit(statement)
        self.on_gpu = before

    def _if(self, node):
        self.visit(node.test)
        found, before = value(node.test, self.in_workers), self.on_gpu
        for block, is_taken in ((node.body, True), (node.orelse, False)):
            self.on_gpu = before if found is None else found is not is_taken
            self._block(block)
        # What follows a block that the CPU takes, and that ends function or turn, is the GPU's.
        taken = {True: node.body, False: node.orelse}.get(found) or [None]
        self.on_gpu = before or isinstance(taken[-1], ast.Return | ast.Raise | ast.Continue)

    def visit_IfExp(self, node):
        self.visit(node.test)
        found, before = value(node.test, self.in_workers), self.on_gpu
        self.on_gpu = before or found is False
        self.visit(node.body)
        self.on_gpu = before or found is True
        self.visit(node.orelse)
        self.on_gpu = before

    def generic_visit(self, node):
        for field, child in ast.iter_fields(node):
            if field in ("body", "orelse", "finalbody") and isinstance(child, list):
                self._block(child)
            elif isinstance(child, list):
                for each in child:
                    if isinstance(each, ast.AST):
                        self.visit(each)
            elif isinstance(child, ast.AST):
                self.visit(child)

    def visit_Name(self, node):
        (self.used if self.on_gpu else self.elsewhere).add(node.id)

    def visit_Attribute(self, node):
        (self.used if self.on_gpu else self.elsewhere).add(node.attr)
        self.visit(node.value)


def all_lines() -> dict[str, frozenset[int]]:
    """File of labs -> the GPU's lines in it, of all files that have some."""
    found = {str(path.relative_to(ROOT)): lines_of(path)
             for path in sorted((ROOT / "labs").rglob("*.py"))}
    return {name: lines for name, lines in found.items() if lines}


class _Marker(ast.NodeTransformer):
    """Puts a call before each statement that is to be noted."""

    def __init__(self, lines):
        self.lines = lines

    def generic_visit(self, node):
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [each for one in block for each in (*self._mark(one), one)])
        return node

    def _mark(self, statement):
        if getattr(statement, "lineno", None) in self.lines and isinstance(statement, ast.stmt):
            call = ast.parse(f"__ran__({statement.lineno})").body[0]
            for node in ast.walk(call):
                ast.copy_location(node, statement)
            yield call


class Importer:
    """Imports modules of labs that have lines of the GPU's so that they note which they run."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "labs":
            return None
        spec = spec_by_others(self, name)
        file = Path(spec.origin).resolve() if spec and spec.origin else ROOT
        if file.suffix == ".py" and file.is_relative_to(ROOT / "labs"):
            code = _marked_code(file)
            if code:
                spec.loader.exec_module = lambda module: _run(module, file, code)
        return spec


def _marked_code(file: Path) -> CodeType | None:
    """A file's code with a call before each of the GPU's lines; None if it has none of them. The
    first process that imports the file keeps it beside the notes: hundreds of ranks do, and each
    would parse and compile it again."""
    kept = Path(os.environ["PRETEND_LINES"], CODE,
                f"{str(file).replace(os.sep, '_')}.{file.stat().st_mtime_ns}")
    try:
        return marshal.loads(kept.read_bytes())
    except OSError:
        lines = lines_of(file)
        code = compile(_Marker(lines).visit(ast.parse(file.read_text())), str(file),
                       "exec") if lines else None
    kept.parent.mkdir(exist_ok=True)
    half = kept.with_suffix(f".{os.getpid()}")  # another process may read it meanwhile
    half.write_bytes(marshal.dumps(code))
    half.replace(kept)
    return code


def _run(module, file, code):
    seen, name = set(), str(file.relative_to(ROOT))

    def ran(line):
        if line not in seen:
            seen.add(line)
            with open(os.path.join(os.environ["PRETEND_LINES"], str(os.getpid())), "a") as notes:
                notes.write(f"{name}:{line}\n")

    module.__dict__["__ran__"] = ran
    exec(code, module.__dict__)


def noted(folder) -> dict[str, set[int]]:
    """File of labs -> its lines that were run, by all processes that noted them in this directory.
    """
    found = {}
    for notes in filter(Path.is_file, Path(folder).iterdir()):
        for line in notes.read_text().split():
            name, number = line.rsplit(":", 1)
            found.setdefault(name, set()).add(int(number))
    return found


if __name__ == "__main__":  # prints them all
    for name, lines in all_lines().items():
        text = (ROOT / name).read_text().splitlines()
        print(f"--- {name}: {len(lines)}")
        for line in sorted(lines):
            print(f"{line:4} {text[line - 1]}")

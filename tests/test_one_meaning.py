"""A name has one meaning in a notebook: running an earlier cell again breaks no later one."""

import ast
import symtable
from dataclasses import dataclass, field

import pytest
from _build.source import read_source
from test_notebooks import NAMES, ROOT


@dataclass
class Names:
    """Global names of a cell. bound: name -> how, as text. read: those that must have been bound
    by another cell, or may be, because a function reads them when it is called."""

    bound: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)


def names_of(source):
    """The Names of a cell."""
    found, late = Names(), _read_in_functions(symtable.symtable(source, "cell", "exec"))
    for statement in ast.parse(source).body:
        _visit(statement, found)
    found.read |= late
    return found


def _read_in_functions(table, inside=False):
    """Global names that functions read, and so as late as they are called."""
    names = set()
    for child in table.get_children():
        if child.get_type() == "function" and child.get_name() not in (
                "lambda", "genexpr", "listcomp", "dictcomp", "setcomp"):
            names |= {one.get_name() for one in child.get_symbols()
                      if one.is_global() and one.is_referenced()}
            names |= _read_in_functions(child, True)
        else:
            if inside:
                names |= {one.get_name() for one in child.get_symbols() if one.is_global()}
            names |= _read_in_functions(child, inside)
    return names


def _visit(statement, found):
    """Adds what a statement at the top level reads and binds, in the order in which it does."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            module = getattr(statement, "module", "")
            _bind(found, (alias.asname or alias.name).split(".")[0], f"{module} {alias.name}")
    elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
        for part in (*statement.decorator_list, *getattr(statement, "bases", ())):
            _read(part, found)
        _bind(found, statement.name, ast.dump(statement))
    elif isinstance(statement, ast.For):
        _read(statement.iter, found)
        _store(statement.target, found, ast.dump(statement.iter))
        _visit_all(statement.body + statement.orelse, found)
    elif isinstance(statement, ast.With):
        for item in statement.items:
            _read(item.context_expr, found)
            if item.optional_vars is not None:
                _store(item.optional_vars, found, ast.dump(item.context_expr))
        _visit_all(statement.body, found)
    elif isinstance(statement, ast.If | ast.While):
        _read(statement.test, found)
        _visit_all(statement.body + statement.orelse, found)
    elif isinstance(statement, ast.Try):
        bodies = [statement.body, *[one.body for one in statement.handlers], statement.orelse,
                  statement.finalbody]
        for body in bodies:
            _visit_all(body, found)
    else:
        _read(statement, found)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            _read(ast.Name(statement.target.id, ast.Load()), found)
        _store(statement, found, ast.dump(statement))


def _visit_all(statements, found):
    for statement in statements:
        _visit(statement, found)


def _read(node, found):
    """Names that this part reads; those of comprehensions and of lambdas are their own."""
    own = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    for one in ast.walk(node):
        if isinstance(one, ast.comprehension):
            own |= {name.id for name in ast.walk(one.target) if isinstance(name, ast.Name)}
    found.read |= {one.id for one in ast.walk(node)
                   if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
                   and one.id not in own and one.id not in found.bound}


def _store(node, found, how):
    own = {name for one in ast.walk(node) if isinstance(one, ast.comprehension)
           for name in ast.walk(one.target)}
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one not in own:
            _bind(found, one.id, how)


def _bind(found, name, how):
    found.bound[name] = found.bound.get(name, "") + how


def two_meanings(sources):
    """Names that cells bind to different things, though some cell reads them without binding
    them first: name -> numbers of the cells that bind it."""
    cells = [names_of(source) for source in sources]
    read = set().union(*(cell.read for cell in cells))
    found = {}
    for name in sorted(read):
        ways = {number: cell.bound[name] for number, cell in enumerate(cells, 1)
                if name in cell.bound}
        if len(set(ways.values())) > 1:
            found[name] = list(ways)
    return found


def code_cells(name):
    """The sources of the notebook's code cells that Python can read: no scripts, no magics."""
    cells, _ = read_source(ROOT / "solutions" / f"{name}.py", f"{name}.py")
    return [cell.source for cell in cells if cell.kind == "code" and not cell.script
            and not cell.source.lstrip().startswith(("%", "!"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_one_meaning_in_a_notebook(name):
    assert (sources := code_cells(name))
    found = {one: [sources[number - 1].splitlines()[0] for number in numbers]
             for one, numbers in two_meanings(sources).items()}
    assert not found


@pytest.mark.parametrize("sources", [
    ["x = 1", "print(x)", "x = 2"],
    ["def f(): pass", "def g(): f()", "def f(): return 1"],
    ["x = 1", "x = x + 1"],
    ["x = 1", "x += 1"],
    ["x = 1\ndef f():\n    return x", "f()", "x = 2"],
    ["for x in (1, 2): pass", "x", "with open('f') as x: pass"],
    ["x = 1\ndef f():\n    return [x for _ in 'ab']", "x = 2"],
    ["import a as x", "x.b", "import c as x"]])
def test_a_name_of_two_meanings_is_found(sources):
    assert two_meanings(sources)


@pytest.mark.parametrize("sources", [
    ["x = 1\nprint(x)", "x = 2\nprint(x)"],
    ["import a", "import a", "a.b"],
    ["x = 1", "[x for x in (1, 2)]", "print(x)"],
    ["x = 1", "def f(x): return x", "sorted('ab', key=lambda x: x)", "print(x)"],
    ["for x in (1, 2): print(x)", "for x in (3, 4): print(x)"]])
def test_a_name_that_a_cell_uses_alone_is_none(sources):
    assert not two_meanings(sources)

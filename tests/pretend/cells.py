"""Runs a solution as a notebook would: prints what each cell's last expression shows.

    python tests/pretend/cells.py solutions/03_zero_stages.py
"""

import ast
import sys
import types


def run(path: str) -> None:
    """Runs the script in a module __main__ of its own. Whatever expression stands at its top level
    is printed, if it is not None."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    with open(path) as file:
        tree = ast.parse(file.read(), path)
    for statement in tree.body:
        if isinstance(statement, ast.Expr):
            shown = eval(compile(ast.Expression(statement.value), path, "eval"), vars(main))
            if shown is not None:
                print(shown, flush=True)
        else:
            exec(compile(ast.Module([statement], []), path, "exec"), vars(main))


if __name__ == "__main__":
    run(sys.argv[1])

"""Runs solutions as notebooks would: prints what each cell's last expression shows.

    python tests/pretend/cells.py solutions/02_manual_ddp.py solutions/03_zero_stages.py

One process runs them all, because it imports torch and starts a fork server once. A line on stdout,
on stderr and in the file PRETEND_RANKS ends what is a solution's: END, then its path and whether it
came to its end.
"""

import ast
import os
import sys
import traceback
import types

END = "=== end of"


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


def run_all(paths: list[str]) -> None:
    """Runs one after the other; what one raises is printed and stops no other."""
    for path in paths:
        ended = True
        try:
            run(path)
        except Exception:
            traceback.print_exc()
            ended = False
        line = f"{END} {path} {ended}"
        print(line, flush=True)
        print(line, file=sys.stderr, flush=True)
        with open(os.environ.get("PRETEND_RANKS", os.devnull), "a") as ranks:
            print(line, file=ranks)


if __name__ == "__main__":
    run_all(sys.argv[1:])

"""Solutions as plain scripts on a machine that has no Jupyter: what all import. Their cells run
so on the pretend node (tests/pretend/test_solutions_on_gpus.py)."""

import subprocess
import sys
from pathlib import Path

import pytest
from pretend import node

ROOT = Path(__file__).resolve().parents[1]
# Runs the imports of every solution, and looks up all that it could use of its package.
IMPORTS = """\
import ast, importlib.util
from pathlib import Path

assert importlib.util.find_spec("IPython") is importlib.util.find_spec("ipywidgets") is None
for path in sorted(Path("solutions").glob("[0-9]*.py")):
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {}
    exec(compile(tree, str(path), "exec"), names)
    assert all(hasattr(names["lab"], name) for name in names["lab"].__all__)
    print(path.stem, names["lab"].__name__)
"""


def script(*command, seconds=300):
    """Runs Python on a machine without Jupyter."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, text=True, capture_output=True,
                          env=node.environment(0, PRETEND_NO_JUPYTER="1"), timeout=seconds)


@pytest.mark.slow
def test_every_solution_finds_what_it_imports():
    done = script("-c", IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split()[0] for line in done.stdout.splitlines()]
    assert found == sorted(path.stem for path in (ROOT / "solutions").glob("[0-9]*.py"))

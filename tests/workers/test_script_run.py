"""A solution that runs as a script: its title, headings, and what passed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labs.workers import script_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '''\
# %% [markdown]
# # 42 · A small one

# %%
from labs.workers import script_run
from pathlib import Path

script_run.begin(Path(__file__))

# %% [markdown]
# ## A section that prints nothing

# %%
x = 1

# %% [markdown]
# ## A section
#
# ### Exercise 42.1 · The first

# %%
from labs.checks.verdicts import check
from labs.workers.progress import status

@check("42.1")
def check_first(found):
    return f"it is {found}"

def answer():
    print("inside")
    return 1

check_first(answer())

# %% [markdown]
# ## Another

# %%
@check("42.2")
def check_second(found):
    return f"it is {found()}"

check_second(lambda: 1 / 0)
check_second(...)
with status("measuring"):
    pass
'''


def run(tmp_path, more=""):
    path = tmp_path / "42_small.py"
    path.write_text(SCRIPT + more)
    done = subprocess.run([sys.executable, path], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)
    return done.stdout, done.stderr


def test_headings_stand_before_what_their_sections_print(tmp_path):
    shown, error = run(tmp_path)
    assert shown.startswith("42 · A small one: how long it takes is not yet measured\n"), error
    parts = ["## A section\n", "### Exercise 42.1 · The first\n", "inside\n",
             "✓ Exercise 42.1  it is 1\n", "## Another\n", "✗ Exercise 42.2"]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places) and "prints nothing" not in shown
    assert shown.count("## Another") == 1


def test_the_summary_has_the_last_verdict_of_each_check(tmp_path):
    shown, _ = run(tmp_path)
    summary = shown.partition("## Summary of 42_small.py\n")[2].splitlines()
    assert summary[:2] == ["1 check passed: 42.1", "1 check failed: 42.2"]
    assert summary[2].endswith("minutes") and len(summary) == 3


def test_a_script_that_raises_says_so(tmp_path):
    shown, error = run(tmp_path, "\nraise KeyError('x')\n")
    assert "It ended too early, with KeyError.\n" in shown and "KeyError: 'x'" in error


@pytest.mark.parametrize(("path", "begins"), [
    (ROOT / "solutions" / "02_manual_ddp.py", True), (ROOT / "solutions" / "reading.py", False),
    (Path("/elsewhere/02_manual_ddp.py"), False), (None, False)])
def test_only_a_solution_is_announced(monkeypatch, path, begins):
    begun = []
    monkeypatch.setattr(script_run, "begin", begun.append)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    script_run.begin_if_script(SimpleNamespace(**{"__file__": str(path)} if path else {}))
    assert begun == [path] * begins


def test_the_minutes_are_those_of_the_reference_runs(tmp_path):
    for name, seconds, outcome in (("laptop", 90, "passed"), ("node", 30, "failed")):
        folder = tmp_path / "experiments" / "reference" / name
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(
            {"machine": {"title": name}, "notebooks": [
                {"name": "42_small", "seconds": seconds, "outcome": outcome}]}))
    assert script_run.reference_seconds("42_small", tmp_path) == {"laptop": 90}
    assert set(script_run.reference_seconds("02_manual_ddp")) >= {"2 cores, no GPU"}

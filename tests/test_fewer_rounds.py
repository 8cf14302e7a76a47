"""tests/fewer cuts student notebooks short, and no other program."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FEWER = ROOT / "tests" / "fewer"
SHOW = """
import importlib

for name in {names}:
    importlib.import_module(name)
print(importlib.import_module("labs.fsdp_profiling.recorded_runs").ROUNDS)
"""


@pytest.fixture
def fewer_rounds(monkeypatch):
    monkeypatch.syspath_prepend(FEWER)
    return importlib.import_module("fewer_rounds")


@pytest.mark.slow
@pytest.mark.gate  # else names that have moved show in a notebook of nbval only
def test_a_student_notebook_has_fewer_rounds_and_no_other_program(fewer_rounds, tmp_path):
    """What is cut short is there under its name: a name that is not raises."""
    source, found = SHOW.format(names=sorted(fewer_rounds.MODULES)), {}
    for folder in ("notebooks", "solutions"):
        (tmp_path / folder).mkdir()
        found[folder] = subprocess.run(
            [sys.executable, "-c", source], cwd=tmp_path / folder, text=True, capture_output=True,
            env={**os.environ, "PYTHONPATH": f"{FEWER}{os.pathsep}{ROOT}"}, timeout=120)
        assert found[folder].returncode == 0, found[folder].stderr
    assert found["notebooks"].stdout == "1\n" != found["solutions"].stdout


def test_an_argument_is_at_most_what_is_asked_for(fewer_rounds):
    def rounds_of(rounds=5, warmup=2):
        return rounds, warmup

    fewer = fewer_rounds._capped(rounds_of, {"rounds": 2})
    assert [fewer(), fewer(1), fewer(rounds=9, warmup=9)] == [(2, 2), (1, 2), (2, 9)]

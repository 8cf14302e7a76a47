"""Each guess that a notebook asks for is drawn by its package, under the same key."""

import re
from pathlib import Path

import _notebooks
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [path.stem for path in _notebooks.paths(ROOT / "solutions")]
KEY = r'"(\d+\.\d+[a-z]?)"'


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_guess_is_drawn(notebook):
    source = (ROOT / "solutions" / f"{notebook}.py").read_text(encoding="utf-8")
    asked = re.findall(rf"labs\.guess\(\s*{KEY}", source)
    charts = "".join(path.read_text(encoding="utf-8")
                     for path in (ROOT / "labs" / _notebooks.package(notebook)).rglob("*.py"))
    named = re.sub(rf"(shows|check)\({KEY}", "", charts)  # keys that name no exercise's check
    drawn = re.findall(KEY, named) + re.findall(rf"guess={KEY}", source)
    assert len(asked) == len(set(asked)), "two guesses under one key"
    assert set(asked) <= set(drawn)

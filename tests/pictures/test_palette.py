"""One source of colours."""

import re
from pathlib import Path

LABS = Path(__file__).resolve().parents[2] / "labs"


def test_only_the_palette_has_colours():
    found = [path.name for path in LABS.rglob("*.py")
             if re.search("#[0-9a-fA-F]{6}", path.read_text())]
    assert found == ["palette.py"]

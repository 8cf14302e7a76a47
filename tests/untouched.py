"""A plugin for nbval (scripts/test loads it), which the browser test asks too: what an untouched
student notebook may say. Its cells end without a word on stderr (an unknown %magic ends so) and
its checks say that they wait."""

import re
from pathlib import Path

import pytest

CHECK = re.compile(r"^lab\.check_\w+\(", re.MULTILINE)
BUSY = re.compile(r"^○ Exercise \d+\.\d+  cannot be judged now")
WAITS = re.compile(r"^○ Exercise \d+\.\d+  (is waiting|waits for)")
STUDENTS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        result = yield
    except Exception:
        # A check that measures on a busy machine says so, and judges nothing: the builder, which
        # runs alone, has seen it pass (tests/test_notebooks.py).
        if any(BUSY.match(text) for text in texts_of(getattr(item, "test_outputs", None) or ())):
            pytest.skip(f"the machine was too busy for this check\n{item.cell.source}")
        raise
    if Path(item.path).parent == STUDENTS:
        judge(item.cell.source, item.test_outputs)
    return result


def judge(source: str, outputs: list) -> None:
    """Raises AssertionError where a cell of an untouched notebook put out what it should not."""
    errors = [output.text for output in outputs if output.get("name") == "stderr"]
    texts = texts_of(outputs)
    assert not errors, f"a cell wrote to stderr: {errors}\n{source}"
    assert not any("Traceback" in text for text in texts), f"a traceback\n{source}"
    if CHECK.search(source):
        assert [text for text in texts if WAITS.match(text)] == texts, f"{texts}\n{source}"


def texts_of(outputs) -> list[str]:
    """The text of each output of a cell."""
    return [output.text if "text" in output else output.get("data", {}).get("text/plain", "")
            for output in outputs]

"""A plugin for nbval (scripts/test loads it), which the browser test asks too: what an untouched
student notebook may say. Its cells end without a word on stderr (an unknown %magic ends so) and
its checks say that they wait."""

import re
from pathlib import Path

import pytest

CHECK = re.compile(r"^lab\.check_\w+\(", re.MULTILINE)
WAITS = re.compile(r"^○ Exercise \d+\.\d+  (is waiting|waits for)")
STUDENTS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    if Path(item.path).parent == STUDENTS:
        judge(item.cell.source, item.test_outputs)
    return result


def judge(source: str, outputs: list) -> None:
    """Raises AssertionError where a cell of an untouched notebook put out what it should not."""
    errors = [output.text for output in outputs if output.get("name") == "stderr"]
    texts = [output.text if "text" in output else output.get("data", {}).get("text/plain", "")
             for output in outputs]
    assert not errors, f"a cell wrote to stderr: {errors}\n{source}"
    assert not any("Traceback" in text for text in texts), f"a traceback\n{source}"
    if CHECK.search(source):
        assert [text for text in texts if WAITS.match(text)] == texts, f"{texts}\n{source}"

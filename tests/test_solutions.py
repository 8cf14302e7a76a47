"""scripts/solutions: notebooks that pass, fail, take too long or die, and the report on them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from _solutions import compare, results, session
from _solutions.__main__ import check

ROOT = Path(__file__).resolve().parents[1]
# What labs/checks/records.py would write, without the seconds that importing labs takes.
RECORDED = """\
import json, os
def record(passed, text, metrics=()):
    with open(os.environ["WORKBOOK_RECORDS"], "a") as file:
        file.write(json.dumps({"exercise": "9.1", "kind": "Verdict", "seconds": 0.1, "text": text,
                               "passed": passed, "metrics": list(metrics)}) + "\\n")
record(None, "peak", [{"name": "peak", "value": 2.0, "unit": "MB", "predicted": 3.0, "least": None,
                       "most": None}])
from IPython.display import display
display({"image/png": "aGVsbG8=", "text/plain": "peak: 2 MB"}, raw=True)
"""
NOTEBOOKS = {
    "00_good": [RECORDED, "record(True, '✓ Exercise 9.1  it is 1')"],
    "01_raises": ["1 / 0", "print('the next cell')"],
    "02_wrong": [RECORDED, "record(False, '✗ Exercise 9.1  it is not 1')"],
    "03_dies": ["import os; os._exit(1)", "print('never')"],
    "04_slow": ["import time; time.sleep(600)", "print('the next cell')"]}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A workbook whose solutions end in different ways, and a run of all of them."""
    root = tmp_path_factory.mktemp("workbook")
    (root / "solutions").mkdir()
    for name, cells in NOTEBOOKS.items():
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Text"),
                                             *map(nbformat.v4.new_code_cell, cells)])
        nbformat.write(nb, root / "solutions" / f"{name}.ipynb")
    return root


@pytest.fixture
def run(tree, tmp_path, monkeypatch, capsys):
    """Runs the command in this process on the tree; returns (exit code, results, folder)."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'scripts'}")
    monkeypatch.setenv("WORKBOOK_PRESET", "laptop")
    monkeypatch.setattr(session.machine, "asked", lambda: {"gpus": [], "torch": "2"})

    def called(*arguments):
        out = tmp_path / "out"
        given = [] if "--resume" in arguments else ["--out", str(out)]
        code = session.run(check([*arguments, *given, "--no-preflight"]), tree)
        return code, json.loads((out / "results.json").read_text()), out

    return called


@pytest.mark.slow
def test_all_kinds_of_ends(run):
    code, data, out = run("--cell-minutes", "0.1")
    found = {one["name"]: one for one in data["notebooks"]}
    assert code == 1 and found["00_good"]["outcome"] == "passed"
    assert found["01_raises"]["why"] == "cell 1: ZeroDivisionError: division by zero"
    assert found["02_wrong"]["why"] == "✗ Exercise 9.1  it is not 1"
    assert found["03_dies"]["why"] == "cell 1: its kernel died"
    assert found["04_slow"]["why"] == "cell 1: interrupted after 0.1 minutes"
    assert {one["outcome"] for one in data["notebooks"][1:]} == {"failed"}
    for name in ("01_raises", "04_slow"):  # the next cell ran
        assert "the next cell" in (out / f"{name}.ipynb").read_text()
    assert not [one for one in psutil.process_iter(["cmdline"])
                if str(out) in " ".join(one.info["cmdline"] or [])]
    page = (out / "report.html").read_text()
    assert "1 of 5 notebooks passed" in page and "it is not 1" in page
    assert page.count("<img alt='") == 2 and "<td class='number'>3 MB</td>" in page
    assert "<td class='number'>+50.0 %</td>" not in page and "+50.0 %" in page


@pytest.mark.slow
def test_resume_runs_only_what_has_not_passed(run, tmp_path, capsys):
    run("--only", "00,01")
    began = time.time()
    code, data, out = run("--only", "00,01", "--resume", str(tmp_path / "out"))
    assert code == 1 and "kept      00_good" in capsys.readouterr().out
    assert (out / "00_good.ipynb").stat().st_mtime < began < (out / "01_raises.ipynb").stat(
        ).st_mtime


@pytest.mark.slow
def test_resume_keeps_the_note_and_counts_all_dollars(run, tmp_path, capsys):
    _, first, out = run("--only", "01", "--note", "a noisy machine", "--dollars-per-hour", "3600")
    assert first["runs"] == [] and first["seconds"] > 0
    code, data, _ = run("--only", "01", "--resume", str(out))
    assert data["note"] == "a noisy machine" and data["dollars_per_hour"] == 3600
    assert data["runs"] == [{name: first[name] for name in ("date", "seconds", "dollars_per_hour")}]
    spent = first["seconds"] + data["seconds"]  # at a dollar a second
    assert f", {spent:.2f} dollars (2 runs)" in capsys.readouterr().out
    assert f", {spent:.2f} dollars (2 runs)" in (out / "report.html").read_text()
    # 400 dollars are enough for the notebook, but not beside those of the runs before
    results_path = out / "results.json"
    results_path.write_text(json.dumps(data | {"seconds": 300.0}))
    code, data, _ = run("--only", "01", "--resume", str(out), "--budget", "400$",
                        "--dollars-per-hour", "3600")
    [one] = data["notebooks"]
    assert one["outcome"] == "skipped" and "the dollars that are left" in one["why"]


@pytest.mark.parametrize(("arguments", "limit"), [
    (["--minutes", "0.5"], "minutes"),
    (["--budget", "1$", "--dollars-per-hour", "100"], "dollars")])
def test_nothing_begins_that_would_not_end_in_time(run, arguments, limit):
    code, data, _ = run("--only", "00", *arguments)
    [one] = data["notebooks"]
    assert code == 1 and one["outcome"] == "skipped" and f"the {limit} that are left" in one["why"]


# As the terminal would send it; a process in the background has it ignored, and so its children.
INTERRUPTED = """\
import signal, sys
from pathlib import Path
from _solutions import session
from _solutions.__main__ import check
signal.signal(signal.SIGINT, signal.default_int_handler)
session.machine.asked = lambda: {"gpus": []}
sys.exit(session.run(check(sys.argv[2:]), Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_an_interrupt_leaves_a_report_and_no_process(tree, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", INTERRUPTED, str(tree), "--only", "04,00", "--no-preflight",
               "--out", str(out)]
    with subprocess.Popen(command, env={**os.environ,
                                        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}) as process:
        try:
            _wait_for(lambda: results.read(out / "04_slow.json").get("running") == 1)
            below = psutil.Process(process.pid).children(recursive=True)
            assert any("ipykernel" in " ".join(child.cmdline()) for child in below)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    gone, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
    outcomes = [one["outcome"] for one in results.read(out / "results.json")["notebooks"]]
    assert outcomes == ["interrupted", "skipped"]
    assert "interrupted" in (out / "report.html").read_text()


def _wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_notebooks_that_share_their_digits(tmp_path):
    (tmp_path / "solutions").mkdir()
    for name in ("06_x", "07b_x", "07a_x", "08_x"):
        (tmp_path / "solutions" / f"{name}.ipynb").touch()

    def chosen(only):
        options = check(["--only", only] if only else [])
        return [path.stem for path in session.chosen(options.only, tmp_path)]

    assert chosen("") == ["06_x", "07a_x", "07b_x", "08_x"]
    assert chosen("08,07b") == ["08_x", "07b_x"]
    assert chosen("07,07a") == ["07a_x", "07b_x"]


def test_a_notebook_that_there_is_not(run, tree):
    assert session.chosen(["07"], tree) == ("There is no notebook 07: choose from 00, 01, 02, 03, "
                                            "04.")


@pytest.mark.parametrize(("arguments", "said"), [
    ("--only 3", "3 is no notebook's number"), ("--only 07ab", "07ab is no notebook's number"),
    ("--budget 5", "--budget needs --dollars-per-hour"),
    ("--reference --only 00", "--reference is a run of every notebook"),
    ("--resume none", "there is no folder none"), ("--minutes 0", "0 is not above 0"),
    ("--preset huge", "invalid choice: 'huge'")])
def test_bad_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        check(arguments.split())
    assert exit_.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    ("", "give one folder"), ("a --compare a b", "give one folder"),
    ("none", "there is no results.json in none")])
def test_bad_arguments_of_report(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        compare.check(arguments.split())
    assert exit_.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_two_runs_side_by_side(run, tmp_path, monkeypatch, capsys):
    _, data, out = run("--only", "00")
    other = tmp_path / "node"
    other.mkdir()
    data["notebooks"][0]["records"][0]["metrics"][0]["value"] = 4.0
    data["machine"]["title"] = "8x A100"
    (other / "results.json").write_text(json.dumps(data))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", "--compare", str(out), str(other)])
    assert compare.main() == 0
    page = (tmp_path / "compare.html").read_text()
    assert "1 of 1 differ by more than their spread" in page and "beside 8x A100" in page
    assert "<td class='number'>2 MB</td><td class='number'>4 MB</td>" in page
    (out / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["report", str(out)])
    assert compare.main() == 0 and "1 of 1 notebooks passed" in (out / "report.html").read_text()


@pytest.mark.slow
def test_the_page_is_html_that_a_screen_reader_can_read(run):
    _, _, out = run("--only", "00")
    page = (out / "report.html").read_text()
    assert "<html lang='en'>" in page and page.count("<table>") == page.count("<caption>")
    assert not re.search(r"<img (?!alt='[^']+')", page) and "http" not in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page

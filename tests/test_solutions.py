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
from _solutions import charts, compare, predicted, reference_run, report, results, session
from _solutions.__main__ import check
from _solutions.units import subject, written
from _unattended import reference

ROOT = Path(__file__).resolve().parents[1]
# What labs/exercises/records.py would write, without the seconds that importing labs takes.
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


def test_a_notebook_that_there_is_not(run, tree):
    assert session.chosen(["07"], tree) == ("There is no notebook 07: choose from 00, 01, 02, 03, "
                                            "04.")


@pytest.mark.parametrize(("arguments", "said"), [
    ("--only 3", "3 is no notebook's number"), ("--budget 5", "--budget needs --dollars-per-hour"),
    ("--reference --only 00", "--reference is a run of every notebook"),
    ("--resume none", "there is no folder none"), ("--minutes 0", "0 is not above 0"),
    ("--preset huge", "invalid choice: 'huge'")])
def test_bad_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        check(arguments.split())
    assert exit_.value.code == 2 and said in capsys.readouterr().err


def _data(value, least=None, most=None):
    metric = {"name": "step", "value": value, "unit": "s", "predicted": None, "least": least,
              "most": most}
    return {"notebooks": [{"name": "03_x", "records": [{"exercise": "3.1",
                                                        "metrics": [metric]}]}]}


@pytest.mark.parametrize(("mine", "its", "differs"), [
    ((1.0, 0.9, 1.1), (1.05, 1.0, 1.2), False), ((1.0, 0.9, 1.1), (2.0, 1.9, 2.1), True),
    ((1.0,), (2.0,), False),  # seconds, measured once
    ((100.0, "MB"), (101.0, "MB"), False), ((100.0, "MB"), (110.0, "MB"), True),
    ((None, "MB"), (1.0, "MB"), False)])
def test_what_differs_by_more_than_its_spread(mine, its, differs):
    found = []
    for value, *spread in (mine, its):
        data = _data(value, *(spread if len(spread) == 2 else ()))
        if len(spread) == 1:
            data["notebooks"][0]["records"][0]["metrics"][0]["unit"] = spread[0]
        found.append(data)
    assert bool(report.differing(*found)) is differs


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


def test_a_name_that_comes_again_gets_a_number():
    data = _data(1.0)
    data["notebooks"][0]["records"] *= 2
    assert [key[2] for key in results.metrics(data)] == ["step", "step (2)"]


@pytest.mark.parametrize(("value", "unit", "text"), [
    (1.234e9, "bytes", "1.23 GB"), (512, "bytes", "512 bytes"), (0.0123, "s", "12.3 ms"),
    (3.0, "Ψ", "3 Ψ"), (123456, "tokens/s", "123,456 tokens/s"), (0.5, "", "0.5"),
    (None, "s", "–"), (0, "bytes", "0 bytes")])
def test_numbers_with_units(value, unit, text):
    assert written(value, unit) == text


@pytest.mark.parametrize(("name", "unit", "about"), [
    ("DDP: peak", "bytes", "Memory"), ("FSDP: largest that fits", "M parameters", "Memory"),
    ("2 ranks: sent by each rank", "MB", "Traffic"), ("each block: collectives", "per step",
                                                      "Traffic"),
    ("rank 0: of the recorded step", "", "Time and scaling"),
    ("DDP: step", "s", "Time and scaling"), ("slow: exposed share", "", "Time and scaling"),
    ("GPT-2: of the parameters", "%", "Other numbers")])
def test_what_a_metric_is_about(name, unit, about):
    assert subject(name, unit) == about


def _run(value, **metric):
    data = _data(value)
    data["notebooks"][0] |= {"outcome": "passed", "seconds": 60.0}
    data["notebooks"][0]["records"][0] |= {"text": "step: 1 s", "passed": None}
    data["notebooks"][0]["records"][0]["metrics"][0] |= metric
    return data | {"date": "2026-11-22T10:00:00", "commit": "abc", "preset": None, "ranks": None,
                   "machine": {"title": "2 cores, no GPU", "gpus": [], "cores": 2}}


def test_a_number_that_is_shown_twice_is_one_prediction():
    data = _run(100.0, predicted=150.0)
    again = dict(data["notebooks"][0]["records"][0]["metrics"][0])
    data["notebooks"][0]["records"][0]["metrics"].append(again)
    assert len(predicted.compared(data)) == 1
    page = predicted.section(data)
    assert "All 1 predictions" in page and "+50.0 %" in page


def _shown(folder):
    nb = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_markdown_cell("### Exercise 3.1 · Steps"), nbformat.v4.new_code_cell(
            "1", outputs=[nbformat.v4.new_output("display_data", {
                "image/png": "aGVsbG8=", "text/plain": text}) for text in ("other", "step: 1 s")])])
    nbformat.write(nb, folder / "03_x.ipynb")


def test_a_reference_run_is_small_and_the_next_run_is_compared_with_it(tmp_path):
    _shown(tmp_path)
    first = _run(1.0, predicted=1.0, least=1.0, most=1.0) | {"preflight": [{"name": "Python"}]}
    assert "Kept as the reference" in reference_run.keep(first, tmp_path, tmp_path)
    folder = tmp_path / "experiments" / "reference" / "laptop"
    assert (folder / "03_x-3.1.png").read_bytes() == b"hello"
    kept = results.read(folder / "results.json")
    assert "preflight" not in kept and "text" not in kept["notebooks"][0]["records"][0]
    assert results.metrics(kept) == results.metrics(first)
    later = _run(2.0, least=2.0, most=2.0) | {"date": "2026-11-23T10:00:00"}
    assert reference.of_run(first, tmp_path) is None  # of itself
    assert reference.of_run(later | {"preset": "node"}, tmp_path) is None
    page = report.page(later, tmp_path, reference.of_run(later, tmp_path))
    assert "1 of 1 numbers differ" in page and "<td class='number'>2 s (2 s to 2 s)</td>" in page
    assert results.last_seconds(tmp_path, later["machine"]) == {"03_x": 60.0}
    assert results.last_seconds(tmp_path, later["machine"] | {"title": "64 cores"}) == {
        "03_x": 60.0}
    assert not results.last_seconds(tmp_path, {"title": "1x T4", "gpus": [{}]})


def test_a_run_that_failed_is_not_kept(tmp_path):
    data = _run(1.0)
    data["notebooks"][0]["outcome"] = "failed"
    assert reference_run.keep(data, tmp_path, tmp_path) == (
        "Not kept as the reference: 03_x did not pass.")
    assert not (tmp_path / "experiments").exists()


def test_the_main_charts(tmp_path):
    _shown(tmp_path)
    found = charts.pictures(tmp_path / "03_x.ipynb")
    assert [shown.words for shown in found] == ["other", "step: 1 s"]
    for data in (_run(1.0, predicted=1.0), _run(1.0)):  # without predictions, what was measured
        [(exercise, shown)] = charts.main_ones(data["notebooks"][0], found).items()
        assert (exercise, shown.words, shown.heading) == ("3.1", "step: 1 s",
                                                          "Exercise 3.1 · Steps")
    page = charts.sections(_run(1.0), tmp_path)
    assert page.index("alt='step: 1 s'") < page.index("03_x: 1 more") < page.index("alt='other'")


@pytest.mark.slow
def test_the_page_is_html_that_a_screen_reader_can_read(run):
    _, _, out = run("--only", "00")
    page = (out / "report.html").read_text()
    assert "<html lang='en'>" in page and page.count("<table>") == page.count("<caption>")
    assert not re.search(r"<img (?!alt='[^']+')", page) and "http" not in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page

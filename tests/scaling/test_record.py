"""The written record of notebook 06: what it keeps, what it writes, and where."""

import gzip
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from labs.checks import guesses, records
from labs.checks.verdicts import Verdict, Wrong, check, shows
from labs.meters.metrics import Metric
from labs.meters.trace import Trace
from labs.pictures.bars import Bar, bars
from labs.pictures.tables import Table
from labs.scaling import record_document, record_page, record_session
from labs.scaling.record_document import document, show_record
from labs.scaling.record_session import Row, Session
from labs.scaling.scaffold import show_cluster_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def session(monkeypatch):
    """A session of its own."""
    monkeypatch.setattr(records, "_kept", {})
    monkeypatch.setattr(guesses, "_guesses", {})


@pytest.fixture
def shown(session, tmp_path):
    """A session with a picture, a table, a verdict of each kind, a guess and a trace."""
    trace = tmp_path / "slow_rank0.json.gz"
    trace.write_bytes(gzip.compress(b"{}"))

    @check("6.10")
    def check_ten(answer):
        return "is right | on 2 ranks"

    @check("6.9")
    def check_nine(answer):
        if answer != 1:
            raise Wrong("it is not 1", code="wrong")
        return "it is 1"

    @shows("6.3")
    def show_scaling():
        found = bars([Bar("weak scaling, 2 ranks", 0.8, predicted=1.0)], "", "efficiency")
        found._metrics += [Metric("FSDP: parameters", 12.5, "MB"),
                           Metric("DDP: sent", 2.0, "Ψ", 2.0, 1.9, 2.1),
                           Metric("odd: tokens", float("inf"), "tokens/s")]
        return found

    @shows("6.8")
    def show_choice():
        return Table("a table", ("a", "b"), [("1", "2")])

    @shows("Recorded steps")
    def record_lost_time():
        return {"slow rank": [Trace(0, "gloo", (), (), (), path=str(trace))]}

    guesses.guess("6.3", "efficiency, in percent", 80)
    check_ten(1), check_nine(2), show_scaling(), show_choice(), record_lost_time()


def written(record):
    return (record.folder / "README.md").read_text(), json.loads(
        (record.folder / "numbers.json").read_text())


# ---- what is kept


def test_nothing_is_kept_before_somebody_asks(monkeypatch):
    monkeypatch.setattr(records, "_kept", None)
    records.record("1.1", "text", 0.1, "show_one")
    assert records.kept() == []
    records.keep()
    records.record("1.1", "text", 0.1, "show_one")
    records.keep()
    assert [result.function for result in records.kept()] == ["show_one"]


def test_importing_another_notebooks_package_keeps_nothing():
    code = ("import labs, labs.fsdp_profiling\nfrom labs.checks import records\n"
            "records.record('1', 'x', 0.1, 'f'); print(len(records.kept()))\n"
            "import labs.scaling\nrecords.record('1', 'x', 0.1, 'f'); print(len(records.kept()))")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=ROOT,
                          timeout=60)
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_the_last_result_of_each_function_is_kept_and_not_more_than_some(session, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORDS", 3)
    for number, name in enumerate("abcadb"):
        records.record("1", number, 0.1, name)
    assert [(one.function, one.found) for one in records.kept()] == [("a", 3), ("d", 4), ("b", 5)]


# ---- what is written


def test_a_record_has_all_that_was_shown(shown, tmp_path):
    record = document(tmp_path / "out")
    page, data = written(record)
    found = record_session.facts(ROOT)
    machine = record_session.folder_name(found)
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{machine}", record.folder.name)
    assert {path.relative_to(record.folder).as_posix() for path in record.folder.rglob("*.*")} == {
        "README.md", "papers.md", "numbers.json", "pictures/01_show_scaling.png",
        "traces/slow_rank0.json.gz"}
    assert "| 6.3 | weak scaling, 2 ranks: efficiency | 0.8 | 1 | -20.0% |" in page
    assert "| 6.3 | FSDP: parameters | 12.5 MB |" in page
    assert "| 6.3 | DDP: sent | 2 Ψ | 2 Ψ | +0.0% | 1.9 to 2.1 Ψ |" in page
    # a cell's | would begin another one
    assert "| 6.10 | ✓ | is right \\| on 2 ranks |" in page
    assert page.index("| 6.9 | ✗ | it is not 1 |") < page.index("| 6.10 |")
    assert "| 6.3 | efficiency, in percent | 80 |" in page and "a table\na  b" in page
    assert all((record.folder / name).is_file() for name in re.findall(r"\]\(([^):]+)\)", page))
    assert record.missing == () and "**Missing**" not in page
    topics = {number["name"]: (number["topic"], number["value"]) for number in data["numbers"]}
    assert topics["odd: tokens"] == ("throughput", None)
    assert data["machine"]["versions"]["torch"] and data["guesses"][0]["guess"] == 80
    assert repr(record).endswith("4 numbers, 1 picture, 1 trace, 2 verdicts")


@pytest.mark.parametrize(("name", "unit", "topic"), [
    ("weak scaling on 2 ranks: efficiency", "", "efficiency"), ("mine: MFU", "", "efficiency"),
    ("flat: MB on the link", "MB", "traffic"), ("DDP: sent", "Ψ", "traffic"),
    ("FSDP: MB of parameters per rank", "MB", "memory"), ("peak", "GiB", "memory"),
    ("all-reduce of 8 MB, 200 Mbit/s", "s", "throughput"), ("x", "tokens/s", "throughput"),
    ("efficiency run: step", "ms", "throughput"), ("A10", "dollars", "other")])
def test_each_number_has_its_topic(name, unit, topic):
    assert Row("6.1", Metric(name, 1.0, unit)).topic == topic


def test_with_nothing_measured_the_record_says_so(session, tmp_path):
    record = document(tmp_path)
    page, data = written(record)
    assert record.missing == ("efficiency", "throughput and seconds", "memory")
    assert "**Missing**: efficiency, throughput and seconds, memory." in page
    assert page.count("Not measured in this session") == 3 and data["numbers"] == []
    assert "not measured in this session: efficiency, throughput" in repr(record)
    assert "Your numbers" not in (record.folder / "papers.md").read_text()


def test_papers_have_the_students_numbers_below_the_question(shown, tmp_path):
    page = (document(tmp_path).folder / "papers.md").read_text()
    volume, scaling = (page.index(text) for text in ("Stage 2 sends no more", "Figure 3 shows"))
    assert volume < page.index("| 6.3 | DDP: sent | 2 Ψ |") < scaling
    assert page.index("| 6.3 | weak scaling, 2 ranks: efficiency | 0.8 |") > scaling
    assert page.count("section") >= 10 and page.count("> \\_\\_\\_") == 20
    assert "(not measured in this session: `lab.show_lost_time`)" in page


def test_what_was_recorded_on_another_machine_is_not_the_students(session, tmp_path):
    @shows("6.7")
    def show_training():
        return bars([Bar("HSDP", 2.0), Bar("DDP", 4.0)], "MB", "on the link",
                    note="Recorded, not measured here: 2026-11-23, 2 cores. No namespaces.")

    show_training()
    record = document(tmp_path)
    page, data = written(record)
    assert "| 6.7 | HSDP: on the link (recorded elsewhere) | 2 MB |" in page
    assert [number["recorded"] for number in data["numbers"]] == [True, True]
    assert "6.7" not in (record.folder / "papers.md").read_text()


def test_a_second_record_of_a_day_has_a_number(session, tmp_path):
    first, second, third = (document(tmp_path).folder.name for _ in range(3))
    assert second == f"{first}-2" and third == f"{first}-3"


def test_it_lies_beside_the_notebook_or_in_the_workbook(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = document()
    assert record.folder.parent == tmp_path / "experiments"
    assert repr(record).startswith(f"experiments/{record.folder.name}/README.md: 0 numbers")
    html = record._repr_html_()
    links = re.findall("href='([^']+)'", html)
    assert len(links) == 3 and all(Path(link).is_file() for link in links)


# ---- where nothing can be written, and where it ends early


def test_a_folder_that_cannot_be_written_to_gets_one_sentence(session, capsys):
    record = document("/proc/record")  # for root too
    assert record.folder is None and record.readme is None
    assert "/proc/record cannot be written to" in repr(record)
    assert "lab.show_record(" in repr(record)
    assert "Nothing was written" in record._repr_html_()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_record_that_ends_early_leaves_nothing(shown, tmp_path, monkeypatch, error):
    def ends(session):
        raise error

    monkeypatch.setattr(record_page, "papers_page", ends)  # all other files are there
    with pytest.raises(error):
        document(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(shown, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_document.shutil, "copyfile", full)
    assert "No space left on device" in repr(document(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_process_left_is_removed(session, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / f".unfinished-{child.pid}").mkdir()
    alive = tmp_path / f".unfinished-{os.getppid()}"
    alive.mkdir()
    record = document(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, record.folder])


def test_a_picture_that_cannot_be_drawn_again_is_left_out(shown, tmp_path):
    [result] = Session.now().pictures
    result.found.figure.savefig = lambda *_, **__: int("x")
    record = document(tmp_path / "out")
    assert "could not be drawn again" in written(record)[0]
    assert not list(record.folder.glob("pictures/*.png"))


def test_in_plain_python_without_jupyter(tmp_path):
    code = """\
        import sys
        sys.modules |= dict.fromkeys(["IPython", "ipywidgets", "jupyterlab"])
        from labs import scaling as lab
        lab.show_record()"""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, text=True,
                          capture_output=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "README.md: 0 numbers" in done.stdout, done.stderr


def test_traces_that_are_too_large_stay_where_they_are(shown, tmp_path, monkeypatch):
    monkeypatch.setattr(record_document, "MOST_TRACES", 10)
    record = document(tmp_path / "out")
    assert not (record.folder / "traces").exists() and "## Traces" not in written(record)[0]


def test_a_verdict_in_place_of_a_picture_is_a_verdict(session, tmp_path):
    records.record("6.3", Verdict("6.3", None, "is waiting for your code"), 0.1, "show_scaling")
    page, data = written(document(tmp_path))
    assert "| 6.3 | ○ | is waiting for your code |" in page
    assert data["verdicts"][0]["passed"] is None


# ---- what the notebook shows of it


def test_a_record_is_read_back(shown, tmp_path):
    record = show_record(tmp_path)
    table = record.table
    assert table.title in repr(record) and table.title in record._repr_html_()
    assert ("Efficiency", "weak scaling, 2 ranks: efficiency", "-20.0%", 1, 1) in table.rows
    assert ("Memory", "none has a prediction", "", 1, 0) in table.rows and "torch" in table.title


def test_a_record_that_was_not_written_is_not_read(session):
    found = show_record("/proc/record")
    assert found.passed is None and "cannot be written to" in str(found)


def test_the_notebooks_section_shows_slurms_file():
    assert "#SBATCH --nodes=2" in repr(show_cluster_file("train.sbatch"))

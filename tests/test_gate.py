"""scripts/test: what the gate takes of all tests, what a change reaches, what a report says."""

import argparse
import subprocess
from types import SimpleNamespace

import _test_durations as durations
import _test_reach as reach
import _test_run as runner
import gate
import pytest

ROOT = reach.ROOT


class Item(SimpleNamespace):
    __hash__ = object.__hash__
    mark = None

    def get_closest_marker(self, name):
        return self.mark == name


def case(file, name, ident=None, **parameters):
    name = f"{name}[{ident}]" if ident else name
    callspec = {"callspec": SimpleNamespace(params=parameters, id=ident)} if ident else {}
    return Item(nodeid=f"tests/{file}::{name}", name=name, **callspec)


def chosen(items, seconds, whole=()):
    """Names of those that the gate takes. seconds: by the name of the test, with all its cases."""
    took = {item.nodeid: seconds.get(item.name.partition("[")[0], 0.0) for item in items}
    return [item.name for item in gate.chosen(items, took, [f"tests/{file}" for file in whole])]


ANSWERS = "zero_stages/test_cut.py"


def test_quick_tests_are_taken_whole():
    items = [case(ANSWERS, "test_wrong", str(n), answer=n) for n in range(9)]
    assert len(chosen(items, {"test_wrong": 0.1})) == 9


def test_of_slow_answers_the_laziest_and_the_nearest_are_taken_and_one_right_one():
    items = [case(ANSWERS, name, ident, answer=ident) for name in ("test_wrong", "test_right")
             for ident in "abcde"]
    assert chosen(items, {"test_wrong": 3.0, "test_right": 3.0}) == [
        "test_wrong[a]", "test_wrong[e]", "test_right[a]"]


def check_cut():
    pass


def check_zero():
    pass


@pytest.mark.parametrize("named", [
    lambda check, n: {"check": check, "answer": n}, lambda check, n: {"number": n},
    lambda check, n: {"exercise": check.__name__, "answer": n}])
def test_answers_are_taken_for_each_exercise(named):
    """Also where a case only has a number: its name begins with that of the check."""
    items = [case(ANSWERS, "test_wrong", f"{check.__name__}-{n}", **named(check, n))
             for check in (check_cut, check_zero) for n in range(4)]
    assert chosen(items, {"test_wrong": 3.0}) == [
        f"test_wrong[{check}-{n}]" for check in ("check_cut", "check_zero") for n in (0, 3)]


def test_of_a_file_whose_tests_take_long_the_shortest_are_taken():
    items = [case("test_bench.py", name) for name in ("test_longest", "test_some", "test_long")]
    seconds = {"test_longest": 40.0, "test_long": 3.0, "test_some": 2.5}
    assert chosen(items, seconds) == ["test_some", "test_long"]
    assert chosen(items, dict.fromkeys(seconds, 99.0)) == ["test_longest"]
    assert len(chosen(items, seconds, whole=["test_bench.py"])) == 3


def test_a_case_that_others_waited_for_is_not_taken_for_quick():
    """One run, or one fixture of a class, may serve many tests; it is one test's time."""
    items = [case("test_node.py", "test_run", letter, run=letter) for letter in "abc"]
    items += [case("test_node.py", name) for name in ("TestClass::test_d", "TestClass::test_e",
                                                      "test_quick")]
    took = {items[0].nodeid: 300.0, items[3].nodeid: 40.0}
    assert [item.name for item in gate.chosen(items, took, [])] == ["test_quick"]


def test_a_marked_case_is_taken():
    items = [case("test_browser.py", "test_page", letter, page=letter) for letter in "abc"]
    items[1].mark = "gate"
    assert chosen([case("test_browser.py", "test_quick"), *items], {"test_page": 99.0}) == [
        "test_quick", "test_page[b]"]


def test_a_test_of_several_answers_tries_some_in_the_gate(monkeypatch):
    monkeypatch.setattr(gate, "_whole", None)
    assert gate.some_of("abc") == ["a", "b", "c"]
    gate.begin(["tests/test_other.py"])
    assert [gate.some_of("abc"), gate.some_of("abc", 1), gate.some_of("a"), gate.some_of("")] == [
        ["a", "c"], ["a"], ["a"], []]
    gate.begin(["tests/test_gate.py"])
    assert gate.some_of("abc") == ["a", "b", "c"]


def test_each_file_has_a_test_in_the_gate():
    items = [case(f"test_{letter}.py", "test_long") for letter in "ab"]
    assert len(chosen(items, {"test_long": 500.0})) == 2


# durations


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b.TestC" name="test_d[e.f]" file="tests/a/test_b.py" time="2.54"/>
<testcase classname="tests.a.test_b" name="test_short" file="tests/a/test_b.py" time="0.09"/>
<testcase classname="x" name="Cell 1" file="solutions/00.ipynb" time="3"/>
<testcase classname="x" name="Cell 2" file="solutions/00.ipynb" time="4"/>
</testsuite></testsuites>"""


def test_durations_of_a_report_are_written_and_read_by_node_id(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    durations.write(durations.of_report(tmp_path / "report.xml"), tmp_path / "durations.json")
    assert durations.read(tmp_path / "durations.json") == {
        "tests/a/test_b.py::TestC::test_d[e.f]": 2.5, "solutions/00.ipynb::all cells": 7.0}


def test_the_committed_durations_are_of_tests_that_exist():
    files = {test.partition("::")[0] for test in durations.read()}
    assert len(files) > 100 and [file for file in sorted(files) if not (ROOT / file).exists()] == []


# what a change reaches


@pytest.mark.parametrize(("changed", "reached", "not_reached"), [
    ("labs/workers/hosts/relay.py", "tests/workers/test_hosts.py", "tests/test_words.py"),
    ("labs/zero_stages/reshard.py", "tests/zero_stages/test_reshard.py",
     "tests/meters/test_wire.py"),
    ("tests/zero_answers.py", "tests/zero_stages/test_zero1.py", "tests/manual_ddp/test_bucket.py"),
    ("scripts/_grade/zygote.py", "tests/grade/test_sandbox.py", "tests/fsdp/test_pictures.py"),
    ("scripts/cluster/ray_train.py", "tests/test_cluster.py", "tests/fsdp/test_pictures.py"),
    ("solutions/scripts/elastic.py", "tests/surviving_failure/test_elastic.py",
     "tests/memory_math/test_pictures.py"),
    ("tests/meters/test_wire.py", "tests/meters/test_wire.py", "tests/meters/test_traffic.py")])
def test_what_a_change_reaches(changed, reached, not_reached):
    assert reach.is_reached(ROOT / reached, [changed])
    assert not reach.is_reached(ROOT / not_reached, [changed])


def test_changed_files_are_those_of_commits_and_of_the_working_tree(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path]
    for name in ("committed", "edited", "same"):
        (tmp_path / name).write_text("1")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"], ["tag", "base"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "committed").write_text("2")
    subprocess.run([*git, "commit", "-qam", "second"], check=True)
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").write_text("")
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    assert sorted(reach.changed_since("base")) == ["committed", "edited", "new"]
    with pytest.raises(SystemExit, match="--since nothing: git knows no such commit here"):
        reach.changed_since("nothing")


# what is tried again


def run_whole(folder, tests, capfd):
    """(result, what the summary says) of a whole run of these tests, several at a time."""
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]")
    (folder / "conftest.py").write_text(
        f"import sys; sys.path[:0] = {[str(ROOT / name) for name in ('tests', 'scripts')]}\n"
        "from conftest_of_tests import pytest_runtest_logreport\n")
    (folder / "conftest_of_tests.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_some.py").write_text(tests)
    whole = argparse.Namespace(paths=[], k=None, extra=[], fast=True, all=False, since=None)
    result = runner.pytest_stage("stage", ["."], whole, ["-p", "no:nbval"])
    code = runner.summarize([result])
    assert code == (result.failed > 0)
    return result, capfd.readouterr().out


FAILS_AT_FIRST = """
import pathlib, pytest
def at_first(name):
    flag = pathlib.Path(name)
    if not flag.exists():
        flag.touch()
        raise ValueError(f"no {name}")
"""


@pytest.mark.slow  # two pytests with three processes each
def test_what_passes_the_second_time_is_named_with_its_first_failure(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, said = run_whole(tmp_path, FAILS_AT_FIRST + (
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_left_out(): pass\n"
        "def test_second_time(): at_first('flag')\n"), capfd)
    assert (result.passed, result.failed, result.skipped) == (2, 1, 1)
    assert "second time: test_some.py::test_second_time: ValueError: no flag" in said
    assert said.count("only the second time") == 1


@pytest.mark.slow
def test_more_than_three_that_fail_at_first_are_no_accident(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, said = run_whole(tmp_path, FAILS_AT_FIRST + (
        "@pytest.mark.parametrize('number', range(5))\n"
        "def test_second_time(number): at_first(str(number))\n"), capfd)
    assert (result.passed, result.failed) == (runner.TWICE, 2)
    assert said.count("only the second time") == runner.TWICE

"""Records of a run: each check and picture leaves a line, its metrics have units."""

import json

import pytest

from labs.checks import records
from labs.checks.comparison import Comparison, Measured
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.metrics import Metric
from labs.meters.traffic import CollectiveCall
from labs.pictures import agreement
from labs.pictures.bars import Bar, Panel, bars, side_by_side
from labs.pictures.memory import MemoryRow, memory_bars, memory_columns
from labs.training.memory_categories import Memory
from labs.training.presets import PRESETS


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Reads what has been recorded so far."""
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv(records.FILE, str(path))
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def test_each_check_and_picture_leaves_a_line(lines):
    @check("9.1")
    def check_one(answer):
        if answer != 1:
            raise Wrong("it is not 1", code="wrong")
        return "it is 1"

    @shows("9.2")
    def show_bar():
        return bars([Bar("this", 2.0, predicted=3.0)], "MB")

    check_one(1), check_one(2), check_one(...), show_bar()
    found = lines()
    assert [(line["exercise"], line["passed"]) for line in found] == [
        ("9.1", True), ("9.1", False), ("9.2", None)]
    assert "it is not 1" in found[1]["text"] and all(line["seconds"] >= 0 for line in found)
    assert found[2]["metrics"] == [{"name": "this", "value": 2.0, "unit": "MB", "predicted": 3.0,
                                    "least": None, "most": None}]


def test_nothing_is_written_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(records.FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    records.record("1.1", "text", 0.1)
    assert not list(tmp_path.iterdir())


def test_numbers_that_json_lacks(lines):
    class Odd:
        def metrics(self):
            return [Metric("ratio", float("inf"), "", float("nan"))]

    records.record("1.1", [Odd()], 0.1)
    assert lines()[0]["metrics"][0]["value"] is None


def test_what_was_only_predicted_is_no_metric():
    panel = Panel("memory", "MB", [2e6, 3e6, None], size=1e6, predicted=[1e6, None, None],
                  pale=(1,))
    assert side_by_side(["a", "b", "c"], [panel]).metrics() == [
        Metric("a: memory", 2.0, "MB", 1.0)]


def test_pictures_of_memory_losses_and_phases_have_metrics():
    held = Memory(parameters=3, gradients=1)
    rows = [MemoryRow("two\nlines", held, 5.0), MemoryRow("predicted alone", None, held),
            MemoryRow("too large", held, out_of_memory=True, limit=2)]
    assert memory_bars(rows, "of one rank").metrics() == [
        Metric("two lines: of one rank", 4, "bytes", 5.0)]
    assert memory_columns({"8": held}, source="dry run").metrics() == []
    assert agreement.loss_curves({"mine": [5.0, 3.0]}, 0.0).metrics() == [
        Metric("mine: last loss", 3.0, "nats per byte")]
    assert bars([Bar("2 ranks", 2.0)], "MB", "sent\n(logical)").metrics() == [
        Metric("2 ranks: sent", 2.0, "MB")]


def test_a_comparison_has_its_spread():
    calls = [CollectiveCall("all_reduce", 100, 400, True, 0.0, 2)]
    found = Measured(None, calls, [1.0], [[0.2, 0.1, 0.3], [0.1, 0.4, 0.3]])
    compared = Comparison(PRESETS["laptop"], 100, 3, {"DDP": found})
    assert compared.metrics() == [Metric("DDP: sent", 2.0, "Ψ"),
                                  Metric("DDP: step", 0.3, "s", None, 0.2, 0.4)]

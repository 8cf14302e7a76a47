"""What comes of a run of the solutions: its numbers, its page, and what is kept as reference."""

import nbformat
import pytest
from _solutions import charts, markup, predicted, reference_run, report, results
from _solutions.units import subject, written
from _unattended import reference


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


def test_where_a_number_is_from():
    assert markup.where("07a_tensor_parallel", "7.1") == "7.1"
    assert markup.where("07a_tensor_parallel", "a picture") == "07a · a picture"


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

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


@pytest.mark.parametrize(("outcomes", "words"), [
    (["passed", "passed"], "Every notebook that was run passed on this machine."),
    (["passed", "failed", "timed out", "skipped"],
     "Not ready for a class: 01_x and 02_x did not pass; "),
    (["passed", "interrupted", "skipped"],
     "Not complete: 2 notebooks of 3 did not run to the end")])
def test_the_page_begins_with_one_sentence(tmp_path, outcomes, words):
    data = _run(1.0)
    data["notebooks"] = [{"name": f"{number:02d}_x", "outcome": outcome, "seconds": 1.0, "why": ""}
                         for number, outcome in enumerate(outcomes)]
    page = report.page(data, tmp_path)
    assert words in page and page.index(words) < page.index("<h2>")


def test_the_page_says_what_psi_is_where_a_number_has_it(tmp_path):
    said = "Ψ is the number of parameters of a model"
    assert said in report.page(_run(2.0, unit="Ψ", predicted=2.0), tmp_path)
    assert said not in report.page(_run(2.0, predicted=2.0), tmp_path)


def test_the_page_has_titles(tmp_path):
    data = _run(1.0)
    data["notebooks"].append({"name": "02_manual_ddp", "outcome": "passed", "seconds": 1.0})
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(
        "# 03 · A notebook\n\nText.")]), tmp_path / "03_x.ipynb")
    page = report.page(data, tmp_path)
    assert ">03 · A notebook</th>" in page
    assert ">02 · Manual DDP</th>" in page  # it was not executed into this folder


def test_the_page_has_the_cost_of_a_class(tmp_path):
    assert "Cost of a class" not in report.page(_run(1.0), tmp_path)  # without a price
    page = report.page(_run(1.0) | {"dollars_per_hour": 24.0}, tmp_path)
    row = "".join(f"<td class='number'>{cell}</td>" for cell in ("80", "1.3", "32.00", "0.40"))
    assert f"each alone on the machine</th>{row}" in page  # 80 × 1 minute
    assert "<td class='number'>8</td><td class='number'>0.1</td>" in page


@pytest.mark.parametrize(("rate", "earlier", "expected"), [
    (None, {}, (None, 0.0)),
    (6.0, {"note": "noisy", "seconds": 1800, "dollars_per_hour": 4.0, "date": "a"}, ("noisy", 2.0)),
    (None, {"note": None, "seconds": 600, "dollars_per_hour": 6.0, "runs": [
        {"date": "a", "seconds": 1200, "dollars_per_hour": 3.0}]}, (None, 2.0)),
    (None, {"seconds": 600, "notebooks": []}, (None, 0.0)),
    (3.0, {"seconds": 600, "dollars_per_hour": 3.0, "notebooks": [  # of an older version, resumed
        {"seconds": 3600}]}, (None, 3.0))])
def test_a_run_that_goes_on_keeps_the_note_and_counts_the_dollars_before(rate, earlier, expected):
    header = results.resumed({"note": None, "dollars_per_hour": rate}, earlier)
    assert (header["note"], results.dollars_of_runs(header["runs"])) == expected
    assert header["dollars_per_hour"] == (rate or earlier.get("dollars_per_hour"))
    new = results.resumed({"note": "new", "dollars_per_hour": rate}, earlier)
    assert new["note"] == "new"
    price = header["dollars_per_hour"] or 0
    said = results.in_words(header | {"notebooks": [], "seconds": 3600})
    total = expected[1] + price
    assert (f", {total:.2f} dollars" in said) == bool(total)


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

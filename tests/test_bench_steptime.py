"""The bench that holds the step-time model against published runs that it was not fitted to."""

import json

import pytest
from _bench import __main__ as bench
from _bench import steptime

from labs.predictions.step_time import FITTED, load_published_runs
from labs.predictions.step_time import fit as steptime_fit
from labs.predictions.step_time.published_runs import ROWS


@pytest.fixture(scope="module")
def result():
    return steptime.run(bench.check(["steptime"]))


@pytest.mark.parametrize("summary, band, bound", [
    ("summary", "up to 4k", 12), ("summary", "above 4k", 25),
    ("code_base_left_out", "up to 4k", 12), ("code_base_left_out", "above 4k", 25)])
def test_rows_left_out_are_predicted_within_the_bound(result, summary, band, bound):
    found = result[summary]["by_length"][band]
    assert found["mean_error_percent"] <= bound
    assert found["worst"] in {row["id"] for row in result["rows"]}


def test_every_row_is_predicted_and_counted_once(result):
    bands = result["summary"]["by_length"]
    assert len(result["rows"]) == 134 == bands["up to 4k"]["rows"] + bands["above 4k"]["rows"]
    assert sum(one["rows"] for one in result["summary"]["by_code_base"].values()) == 134
    for row in result["rows"]:
        assert row["predicted_s"] == pytest.approx(sum(row["causes_s"].values()))
        assert row["error_percent"] == pytest.approx(
            100 * (row["predicted_s"] / row["published_s"] - 1))


def test_the_table_of_constants_is_what_the_fit_gives():
    fitted = steptime_fit.fit(load_published_runs())
    for name, value in vars(FITTED).items():
        assert value == pytest.approx(getattr(fitted, name), rel=0.02), name


def test_a_model_is_in_one_fold():
    runs = load_published_runs()
    folds = steptime_fit.folds(runs)
    assert sorted(id for fold in folds for id in fold) == sorted(run.id for run in runs)
    for model in {run.model for run in runs if run.code_base.name == "llm-foundry"}:
        ids = {run.id for run in runs if run.model == model}
        assert sum(bool(ids & fold) for fold in folds) == 1
    assert all(30 > len(fold) > 20 for fold in folds)


def test_a_row_does_not_enter_its_own_constants(tmp_path, monkeypatch):
    """Its published speed, ten times as high, changes no prediction of it."""
    monkeypatch.setattr(steptime_fit, "_STEPS", 1)
    runs = load_published_runs()
    parts = [{run.id for run in runs if run.model == "MPT-7b"}]
    before = steptime_fit.left_out(runs, parts)
    content = json.loads(ROWS.read_text())
    for row in content["rows"]:
        if row["model"] == "MPT-7b":
            row["tokens_per_s_per_gpu"] *= 10
    (tmp_path / "rows.json").write_text(json.dumps(content))
    assert steptime_fit.left_out(load_published_runs(tmp_path / "rows.json"), parts) == before


def rows_file(tmp_path, **changes):
    row = json.loads(ROWS.read_text())["rows"][0]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"about": "a test", "rows": [{**row, **changes}]}))
    return str(path)


def test_a_file_of_rows_gives_json_or_a_table(tmp_path, monkeypatch, capfd):
    path = rows_file(tmp_path, id="new", gpus=1024, global_batch=8192)
    monkeypatch.setattr("sys.argv", ["bench", "steptime", "--rows", path, "--json"])
    assert bench.main() == 0
    found = json.loads(capfd.readouterr().out)
    assert [row["id"] for row in found["rows"]] == ["new"]
    assert "above 4k" not in found["summary"]["by_length"]
    text = steptime.table(found)
    assert "MPT-70b" in text and "worst new" in text


@pytest.mark.parametrize("change", [{"kind": "a guess"}, None])
def test_a_bad_file_of_rows_gets_one_sentence(tmp_path, change):
    path = rows_file(tmp_path, **change) if change else str(tmp_path / "none.json")
    with pytest.raises(SystemExit) as error:
        steptime.run(bench.check(["steptime", "--rows", path]))
    sentence = str(error.value)
    assert sentence.startswith("scripts/bench steptime: ") and "\n" not in sentence

"""The bench that holds the pipeline simulation against published bubble rates."""

import json

import pytest
from _bench import __main__ as bench
from _bench import pipeline

from labs.predictions.pipelines.published_bubbles import ROWS, load_published_bubbles

ROW = {"p": 4, "m": 8, "virtual_stages": 2, "T_F": 2, "T_B": 2, "T_W": 1, "T_comm": 0,
       "schedule": "1F1B", "bubble_rate": 0.3}


@pytest.fixture(scope="module")
def result():
    return pipeline.run(bench.check(["pipeline"]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, bound", [
    ("1F1B", 0.00006), ("ZB-H1", 0.00006), ("ZB-H2", 0.00006), ("1F1B-I", 0.004)])
def test_every_cell_of_the_paper_is_predicted(result, schedule, bound):
    """A rate is printed with four decimals, so 0.00005 is no error."""
    cells = [row for row in result["rows"] if row["schedule"] == schedule]
    assert len(cells) == 12 == result["summary"][schedule]["rows"]
    for row in cells:
        assert row["error"] == row["predicted"] - row["published"]
        assert abs(row["error"]) <= bound, row
        assert row["textbook_error"] < -0.001  # without transfers the step is too short


@pytest.mark.slow
def test_what_is_left_over_of_the_interleaved_cells_is_one_wait(result):
    """By the rule of the paper's script all twelve are met, too."""
    assert result["summary"]["1F1B-I"]["worst_papers_rule_error"] <= 0.00006
    assert result["summary"]["1F1B-I"]["worst_error"] > 0.003


@pytest.mark.slow
def test_the_clock_is_named_and_matters(result):
    assert result["clock"].startswith("rank: the longest span of one rank")
    cells = {row["schedule"]: row for row in result["rows"]
             if (row["id"], row["m"]) == ("6.2B", 24)}
    assert cells["ZB-H2"]["predicted_cluster_clock"] - cells["ZB-H2"]["published"] > 0.03
    assert cells["1F1B"]["predicted_cluster_clock"] == pytest.approx(cells["1F1B"]["predicted"])


@pytest.mark.slow
def test_the_table_names_the_errors(result):
    text = pipeline.table(result)
    assert "ZB-H2       12 rates: 0.0000; the textbook's formula 0.00" in text
    assert "largest error" in text and "only the first waits" in text


def written(tmp_path, content, name="rows.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def predicted(path):
    return {row["schedule"]: row for row in pipeline.run(
        bench.check(["pipeline", "--rows", path]))["rows"]}


def test_other_rows_and_json_only_on_stdout(tmp_path, monkeypatch, capfd):
    path = written(tmp_path, {"rows": [ROW, {**ROW, "schedule": "zb_h1", "bubble_rate": None}]})
    monkeypatch.setattr("sys.argv", ["bench", "pipeline", "--rows", path, "--json"])
    assert bench.main() == 0
    found = json.loads(capfd.readouterr().out)
    assert [row["predicted"] for row in found["rows"]] == pytest.approx([3 / 11, 9 / 49])
    assert found["rows"][0]["error"] == pytest.approx(3 / 11 - 0.3)
    assert "error" not in found["rows"][1] and list(found["summary"]) == ["1F1B"]
    assert "-" in pipeline.table(found)


@pytest.mark.parametrize("text", [
    "p,m,v,T_F,T_B,T_W,T_comm,schedule,bubble_rate\n4,8,2,2,2,1,0,1F1B,0.3\n"
    "4,8,2,2,2,1,0,1F1B-I,0.15\n",
    "\ufeffP;M;Virtual stages;t_f;t_b;t_w;t_comm;Schedule;bubble\n4;8;;2;2;1;0;1f1b;0.3\n"
    "4;8;2.0;2;2;1;0;interleaved;0.15\n",
    "p,m,chunks,T_F,T_B,T_W,T_comm,1F1B,1F1B-I\n4,8,2,2,2,1,0,0.3,0.15\n",
    json.dumps([{**ROW, "schedule": {"1F1B": 0.3, "1F1B-I": 0.15}}]),
    json.dumps([{**ROW, "bubble_rate": "0.3"},
                {**ROW, "schedule": "1F1B-I", "bubble_rate": 0.15}]),
    json.dumps({"rows": [{key: value for key, value in ROW.items()
                          if key not in ("schedule", "bubble_rate")} | {"1F1B": 0.3,
                                                                       "1F1B-I": 0.15}]})])
def test_rows_are_read_however_they_are_written(tmp_path, text):
    found = predicted(written(tmp_path, text, "rows"))
    assert found["1F1B"]["error"] == pytest.approx(3 / 11 - 0.3)
    assert found["1F1B-I"]["predicted"] == pytest.approx(3 / 19) == found["1F1B-I"]["textbook"]
    assert found["1F1B-I"]["published"] == 0.15


def test_fewer_micro_batches_than_ranks(tmp_path):
    rows = [{**ROW, "m": 2, "schedule": name} for name in ("GPipe", "1F1B", "ZB-H1", "ZB-H2")]
    found = predicted(written(tmp_path, rows))
    assert found["1F1B"]["predicted"] == found["GPipe"]["predicted"] == pytest.approx(3 / 5)
    assert found["ZB-H1"]["predicted"] == pytest.approx(found["ZB-H1"]["textbook"])


@pytest.mark.parametrize("change, words", [
    ({"p": 0}, "p is 0; expected a whole number of at least 1"), ({"m": 2.5}, "m is 2.5"),
    ({"T_F": -1}, "T_F is -1; expected a number"), ({"T_B": "slow"}, "T_B is 'slow'"),
    ({"T_W": None}, "T_W is empty"), ({"T_comm": float("nan")}, "T_comm is nan"),
    ({"T_F": True}, "T_F is True"), ({"T_F": [1]}, "T_F is [1]"),
    ({"schedule": "DualPipe"}, "schedule is 'DualPipe'; known are GPipe, 1F1B, 1F1B-I, ZB-H1"),
    ({"schedule": "1F1B-I", "m": 6}, "m is 6, but the interleaved order needs a multiple of p = 4"),
    ({"schedule": "1F1B-I", "virtual_stages": ""}, "virtual_stages is empty"),
    ({"bubble_rate": 24.3}, "bubble_rate is 24.3; expected a share of the step, from 0 to 1"),
    ({"T_F": 0, "T_B": 0, "T_W": 0}, "T_F, T_B and T_W are all 0"),
    ({"p": 10**9}, "more than 3,000,000 actions"), ({"m": 10**400}, "m is 1000"),
    *(({field: ...}, f"has no {field}") for field in
      ("p", "m", "T_F", "T_B", "T_W", "T_comm", "schedule", "bubble_rate"))])
def test_a_bad_row_gets_one_sentence(tmp_path, change, words):
    bad = {key: value for key, value in {**ROW, **change}.items() if value is not ...}
    path = written(tmp_path, [ROW, bad])
    with pytest.raises(SystemExit) as error:
        predicted(path)
    sentence = str(error.value)
    assert sentence.startswith(f"scripts/bench pipeline: row 2 of {path}")
    assert words in sentence and "\n" not in sentence


@pytest.mark.parametrize("content, words", [
    ("", "has no rows"), ("[]", "has no rows"), ("{", "is not JSON"), ("[3]", "row 1 of"),
    ("a,b\n", "has no rows"), ("a,b\n1,2\n", "row 1 of")])
def test_a_file_without_rows_gets_one_sentence(tmp_path, content, words):
    with pytest.raises(SystemExit) as error:
        predicted(written(tmp_path, content))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(SystemExit, match="cannot read none.csv: No such file"):
        predicted("none.csv")


def test_the_committed_rows_are_table_9():
    rows = load_published_bubbles()
    assert len(rows) == 48 and ROWS.suffix == ".csv"
    assert {(row.ranks, row.chunks) for row in rows if row.chunks > 1} == {(8, 3), (8, 4), (16, 3),
                                                                           (32, 2)}

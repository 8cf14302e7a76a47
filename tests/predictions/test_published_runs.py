"""Rows of published runs are read right, or excluded with a reason."""

import json

import pytest

from labs.predictions.step_time import RowsError, load_published_runs
from labs.predictions.step_time.published_runs import ROWS, seconds_by_figure
from labs.predictions.step_time.row_fields import read_gpu, read_network

PUBLISHED = json.loads(ROWS.read_text())["rows"]
RUNS = {run.id: run for run in load_published_runs()}
ROW = next(row for row in PUBLISHED if row["id"] == "mosaic-002")


def load(tmp_path, *rows):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"about": "a test", "rows": rows}))
    return load_published_runs(path)


def test_no_row_of_the_repository_is_excluded():
    assert len(RUNS) == len(PUBLISHED) == 134
    assert not [run.excluded for run in RUNS.values() if run.excluded]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["id"])
def test_the_figures_of_a_row_agree(row):
    """What a code base prints as time, tokens per second, MFU and FLOP/s is one step's time."""
    seconds = seconds_by_figure(row, RUNS[row["id"]].run).values()
    assert max(seconds) < 1.01 * min(seconds)


def test_sizes_and_layout_are_read():
    run = RUNS["titan-8b-cp4"].run
    assert (run.mlp_matrices, run.kv_hidden, run.context) == (3, 1024, 4)
    assert (run.data, run.shards) == (2, 8)
    assert (run.power, run.gpu.bandwidth, run.network, run.fp8) == (500, 2.4e12, 50e9, True)
    run = RUNS["korth-175B-sel"].run
    assert (run.tensor, run.pipeline, run.chunks, run.accumulation) == (8, 8, 3, 64)
    assert (run.recompute, run.sequence_parallel, run.flash) == ("selective", True, 0)
    assert not RUNS["korth-175B-full"].run.sequence_parallel
    assert [RUNS[f"mosaic-{n}"].run.sharding for n in ("002", "016")] == [3, 2]
    assert [RUNS[f"mosaic-{n}"].run.reduce_bytes for n in ("002", "140")] == [4, 2]


def test_a_gated_mlp_is_found_from_the_parameters():
    assert {(run.code_base.name, run.run.mlp_matrices) for run in RUNS.values()} == {
        ("llm-foundry", 2), ("Megatron-LM", 2), ("torchtitan", 3)}


@pytest.mark.parametrize("text, name", [
    ("a100_40gb", "A100-40"), ("NVIDIA A100-SXM4-80GB", "A100-80"), ("A100", "A100-80"),
    ("h100_80gb", "H100"), ("H100 96GB HBM2e 500W", "H100"), ("H200 141GB", "H200")])
def test_a_gpu_is_read(text, name):
    assert read_gpu(text).name == name


@pytest.mark.parametrize("text, rate", [
    ("RoCE 1600 Gbps/node", 25e9), ("8x 200 Gbps HDR IB per node", 25e9), ("", 0),
    ("NVLink intra, 400 Gb/s RDMA per GPU inter", 50e9)])
def test_a_network_is_read(text, rate):
    assert read_network(text, 8) == rate


@pytest.mark.parametrize("change, reason", [
    ({"kind": "published analytic"}, "kind is 'published analytic', not 'measured'"),
    ({"gpu": None, "vocab": None}, "has no vocab, gpu"),
    ({"gpu": "V100 32GB"}, "gpu 'V100 32GB' is not in the table"),
    ({"seq_len": "2k"}, "seq_len='2k' is not a number above 0"),
    ({"tp": "8"}, "tp='8' is not a number above 0"),
    ({"tp": 512}, "gpus=256 is less than tp·pp·cp"),
    ({"activation_checkpointing": "some"}, "activation_checkpointing 'some' is none of"),
    ({"n_params": 3e11}, "n_params=3e+11 is no dense transformer of these sizes"),
    ({"strategy": "FSDP with CPU offload"}, "strategy names offloading"),
    ({"iter_time_s": 1}, "iter_time_s and tokens_per_s_per_gpu differ by over 5%"),
    ({"tokens_per_s_per_gpu": None, "mfu": None, "tflops_per_gpu": None}, "has no time of a step")])
def test_a_row_is_excluded_for_what_it_says_itself(tmp_path, change, reason):
    excluded, kept = load(tmp_path, {**ROW, **change}, ROW)
    assert excluded.excluded.startswith(reason) and excluded.run is None
    assert kept.run and not kept.excluded


@pytest.mark.parametrize("change, micro_batch, accumulation, chunks", [
    ({"global_batch": 4096}, 8, 2, 1), ({"global_batch": 1024}, 4, 1, 1),
    ({"pp": 8, "global_batch": 256}, 1, 8, 1), ({"pp": 8, "strategy": "Interleaved 1F1B",
                                                "global_batch": 1024}, 4, 8, 2)])
def test_a_step_is_cut_into_micro_batches(tmp_path, change, micro_batch, accumulation, chunks):
    [row] = load(tmp_path, {**ROW, **change})
    run = row.run
    assert (run.micro_batch, run.accumulation, run.chunks) == (micro_batch, accumulation, chunks)
    assert run.step_tokens == change["global_batch"] * 2048


def test_an_unknown_code_base_computes_as_pytorch_does(tmp_path):
    [run] = load(tmp_path, {**ROW, "source": "someone/trainer README"})
    assert run.code_base.name == "someone/trainer" and run.run.flash == 2


def test_the_same_run_has_the_same_key_whatever_its_id(tmp_path):
    same, other = load(tmp_path, {**ROW, "id": "again"}, {**ROW, "gpus": 512})
    assert same.key == RUNS["mosaic-002"].key != other.key


@pytest.mark.parametrize("content, sentence", [
    ("{", "is not JSON: "), ("[1]", "has no rows: expected "), ('{"rows": []}', "has no rows"),
    ('{"rows": [1]}', "row 1 of .* is not an object"), (None, "cannot read .*: No such file")])
def test_a_bad_file_gets_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RowsError, match=sentence) as error:
        load_published_runs(path)
    assert "\n" not in str(error.value)

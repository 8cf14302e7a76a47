"""6ND, MFU and HFU against figures that others published."""

import json

import pytest

from labs.predictions.hardware import gpu
from labs.predictions.step_time.efficiency import (
    attention_flops,
    flops_per_token,
    gpt_flops_per_token,
    hfu,
    mfu,
    six_nd,
    utilization,
)
from labs.predictions.step_time.published_runs import ROWS

PUBLISHED = json.loads(ROWS.read_text())["rows"]
MOSAIC = [row for row in PUBLISHED if row["model"].startswith("MPT") and "fp8" not in
          row["precision"]]
SELECTIVE = [row for row in PUBLISHED if row["id"].startswith("korth") and "hfu" in row]


def test_7b_parameters_on_2t_tokens():
    assert six_nd(7e9, 2e12) == 8.4e22  # not 84 quintillion


def test_attention_adds_what_palm_says():
    assert flops_per_token(0, 32, 4096, 2048) == attention_flops(32, 4096, 2048) == 12 * 2**28


@pytest.mark.parametrize("recompute, form", [
    ("none", lambda n, h, v, s: 72 * n * h * h * (1 + s / (6 * h) + v / (12 * n * h))),
    ("selective", lambda n, h, v, s: 72 * n * h * h * (1 + s / (4.5 * h) + v / (12 * n * h))),
    ("full", lambda n, h, v, s: 96 * n * h * h * (1 + s / (6 * h) + v / (16 * n * h)))])
def test_the_closed_forms_of_megatron(recompute, form):
    sizes = 96, 12288, 51200, 2048
    assert gpt_flops_per_token(*sizes, recompute) == pytest.approx(form(*sizes))


def test_an_unknown_recomputation_is_rejected():
    with pytest.raises(ValueError, match="no recompute 'some': choose none, selective, full"):
        gpt_flops_per_token(96, 12288, 51200, 2048, "some")


@pytest.mark.parametrize("row", MOSAIC, ids=lambda row: row["id"])
def test_mfu_and_hfu_that_llm_foundry_published(row):
    peak = gpu("H100" if row["gpu"].startswith("h100") else "A100-80").flops
    found = 100 * mfu(row["tokens_per_s_per_gpu"], peak, parameters=row["n_params"],
                      layers=row["n_layers"], hidden=row["hidden"], sequence=row["seq_len"])
    assert found == pytest.approx(row["mfu"], rel=3e-3)  # tokens per second are printed rounded
    full = row["activation_checkpointing"] == "full"
    assert (100 * hfu(found / 100) if full else found) == pytest.approx(row["hfu"], rel=3e-3)


@pytest.mark.parametrize("row", SELECTIVE, ids=lambda row: row["id"])
def test_mfu_and_hfu_that_korthikanti_published(row):
    tokens_per_s = row["global_batch"] * row["seq_len"] / row["gpus"] / row["iter_time_s"]
    flops = gpt_flops_per_token(row["n_layers"], row["hidden"], row["vocab"], row["seq_len"])
    found = utilization(flops, tokens_per_s, gpu("A100-80").flops)
    assert 100 * found == pytest.approx(row["mfu"], rel=5e-3)
    again = attention_flops(row["n_layers"], row["hidden"], row["seq_len"])  # three times too many
    assert 100 * hfu(found, again / flops) == pytest.approx(row["hfu"], rel=5e-3)


def test_the_sparse_peak_halves_every_share():
    assert utilization(1e10, 4e4, 1979e12) == pytest.approx(utilization(1e10, 4e4, 989.5e12) / 2)

"""The table of GPUs, and whether a job fits."""

from dataclasses import replace

import pytest

from labs.predictions import hardware
from labs.predictions.hardware import (
    GPUS,
    fits,
    gpu,
    known_gpus,
    overhead,
    overheads,
    recognised,
)
from labs.predictions.memory.recipes import model_states
from labs.predictions.step_time.reported_runs import ReportedRun, efficiency_of
from labs.predictions.step_time.row_fields import read_gpu
from labs.training.memory_categories import GiB


def test_every_gpu_is_plausible():
    for each in known_gpus().values():
        assert 0.9 * each.nominal < each.usable <= 1.08 * each.nominal
        assert each.busbw is None or each.busbw < each.nvlink


def test_newer_is_larger_and_faster():
    found = [GPUS[name] for name in ("T4", "A10", "A100-40", "A100-80", "H200", "B200")]
    assert found == sorted(found, key=lambda each: each.usable)
    assert found == sorted(found, key=lambda each: each.bandwidth)


def test_what_cuda_takes():
    assert overhead(1) == pytest.approx(0.8425 * GiB)  # context, kernels, cuBLAS
    assert overhead(2) - overhead(1) == 1.45 * GiB


def test_13b_on_four_a100_80():
    # The self-check of notebook 01: 12 bytes per parameter, model states only.
    whole, shard = (model_states(13e9, "bf16, fp32 moments", ranks=4, stage=stage).total
                    for stage in (0, 3))
    assert not fits(whole, "A100-80", ranks=4) and fits(shard, "A100-80", ranks=4)


def test_an_unknown_gpu_is_turned_away():
    with pytest.raises(ValueError, match="no GPU 'V100' in the table"):
        gpu("V100")


def test_to_add_a_gpu_is_a_line_of_the_table(monkeypatch):
    monkeypatch.setitem(GPUS, "L4", hardware._gpu("L4", 24, 22.2, 121, 300, 0, 32, 72,
                                                  hardware.A100, 242, True))
    assert recognised("NVIDIA L4", 22.1 * GiB).name == "L4" and fits(20 * GiB, "L4")
    of_a_row = read_gpu("8x L4 24GB")
    assert of_a_row is gpu("L4") and of_a_row.generation.network == 25e9
    run = ReportedRun("a run", 10**9, 50_000, True, 24, 2048, 2048, "none", 8,
                      of_a_row.sheet_tflops, of_a_row.sparse, 1e4)
    dense = replace(run, sheet_tflops=of_a_row.flops / 1e12, sparse=False)
    assert efficiency_of(run).mfu == pytest.approx(efficiency_of(dense).mfu)


def test_a_workstations_gpu_is_known_and_in_no_notebooks_chart():
    assert "A6000" not in GPUS and gpu("A6000").usable == 47.54 * GiB
    assert recognised("NVIDIA RTX A6000", 47.54 * GiB) == gpu("A6000") == read_gpu("4x RTX A6000")
    assert gpu("A6000").flops == pytest.approx(gpu("A6000").sheet_tflops * 1e12 / 2, rel=1e-3)


def test_what_cuda_takes_has_names():
    assert overheads(8).keys() == {"CUDA context", "loaded kernels", "cuBLAS", "NCCL"}
    assert overheads(1)["NCCL"] == 0
    assert overheads(architecture="sm80")["cuBLAS"] == 2 * 8_519_680  # :4096:2:16:8, in KiB


@pytest.mark.parametrize("name, gib, found", [
    ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"), ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40"),
    ("Tesla T4", 14.6, "T4"), ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
    ("Tesla P40", 22.2, "Tesla P40 (rates of an A10)")])
def test_a_gpu_is_recognised_by_name_and_memory(name, gib, found, monkeypatch):
    known = ("T4", "A10", "A100-40", "A100-80", "H100")  # whatever else is in the table by now
    monkeypatch.setattr(hardware, "GPUS", {one: GPUS[one] for one in known})
    monkeypatch.setattr(hardware, "WORKSTATION_GPUS", {})
    one = recognised(name, gib * 2**30)
    assert (one.name, one.usable) == (found, gib * 2**30) and one.pcie > 1e9

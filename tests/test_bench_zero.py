"""scripts/bench zero runs and prints its ratios and peaks; no test here depends on a speed."""

import json
from dataclasses import replace

import pytest
from _bench import __main__ as command
from _bench import zero

from labs.training import strategies
from labs.training.presets import preset

PAIRS = {"zero1/ZeroRedundancyOptimizer", "zero2/FSDP2 no reshard", "zero3/FSDP2",
         "zero3 prefetch/FSDP2"}
if strategies.has_deepspeed():
    PAIRS |= {f"{ours}/DeepSpeed" for ours in ("zero1", "zero2", "zero3", "zero3 prefetch")}


@pytest.mark.slow
def test_zero_prints_ratios_and_peaks_of_every_pair(monkeypatch, capfd):
    monkeypatch.setattr(zero, "preset", lambda *name, **sizes: replace(
        preset(*name, **sizes), layers=2, hidden=64, context=32))
    monkeypatch.setattr("sys.argv", ["bench", "zero", "--ranks", "2", "--rounds", "1", "--json"])
    assert command.main() == 0
    result = json.loads(capfd.readouterr().out)
    for key in ("ratios", "peaks", "peaks_batch_1"):
        assert set(result[key]["2"]) == PAIRS and min(result[key]["2"].values()) > 0
    held = result["peak_bytes"]["2"]
    assert result["peaks"]["2"]["zero3/FSDP2"] == pytest.approx(held["zero3"] / held["FSDP2"])
    assert "zero2/FSDP2 no reshard" in zero.table(result)


def test_a_ratio_is_the_median_of_what_the_rounds_say():
    seconds = {"zero1": [1.0, 1.0, 4.0], "FSDP2": [2.0, 3.0, 4.0]}
    assert zero._ratio(seconds, "zero1", "FSDP2") == 2.0  # theirs take twice as long
    assert zero._share({"zero1": 3, "FSDP2": 4}, "zero1", "FSDP2") == 0.75

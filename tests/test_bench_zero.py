"""scripts/bench zero runs and prints its ratios and peaks; no test here depends on a speed."""

import json
import subprocess

import pytest
from _bench import zero
from _build.definitions import ROOT

from labs.training import strategies

PAIRS = {"zero1/ZeroRedundancyOptimizer", "zero2/FSDP2 no reshard", "zero3/FSDP2",
         "zero3 prefetch/FSDP2"}
if strategies.has_deepspeed():
    PAIRS |= {f"{ours}/DeepSpeed" for ours in ("zero1", "zero2", "zero3", "zero3 prefetch")}


@pytest.mark.slow
def test_zero_prints_ratios_and_peaks_of_every_pair():
    done = subprocess.run([ROOT / "scripts" / "bench", "zero", "--ranks", "2", "--rounds", "1",
                           "--json"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for key in ("ratios", "peaks", "peaks_batch_1"):
        assert set(result[key]["2"]) == PAIRS and min(result[key]["2"].values()) > 0
    held = result["peak_bytes"]["2"]
    assert result["peaks"]["2"]["zero3/FSDP2"] == pytest.approx(held["zero3"] / held["FSDP2"])
    assert "zero2/FSDP2 no reshard" in zero.table(result)


def test_a_ratio_is_the_median_of_what_the_rounds_say():
    seconds = {"zero1": [1.0, 1.0, 4.0], "FSDP2": [2.0, 3.0, 4.0]}
    assert zero._ratio(seconds, "zero1", "FSDP2") == 2.0  # theirs take twice as long
    assert zero._share({"zero1": 3, "FSDP2": 4}, "zero1", "FSDP2") == 0.75

"""The memory bench: a slice of its grid for real, and what it leaves to others is said."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from _bench import memory, memory_cases, memory_large, memory_measured, memory_peers

from labs.predictions.dryrun import jobs

ROOT = Path(__file__).resolve().parents[1]


def bench(*arguments):
    done = subprocess.run([ROOT / "scripts" / "bench", "memory", *arguments, "--json"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def within_the_goals(methods):
    for name in memory.OURS:
        assert methods[name]["mean_pct"] < 0.1 and methods[name]["worst_pct"] < 0.3


@pytest.mark.slow
def test_a_slice_of_the_grid_on_real_ranks():
    result = bench("--device", "cpu", "--only", "GPT-2 deep plain 4x64", "Llama deep ddp-2",
                   "Qwen2 deep fsdp2-2")
    assert result["cases"] == len(result["runs"]) == 3
    assert {run["case"].split()[2] for run in result["runs"]} == {"plain", "ddp-2", "fsdp2-2"}
    methods = result["methods"]
    assert set(methods) == set(memory.METHODS)
    within_the_goals(methods)
    assert methods["dry run"]["cases"] == methods["recording"]["cases"] == 3
    assert methods["MemTracker"]["cases"] == 1 and methods["FSDPMemTracker"]["cases"] == 1
    for run in result["runs"]:
        for name, value in run["predicted_bytes"].items():
            off = 100 * (value / run["measured_bytes"] - 1)
            assert run["off_pct"][name] == pytest.approx(off)
    assert result["dryrun_70b_1024"] is None  # only with the whole grid, or by its name
    assert "on the same cases" in memory.table(result) and "furthest off" in memory.table(result)


@pytest.mark.slow
def test_a_large_dry_run_tells_its_peak_ram(monkeypatch):
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=100)
    monkeypatch.setitem(memory_large.JOBS, "dryrun_8b_8", (8, sizes))
    found = memory_large._dry_run("dryrun_8b_8")
    assert 0.1 < found["peak_ram_gb"] < 10 and found["peak_gb"] > 0 and found["note"]


@pytest.mark.gpu
@pytest.mark.slow
def test_a_slice_on_a_gpu():
    result = bench("--device", "cuda", "--cases", "3")
    assert result["device"] == "cuda" and result["cases"] == 3
    assert result["methods"]["dry run"]["worst_pct"] < 10


def test_the_grid():
    cases = memory_cases.grid()
    assert len(cases) >= 36 and len({case.name for case in cases}) == len(cases)
    for family in memory_cases.FAMILIES:
        mine = [case for case in cases if case.family == family]
        assert {case.size for case in mine} == set(memory_cases.SIZES)
        assert {(case.strategy, case.ranks) for case in mine} == {
            ("plain", 1), ("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4)}
        assert {case.reshard for case in mine if case.strategy == "fsdp2"} == {True, False}
        assert {case.precision for case in mine} == {"fp32", "bf16", "mixed"}
        assert {case.checkpointing for case in mine} == {"none", "full"}
    assert len({case.name for case in memory_cases.grid(large=True)}) == 24


def test_a_part_of_the_grid():
    cases = memory_cases.grid()
    assert {case.strategy for case in memory_cases.chosen(cases, only=["DDP"])} == {"ddp"}
    assert {case.ranks for case in memory_cases.chosen(cases, ranks=[4])} == {4}
    assert len({case.family for case in memory_cases.chosen(cases, count=3)}) == 3
    assert memory_cases.chosen(cases) == cases


def case(strategy, **changes):
    ranks = 1 if strategy == "plain" else 2
    return memory_cases.Case("Llama", "deep", strategy, ranks, 2, 32, **changes)


def test_what_a_method_leaves_out_has_a_reason(monkeypatch):
    for method, strategy, why in (
            (memory_peers.mem_tracker, "fsdp2", "FSDPMemTracker does"),
            (memory_peers.fsdp_mem_tracker, "plain", "FSDP2 only"),
            (memory_peers.accelerate, "fsdp2", "no sharding")):
        with pytest.raises(memory_peers.Cannot, match=why):
            method(case(strategy), "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(memory_peers.Cannot, match="not installed"):
        memory_peers.deepspeed(case("fsdp2"), "cpu")


def test_estimators_say_what_their_sources_say(warm_launcher):
    whole = sum(p.numel() for p in jobs.build(case("plain").job).parameters())
    config = case("plain").config
    head = config.vocab_size * config.hidden_size
    # the command loads the model without its head, and counts buffers as parameters
    said = memory_peers.accelerate(case("ddp"), "cpu")
    assert said == pytest.approx(16 * (whole - head), rel=1e-4)
    if importlib.util.find_spec("deepspeed"):
        assert memory_peers.deepspeed(case("fsdp2", reshard=False), "cpu") == (2 + 18 // 2) * whole
        gpu = 18 // 2 * whole + 4 * head
        assert memory_peers.deepspeed(case("fsdp2"), "cpu") == gpu
        assert memory_peers.deepspeed_with_cpu(case("fsdp2"), "cpu") == gpu + 1.5 * 4 * head


def test_a_process_of_its_own_passes_on_what_went_wrong(warm_launcher):
    assert memory_measured.in_fresh_process(abs, -3) == 3
    with pytest.raises(RuntimeError, match="division by zero"):
        memory_measured.in_fresh_process(divide, 1, 0)


def divide(a, b):
    return a / b

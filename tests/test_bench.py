"""The benches run, and with --json print one JSON object; nothing here judges a speed."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from _bench import __main__ as command
from _bench import ddp, gpu_runs

from labs.predictions.gpu_runs.scoreboard import HELD_OUT
from labs.training.presets import preset

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def bench(*arguments):
    done = subprocess.run([ROOT / "scripts" / "bench", *arguments], capture_output=True, text=True,
                          timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gate
def test_launch():
    result = json.loads(bench("launch", "--ranks", "2", "--rounds", "1", "--json"))
    for key in ("launch_s", "mp_spawn_s", "ratio_to_mp_spawn", "notebook_launcher_s"):
        assert result[key]["2"] > 0, key
    assert result["ratio_to_mp_spawn"]["2"] == pytest.approx(
        result["mp_spawn_s"]["2"] / result["launch_s"]["2"])


@pytest.fixture
def bench_here(monkeypatch, capfd):
    """A function that returns what a bench prints; in this process, which has imported torch and
    has a fork server."""
    def run(*arguments) -> str:
        monkeypatch.setattr("sys.argv", ["bench", *arguments])
        capfd.readouterr()
        stdout = os.dup(1)
        try:
            assert command.main() == 0
        finally:
            os.dup2(stdout, 1)  # with --json it was stderr, until the process's end
            os.close(stdout)
        return capfd.readouterr().out

    return run


def test_ddp(bench_here, monkeypatch):
    monkeypatch.setattr(ddp, "preset", lambda *name, **sizes: replace(
        preset(*name, **sizes), layers=2, hidden=64, context=32))
    result = json.loads(bench_here("ddp", "--rounds", "2", "--json"))
    ratios = result["throughput_ratio_to_torch_ddp"]
    assert ratios["torch DDP"] == 1 and ratios["bucketed, overlapped"] > 0
    assert set(ratios) == set(result["tokens_per_s"])
    monkeypatch.setattr(ddp, "run", lambda arguments: result)
    text = bench_here("ddp")  # the table is for people
    assert "bucketed, overlapped" in text and "of torch DDP" in text
    monkeypatch.setattr(ddp, "run", lambda arguments: print("This machine is busy") or result)
    assert json.loads(bench_here("ddp", "--json"))["tokens_per_s"] == result["tokens_per_s"]


def test_explorer():
    result = json.loads(bench("explorer", "--rounds", "2", "--json"))
    assert result["png_ms"]["median"] > 0 and "GPT-2" in result["redraw_ms"]
    assert all(0 < taken["median"] <= taken["worst"] for taken in result["redraw_ms"].values())


def test_gpu_runs_held_out(bench_here, tmp_path):
    """On the workbook's own rows, which are few."""
    (tmp_path / "workbook.json").write_text((gpu_runs.ROWS / "workbook.json").read_text())
    result = json.loads(bench_here("gpu-runs", "--held-out", "--json", "--rows", str(tmp_path)))
    assert result["rows"] and all(row["held_out"] > 0 for row in result["rows"])
    assert all(HELD_OUT in group["scores"] for group in result["groups"])
    assert HELD_OUT in bench_here("gpu-runs", "--held-out", "--rows", str(tmp_path))
    assert HELD_OUT not in bench_here("gpu-runs", "--rows", str(tmp_path))

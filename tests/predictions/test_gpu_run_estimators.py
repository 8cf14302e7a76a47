"""What others say of a job: values by hand, what they refuse, and that the table says both."""

import json
import subprocess
import sys

import pytest
from _bench import __main__ as command_line
from _bench import gpu_runs, gpu_runs_peers

from labs.predictions.gpu_runs.estimators import ESTIMATORS, Estimator, megatron_theoretical
from labs.predictions.gpu_runs.folder import load
from labs.predictions.gpu_runs.scoreboard import compare
from labs.predictions.hardware import gpu
from labs.predictions.memory.parameters import count
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.job import Job, Plan

# A block has 4·8·8 + 2·8·32 + 2·16 = 800 parameters, the final norm 16, embedding and head 800.
SHAPE = Shape("gpt2", 8, 4, 2, 2, 4, 32, 100)


def _job(plan, micro_batches=1, **changes) -> Job:
    values = {"name": "small", "shape": SHAPE, "sequence": 16, "gpu": gpu("H100"),
              "batch": plan.data * plan.micro_batch * micro_batches, "gpus": plan.gpus}
    return Job(**values | changes)


def _plan(data=2, tensor=1, pipeline=1, **changes) -> Plan:
    return Plan(data, tensor, pipeline, **{"sharding": "DDP", "recompute": "none"} | changes)


# Without TP 34·8 = 272 bytes a token and layer; with it 18·8 + 4·32 = 272 too, divided by TP.
@pytest.mark.parametrize("plan, micro_batches, states, activations", [
    (_plan(), 1, 18 * (3216 + 1600), 1.05 * 16 * (4 * 272 + 16 + 2 * 108)),
    (_plan(sharding="ZeRO-1"), 1, 12 * (3216 + 1600), 1.05 * 16 * (4 * 272 + 16 + 2 * 108)),
    (_plan(2, 2), 1, 18 * (3216 + 1600) / 2, 16 * (4 * 272 + 16 + 4 * 108) / 2),
    (_plan(2, 2, sequence_parallel=False), 1, 18 * (3216 + 1600) / 2,
     1.05 * 16 * (4 * 8 * (10 + 12) + 16 + 2 * (8 + 50))),
    (_plan(2, 2, 2), 1, 18 * (3216 / 2 + 800) / 2, 16 * (4 * 272 + 2 * 16) / 2 / 2),
    (_plan(2, 2, 2), 4, 18 * (3216 / 2 + 800) / 2, 16 * (4 * 272 + 2 * 16) / 2),
    (_plan(2, 2, 2, chunks=2), 4, 18 * (3216 / 2 + 800) / 2, 1.25 * 16 * (4 * 272 + 2 * 16) / 2)])
def test_megatrons_formula_by_hand(plan, micro_batches, states, activations):
    said = megatron_theoretical(_job(plan, micro_batches), plan, 0)
    assert said == pytest.approx(states + activations)


@pytest.mark.parametrize("plan, stage", [
    (_plan(2, 1, 2), 1), (_plan(sharding="FSDP"), 0), (_plan(context=2), 0),
    (_plan(recompute="full"), 0), (_plan(2, 1, 2, schedule="ZB-H1"), 0)])
def test_megatrons_formula_refuses_what_it_has_no_term_for(plan, stage):
    assert megatron_theoretical(_job(plan, 4), plan, stage) is None


def test_accelerate_knows_one_gpu():
    plan = _plan(8)
    # of 4 + 6 + 8 + 8 bytes a parameter it names the largest
    assert gpu_runs_peers.accelerate(_job(plan), plan) == 8 * count(SHAPE)
    assert gpu_runs_peers.accelerate(_job(plan, recipe="fp32"), plan) == 16 * count(SHAPE)
    for other in (_plan(2, 2), _plan(2, 1, 2), _plan(sharding="ZeRO-1"), _plan(sharding="FSDP")):
        assert gpu_runs_peers.accelerate(_job(other), other) is None


def test_deepspeed_knows_model_states():
    pytest.importorskip("deepspeed")
    total = count(SHAPE)
    for sharding, by_hand in (("ZeRO-1", 2 * total + int(18 * total / 4)),
                              ("FSDP", 4 * 800 + int(18 * total / 4))):
        plan = _plan(4, sharding=sharding)
        assert gpu_runs_peers.deepspeed(_job(plan), plan) == by_hand


@pytest.mark.parametrize("plan", [
    _plan(), _plan(2, 2, sharding="ZeRO-1"), _plan(2, 1, 2, sharding="ZeRO-1"),
    _plan(sharding="HSDP")])
def test_deepspeed_refuses_without_importing_it(plan):
    assert gpu_runs_peers.deepspeed(_job(plan), plan) is None


@pytest.mark.parametrize("ask", [
    gpu_runs_peers.mlsysim_seconds, gpu_runs_peers.mlsysim_memory,
    gpu_runs_peers.llm_analysis_seconds, gpu_runs_peers.llm_analysis_memory])
@pytest.mark.parametrize("plan", [
    _plan(context=2), _plan(sharding="HSDP"), _plan(2, 1, 2, schedule="ZB-H1")])
def test_what_may_not_be_installed_refuses_without_importing_it(ask, plan):
    assert ask(_job(plan, 4), plan, 0) is None


def test_mlsysim_does_not_know_every_gpu():
    plan = _plan()
    assert gpu_runs_peers.mlsysim_seconds(_job(plan, gpu=gpu("T4")), plan) is None
    assert gpu_runs_peers.mlsysim_memory(_job(plan, gpus=12), _plan(12)) is None


def test_mlsysim_where_it_is_installed():
    pytest.importorskip("mlsysim")
    plan = _plan(8, sharding="ZeRO-1")
    # 2 + 2 + 12 / 8 bytes and 5 % of the gradients; 34 bytes an element of the stream
    states = count(SHAPE) * (2 + 2 + 12 / 8 + 0.05 * 2)
    said = gpu_runs_peers.mlsysim_memory(_job(plan), plan)
    assert said == pytest.approx(states + 4 * 34 * 16 * 8, rel=1e-6)
    large = _job(plan, 8, sequence=4096, shape=Shape("gpt2", 4096, 32, 32, 32, 128, 16384, 50304))
    tokens, parameters = 8 * 8 * 4096, count(large.shape)
    least = 6 * tokens * parameters / (8 * 989e12 * gpu_runs_peers.EFFICIENCY)
    assert least < gpu_runs_peers.mlsysim_seconds(large, plan) < 1.2 * least


def test_llm_analysis_where_it_is_installed():
    pytest.importorskip("llm_analysis")
    shape = Shape("gpt2", 4096, 32, 32, 32, 128, 16384, 50304)
    plan = _plan(4, 2, sharding="ZeRO-1")
    job = _job(plan, 8, sequence=4096, shape=shape)
    least = 6 * 4 * 8 * 4096 * count(shape) / (8 * 989e12 * gpu_runs_peers.EFFICIENCY)
    assert 0.9 * least < gpu_runs_peers.llm_analysis_seconds(job, plan) < 1.3 * least
    assert gpu_runs_peers.llm_analysis_memory(job, plan) > 4 * count(shape) / 2
    assert gpu_runs_peers.llm_analysis_memory(job, plan, stage=1) is None


def test_the_table_names_each_estimator_and_what_it_refuses():
    ones = [Estimator("somebody's guess", "memory", lambda job, plan, stage: None, "every job"),
            Estimator("twice as long", "seconds", lambda job, plan, stage: 2.0)]
    board = compare(load()[::40], extra=[*gpu_runs_peers.installed(), *ones])
    result = gpu_runs.result(board) | {"not_installed": {"guesses": "pip install guesses"}}
    json.dumps(result)
    table = gpu_runs.table(result)
    for estimator in board.estimators:
        line = next(line for line in table.splitlines()
                    if line.startswith(f"  {estimator.quantity:8s} {estimator.name}"))
        answered, refused = board.answered(estimator)
        assert f"{answered:,} answered" in line and f"{refused:,} refused" in line
        assert bool(refused) == line.endswith(f": {estimator.refuses}")
    assert board.answered(ones[0]) == (0, sum(row.quantity == "memory" for row in board.rows))
    assert board.answered(ones[1])[1] == 0 and "accelerate estimate-memory" in table
    assert "guesses is not installed here: pip install guesses" in table


def test_a_run_that_is_in_two_groups_is_counted_once():
    runs = [run for run in load() if run.source == "nanotron" and run.seconds
            and run.plan.pipeline == 1 and run.plan.tensor == 1 and run.gpus <= 16][:5]
    board = compare(runs)
    assert len([row for row in board.rows if row.quantity == "seconds"]) == 10
    assert board.answered(ESTIMATORS[0]) == (5, 0)


def test_what_can_be_refused_says_what_is():
    for estimator in (one for peer in gpu_runs_peers.PEERS for one in peer.estimators):
        assert estimator.refuses


def test_the_help_says_how_to_install_each(capsys):
    with pytest.raises(SystemExit):
        command_line.check(["gpu-runs", "--help"])
    said = capsys.readouterr().out
    for peer in gpu_runs_peers.PEERS:
        assert peer.module == "accelerate" or peer.install in said


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(gpu_runs_peers.importlib.util, "find_spec", lambda name: None)
    assert list(gpu_runs_peers.installed()) == []
    assert set(gpu_runs_peers.missing()) == {peer.module for peer in gpu_runs_peers.PEERS}


def test_no_estimator_is_imported_before_it_is_asked():
    heavy = ("torch", "accelerate", "deepspeed", "mlsysim", "llm_analysis", "transformers")
    code = f"import sys, _bench.gpu_runs; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                           env={"PYTHONPATH": ":".join(path for path in sys.path if path)})
    assert found.stdout.strip() == "[]", found.stderr

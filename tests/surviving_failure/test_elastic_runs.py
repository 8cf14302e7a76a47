"""elastic.py under torchrun: what is noted and logged of a restart; kills leave nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

import labs.surviving_failure as lab
from labs.checks.scripts.commands import run_command
from labs.checks.verdicts import Verdict
from labs.surviving_failure.elastic_charts import ranks_over_time
from labs.surviving_failure.elastic_kills import ElasticRun, Kill, run_alone
from labs.surviving_failure.elastic_metrics import Metrics, final_curve, run_again
from labs.surviving_failure.restarts import (
    OWN_STORE,
    PARTS,
    AgentEvent,
    agent_events,
    restart_after,
)

LOG = """\
I1123 17:55:01.000000 9 torch/distributed/elastic/agent/server/api.py:715] [default] Starting worker group
some words of a rank
W1123 17:55:02.577000 9 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 1 closing signal SIGTERM
E1123 17:55:02.611000 9 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 2) of binary: python
I1123 17:55:02.611000 9 torch/distributed/elastic/agent/server/api.py:942] [default] Worker group FAILED. 3/3 attempts left; will restart worker group
I1123 17:55:02.612000 9 torch/distributed/elastic/agent/server/api.py:707] [default] Rendezvous'ing worker group
I1123 17:55:02.942000 9 torch/distributed/elastic/agent/server/api.py:553] [default] Rendezvous complete for workers. Result:
I1123 17:55:02.943000 9 torch/distributed/elastic/agent/server/api.py:715] [default] Starting worker group
I1123 17:55:12.599000 9 torch/distributed/elastic/agent/server/api.py:932] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.
"""  # noqa: E501
BEGAN = datetime(2026, 11, 23, 17, 55).timestamp()


def noted(path, steps=((0, 0, 1.0), (1, 0, 2.0), (2, 0, 2.4), (2, 1, 7.0), (3, 1, 8.0))):
    """A file of metrics: (step, restart, seconds since BEGAN); a step takes half a second."""
    lines = [{"event": "joined", "restart": 0, "ranks": 2, "time": BEGAN + 0.5, "pids": [1, 2]},
             {"event": "joined", "restart": 1, "ranks": 2, "time": BEGAN + 5, "pids": [3, 4]}]
    lines += [{"event": "step", "restart": restart, "ranks": 2, "time": BEGAN + at, "step": step,
               "loss": 5 - at / 10, "began": BEGAN + at - 0.5} for step, restart, at in steps]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = Metrics(path)
    metrics.read()
    return metrics


def test_the_agents_log_is_read_with_its_times():
    found = [(event.what, round(event.time - BEGAN, 3)) for event in agent_events(LOG, 2026)]
    assert found == [("starting", 1), ("noticed", 2.577), ("noticed", 2.611), ("stopped", 2.611),
                     ("rendezvous", 2.612), ("found", 2.942), ("starting", 2.943),
                     ("finished", 12.599)]


def test_the_parts_of_a_restart_follow_each_other(tmp_path):
    metrics = noted(tmp_path / "metrics")
    restart = restart_after(BEGAN + 2.5, agent_events(LOG, 2026), metrics)
    assert (restart.done, restart.start) == (3, 2)
    assert list(restart.seconds) == list(PARTS)
    assert [round(seconds, 3) for seconds in restart.seconds.values()] == [
        0.077, 0.035, 0.331, 2.057, 1.5, 0.5]
    assert restart.total == pytest.approx(4.5)


def test_where_nothing_is_lost_no_time_passes_with_lost_steps(tmp_path):
    metrics = noted(tmp_path / "metrics", ((0, 0, 1.0), (1, 0, 2.0), (2, 1, 7.0)))
    restart = restart_after(BEGAN + 2.5, agent_events(LOG, 2026), metrics)
    assert (restart.done, restart.start) == (2, 2) and restart.seconds[PARTS[-1]] == 0


def test_a_training_that_did_not_go_on_has_no_restart(tmp_path):
    metrics = noted(tmp_path / "metrics", ((0, 0, 1.0),))
    assert restart_after(BEGAN + 2.5, agent_events(LOG, 2026), metrics) is None
    assert restart_after(BEGAN + 2.5, [], metrics) is None


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    metrics = noted(tmp_path / "metrics")
    line = json.dumps({"event": "step", "restart": 1, "ranks": 2, "time": 9.0, "step": 4,
                       "loss": 1.0, "began": 8.0}) + "\n"
    with open(metrics.path, "a") as file:
        file.write(line[:20])
        file.flush()
        assert not metrics.read() and len(metrics.steps) == 5
        file.write(line[20:])
    assert metrics.read() and metrics.steps[-1].step == 4
    assert not Metrics(tmp_path / "missing").read()


def test_the_last_run_of_a_step_counts(tmp_path):
    steps = noted(tmp_path / "metrics").steps
    assert list(final_curve(steps)) == [0, 1, 2, 3] and final_curve(steps)[2] == 4.3
    assert [(step.step, step.restart) for step in run_again(steps)] == [(2, 1)]


def test_ranks_over_the_time(tmp_path):
    run = ElasticRun(noted(tmp_path / "metrics"), BEGAN, [Kill(1, 2, BEGAN + 2.5)], {},
                     agent_events(LOG, 2026))
    found = [(round(begin - BEGAN, 1), round(end - BEGAN, 1), number, joined)
             for begin, end, number, joined in ranks_over_time(run)]
    assert found == [(0.5, 1.0, 2, True), (1.0, 2.5, 2, False), (2.5, 2.6, 1, True),
                     (2.9, 5.0, 2, False), (5.0, 12.6, 2, True)]


def test_the_pictures_of_a_run(tmp_path):
    run = ElasticRun(noted(tmp_path / "metrics"), BEGAN, [Kill(1, 2, BEGAN + 2.5)],
                     {3: BEGAN + 2.45}, agent_events(LOG, 2026))
    assert lab.show_run(run).passed is False  # it has no end
    run.result = run_command(["true"])
    text = repr(lab.show_run(run))
    assert "rank 1 is killed after step 2, 2.5 s after the start" in text
    assert "1 steps are run again" in text
    assert "rank 1 killed after step 2: 4.5 s: the agent notices 0.08 s" in repr(
        lab.show_restarts(run))
    run.kills, run.log = [], [AgentEvent("starting", BEGAN)]
    assert "no rank was killed" in str(lab.show_restarts(run))


def test_a_script_with_a_gap_is_not_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("elastic.py").write_text('def save():\n    raise NotImplementedError("Exercise 8.6")\n')
    for found in (lab.run_with_kills("elastic.py", {3: 1}), lab.check_elastic("elastic.py"),
                  lab.check_elastic("missing.py")):
        assert isinstance(found, Verdict) and found.passed is None
    assert lab.show_run(found).passed is None
    assert "no file missing.py" in str(lab.run_with_kills("missing.py", {}))


SMALL = ("--layers", 1, "--hidden", 32)


@pytest.mark.slow
def test_a_rank_is_killed_and_the_curve_goes_on(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lab.write_script("elastic.py")
    small = (*SMALL, "--steps", 30)
    run = lab.run_with_kills("elastic.py", {8: 0}, *small)
    assert run.result.code == 0, run.result.output[-3000:]
    [kill] = run.kills
    assert kill.rank == 0 and 8 <= kill.step
    assert [joined.restart for joined in run.metrics.joined] == [0, 1]
    assert sorted(run.saved)[-1] == 30 and run_again(run.metrics.steps)
    alone = run_alone("elastic.py", *small)
    assert final_curve(run.metrics.steps) == final_curve(alone.metrics.steps)
    restart = restart_after(kill.time, run.log, run.metrics)
    assert all(seconds >= 0 for seconds in restart.seconds.values())
    assert OWN_STORE in capfd.readouterr().out.splitlines()[0]
    assert not any(psutil.pid_exists(pid) for joined in run.metrics.joined for pid in joined.pids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elastic.py"]


# Rank 0 comes late to the second start: rank 1 reads what stands in the store.
LATE = """
import os, time
from datetime import timedelta
import torch.distributed as dist

again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if again and os.environ["RANK"] == "0":
    while not os.path.exists("rank 1"):
        time.sleep(0.1)
    time.sleep(4)
if again and os.environ["RANK"] == "1":
    open("rank 1", "w").close()
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
dist.barrier()
if not again:
    os._exit(3)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {OWN_STORE: "1"}], ids=["torch's default", "own store"])
def test_torch_keeps_the_addresses_of_dead_ranks(variables, tmp_path, monkeypatch):
    """The notebook's sentence on TORCH_DISABLE_SHARE_RDZV_TCP_STORE: where the case without it
    passes, torch is mended (pytorch #135712), and text and variable can go."""
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(LATE)
    for _ in range(1 if variables else 3):  # on a busy machine rank 1 may come late, too
        found = run_command(["torchrun", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1,
                             "late.py"], 60, variables)
        Path("rank 1").unlink(missing_ok=True)
        if found.code != 0:
            break
    assert (found.code == 0) == bool(variables), found.output[-3000:]


RUNS = """
import sys
import labs.surviving_failure as lab

lab.run_with_kills("elastic.py", {100_000: 0}, "--layers", 1, "--hidden", 32, "--steps", 100_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_where_the_caller_is_ended(number, tmp_path):
    lab.write_script("elastic.py", tmp_path)
    caller = subprocess.Popen([sys.executable, "-c", RUNS], cwd=tmp_path, start_new_session=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        family = _ranks_of(caller)
        caller.send_signal(number)
        _, left = psutil.wait_procs([*family, psutil.Process(caller.pid)], timeout=20)
        assert not left
    finally:
        caller.kill()
        caller.wait()


def _ranks_of(caller) -> list[psutil.Process]:
    """The agent and its two ranks, as soon as they are there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [process for process in psutil.Process(caller.pid).children(recursive=True)
                 if "--metrics" in process.cmdline()]
        if len(found) == 3:
            time.sleep(1)
            return found
        time.sleep(0.1)
    raise AssertionError("the ranks were not started")


@pytest.mark.slow
def test_no_rank_is_left_where_the_agent_is_killed(tmp_path):
    lab.write_script("elastic.py", tmp_path)
    caller = subprocess.Popen([sys.executable, "-c", RUNS], cwd=tmp_path,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        agent, *ranks = sorted(_ranks_of(caller), key=lambda process: process.create_time())
        agent.kill()
        assert not psutil.wait_procs(ranks, timeout=20)[1]
        caller.wait(20)
    finally:
        caller.kill()
        caller.wait()

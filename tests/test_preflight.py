"""scripts/preflight: what its rows say of machines that are well, short of something, or broken."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from _preflight import (
    gpus,
    host,
    network,
    notebooks,
    ranks,
    row,
    software,
    speed,
    students,
    table,
)
from _preflight.found import ok, stop
from _unattended import nvidia_smi
from pretend import node

from labs.workers import cores

ROOT = Path(__file__).resolve().parents[1]
# A real one, of an 8-GPU machine: github.com/stas00/ml-engineering, network/README.md.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tPHB\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0
GPU2\tPHB\tSYS\t X \tNV12\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts a nvidia-smi of one's own on PATH: answers by field, and a body for all else."""
    def place(fields=None, body="exit 9"):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"""#!{sys.executable}
import subprocess, sys
fields = {fields or {}!r}
asked = [a.split("=")[1].split(",") for a in sys.argv if a.startswith("--query-")]
if not asked or any(name not in fields for name in asked[0]):
    sys.exit(subprocess.call(["/bin/sh", "-c", {body!r}]))
for row in zip(*(fields[name] for name in asked[0])):
    print(", ".join(row))
""")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return place


CARDS = {"index": ["0", "1"], "name": ["NVIDIA A100-SXM4-80GB"] * 2,
         "memory.total": ["81920", "81920"], "memory.free": ["81000", "81000"],
         "compute_mode": ["Default", "Default"], "mig.mode.current": ["Disabled"] * 2,
         "ecc.errors.uncorrected.volatile.total": ["0", "0"],
         "clocks_throttle_reasons.active": ["0x0000000000000001"] * 2,
         "temperature.gpu": ["30", "31"]}


@pytest.mark.parametrize(("changed", "status", "said"), [
    ({}, "ok", ""),
    ({"compute_mode": ["Default", "Prohibited"]}, "STOP", "GPU 1 is closed to programs"),
    ({"mig.mode.current": ["Enabled", "Disabled"]}, "note", "MIG"),
    ({"ecc.errors.uncorrected.volatile.total": ["0", "3"]}, "note", "GPU 1 has 3 memory errors"),
    ({"ecc.errors.uncorrected.volatile.total": ["[N/A]", "[N/A]"]}, "ok", ""),
    ({"clocks_throttle_reasons.active": ["0x0000000000000048", "0x0"]}, "note",
     "GPU 0 is slowed down (hardware slowdown, too warm (hardware))"),
    ({"name": ["Tesla T4", "NVIDIA L4"]}, "note", "The GPUs differ"),
    ({name: [] for name in CARDS}, "STOP", "sees no GPU")])
def test_cards(smi, changed, status, said):
    smi(CARDS | changed)
    found = gpus.cards()
    assert found.status == status and said in found.advice, found


def test_two_ranks_cannot_share_a_gpu_that_takes_one_process(smi):
    smi({name: column[:1] for name, column in CARDS.items()}
        | {"compute_mode": ["Exclusive_Process"]})
    assert gpus.cards().status == "STOP"


def test_a_driver_that_does_not_answer(smi, monkeypatch):
    smi(body="trap '' TERM; sleep 600")
    monkeypatch.setattr(nvidia_smi, "SECONDS", 0.5)
    found = row.found_by("gpus.cards")
    assert found.status == "STOP" and "did not answer within 0.5 s" in found.value


def test_a_driver_that_is_broken_is_quoted(smi):
    smi(body="echo NVIDIA-SMI has failed; exit 9")
    found = software.driver()
    assert (found.status, found.value) == ("STOP", "NVIDIA-SMI has failed")


def test_programs_that_hold_memory_are_named(smi):
    smi({"index": ["0"], "memory.used": ["9000"], "pid": ["17"], "used_memory": ["8900"],
         "process_name": ["/usr/bin/python, other"]})
    found = gpus.users()
    assert found.status == "note" and "/usr/bin/python, other (17) 8900 MiB" in found.value
    smi({"index": ["0"], "memory.used": ["3"]}, body="exit 0")
    assert gpus.users().status == "ok"


def test_topology_of_a_real_machine():
    matrix = gpus.topology(TOPOLOGY)
    assert matrix == [["X", "NV12", "PHB", "SYS"], ["NV12", "X", "SYS", "SYS"],
                      ["PHB", "SYS", "X", "NV12"], ["SYS", "SYS", "NV12", "X"]]


@pytest.mark.slow
def test_on_the_pretend_node():
    command = [sys.executable, "-m", "_preflight.row"]
    environment = node.environment(2, PYTHONPATH=os.pathsep.join(
        [node.environment(2)["PYTHONPATH"], str(ROOT / "scripts")]))
    for name, value in (("software.driver", "2 GPUs for torch"),
                        ("gpus.links", "1 pair by NVLink (NV12)"),
                        ("ranks.all_reduce", "2 ranks on GPUs, NCCL: the sum is right")):
        done = subprocess.run([*command, name], capture_output=True, text=True, env=environment,
                              timeout=300)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["status"] == "ok" and value in found["value"], (found, done.stderr)


@pytest.mark.parametrize(("results", "status", "said"), [
    ([[1.0, 1.0], [1.0, 1.0]], "ok", ""),
    ([[1.0, 1.0], [1.0, 7.0]], "STOP", "and rank 1 got 1 and 7")])
def test_the_sum_is_checked(results, status, said):
    from labs.workers.launcher import Results

    found = ranks._judged(Results(results, {}, [], 1.0), 2, "2 ranks")
    assert found.status == status and said in found.advice


def test_ranks_that_only_meet_without_peer_access(monkeypatch):
    from labs.workers import devices

    tried = []

    def fails_with_peers(function, ranks, environment=None):
        tried.append(environment)
        return ([[1.0, 1.0]] * 2, "") if environment else (None, "rank 0 waits in all_reduce")

    monkeypatch.setattr(ranks, "tried", fails_with_peers)
    assert ranks.all_reduce().status == "STOP" and len(tried) == 1  # gloo has no such switch
    monkeypatch.setattr(devices, "plan", lambda ranks: devices.Plan(
        2, "cpu:gloo,cuda:nccl", ("cuda:0", "cuda:1"), 1, ""))
    found = ranks.all_reduce()
    assert found.status == "STOP" and "export NCCL_P2P_DISABLE=1" in found.advice


def test_speed_is_measured_on_what_the_machine_has(monkeypatch):
    """scripts/plan --calibrate reads these names; test_plan_command.py has a recorded file."""
    monkeypatch.setattr(speed, "SIDES", {"cuda": 64, "cpu": 64})
    found = speed.kernels()
    assert found.status == "ok" and found.data["flops"] > 0 and found.data["launch_s"] > 0
    assert set(found.data) == {"gpu", "bytes", "dtype", "side", "flops", "launch_s"}
    assert ("says nothing about a GPU" in found.value) is (not found.data["gpu"])


def test_bus_bandwidth_as_nccl_tests_counts_it():
    assert ranks.bus_bandwidth(256e6, 0.001, 8) == pytest.approx(256e9 * 2 * 7 / 8)


@pytest.mark.parametrize(("files", "quota", "limit"), [
    ({"cpu.max": "150000 100000", "memory.max": "2000000000", "memory.current": "500000000"},
     1.5, (2_000_000_000, 500_000_000)),
    ({"cpu.max": "max 100000", "memory.max": "max"}, None, (None, 0)),
    ({"memory/memory.limit_in_bytes": "9223372036854771712", "cpu/cpu.cfs_quota_us": "-1",
      "cpu/cpu.cfs_period_us": "100000"}, None, (None, 0)),
    ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0, (None, 0)),
    ({}, None, (None, 0))])
def test_control_groups(tmp_path, monkeypatch, files, quota, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    assert cores.quota() == quota and host.memory_limit() == limit


def test_too_little_memory_stops(monkeypatch):
    monkeypatch.setattr(host, "memory_limit", lambda: (2_000_000_000, 1_900_000_000))
    found = host.memory()
    assert found.status == "STOP" and "raise the container's limit" in found.advice


@pytest.mark.skipif(sys.platform != "linux", reason="grading needs Linux")
def test_what_grading_needs_is_a_note_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(host.bubblewrap, "program", str)
    assert host.grading().status == "note"
    assert "apt-get install bubblewrap" in host.grading().advice
    monkeypatch.setattr(host.bubblewrap, "program", lambda: "bwrap")
    said = SimpleNamespace(returncode=1, stderr="bwrap: no permissions to create new namespace\n")
    with monkeypatch.context() as patched:
        patched.setattr(host.subprocess, "run", lambda *_, **__: said)
        found = host.grading()
    assert found.status == "note" and found.value.endswith("to create new namespace")
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in found.advice


@pytest.mark.parametrize(("load", "percent", "status", "value", "advice"), [
    (0.4, None, "ok", "load average 0.4 on 4 cores", ""),
    (3.0, None, "note", "3.0 on 4 cores", "What is timed now is too long"),
    (0.4, ["0", "7"], "ok", "4 cores; 0 of 2 GPUs busy", ""),
    (0.4, ["[N/A]", "97"], "note", "1 of 2 GPUs busy", "Somebody computes on GPU 1 (97 %)")])
def test_how_busy_the_machine_is(smi, monkeypatch, load, percent, status, value, advice):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    if percent:
        smi({"index": ["0", "1"], "utilization.gpu": percent})
    else:
        monkeypatch.setattr(nvidia_smi, "is_there", lambda: False)
    found = students.load()
    assert found.status == status and value in found.value and advice in found.advice
    assert bool(found.advice) == bool(advice) and found.data["load"] == load


@pytest.mark.parametrize(("free", "count", "gpu", "status", "said"), [
    (33e9, 6, 0, "ok", "3 at once, if each has 4 GB and 2 cores: memory for 8, cores for 3"),
    (9e9, 64, 0, "ok", "2 at once, if each has 4 GB and 2 cores: memory for 2, cores for 32"),
    (900e9, 96, 8, "ok", "8 at once, if each has 4 GB, 2 cores and a GPU: memory for 225, cores "
                         "for 48, GPUs for 8; scripts/turn lets more take turns"),
    (33e9, 1, 0, "note", "0 at once, if each has 4 GB and 2 cores: memory for 8, cores for 0")])
def test_how_many_students_fit(smi, monkeypatch, free, count, gpu, status, said):
    monkeypatch.setattr(host, "available_memory", lambda: free)
    monkeypatch.setattr(cores, "available", lambda: count)
    if gpu:
        smi({"index": [*map(str, range(gpu))], "utilization.gpu": ["0"] * gpu})
    else:
        monkeypatch.setattr(nvidia_smi, "is_there", lambda: False)
    found = students.at_once()
    assert found.status == status and found.value == said and bool(found.advice) == (not found.data[
        "at_once"])


def test_sockets_that_others_can_reach():
    import socket

    before = network.beyond_loopback(psutil.Process())  # what another test has not closed yet
    with socket.create_server(("0.0.0.0", 0)) as outside, socket.create_server(("127.0.0.1", 0)):
        port = outside.getsockname()[1]
        found = network.beyond_loopback(psutil.Process())
    assert sorted(set(found) - set(before)) == [f"0.0.0.0:{port}"]


def test_a_late_row_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    late = ("import pathlib, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); "
            f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); time.sleep(600)")
    monkeypatch.setattr(table, "PROGRAM", [sys.executable, "-c", late])
    began = time.monotonic()
    found = table.run_row(table.Row("late", "late.hangs", 3))
    assert found.status == "STOP" and "no answer within 3 s" in found.value
    assert time.monotonic() - began < 30
    left = [one for one in psutil.process_iter(["status"])
            if one.pid == int((tmp_path / "pid").read_text())]
    assert all(one.info["status"] == psutil.STATUS_ZOMBIE for one in left)


def test_a_row_that_raises_says_so(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "scripts"))
    found = table.run_row(table.Row("none", "host.nothing", 30))
    assert found.status == "STOP" and "AttributeError" in found.value


def test_the_first_stop_ends_the_table(monkeypatch, capsys):
    rows = [table.Row("a", "a", 1), table.Row("b", "b", 1), table.Row("c", "c", 1, True)]
    monkeypatch.setattr(table, "ROWS", rows)
    monkeypatch.setattr(table, "run_row", lambda row: stop("bad", "Do this.")
                        if row.name == "a" else ok("good", number=1))
    assert [r["name"] for r in table.run(True, False, sys.stdout)] == ["a"]
    assert [r["name"] for r in table.run(False, True, sys.stdout)] == ["a", "b"]
    assert "STOP  a" in capsys.readouterr().out


@pytest.fixture
def workbook(tmp_path):
    """A workbook of two notebooks with a reference run of a laptop."""
    for name in ("00_small", "04_large"):
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        (tmp_path / "notebooks" / f"{name}.ipynb").touch()
    folder = tmp_path / "experiments" / "reference" / "laptop"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({
        "date": "2026-11-22T12:00:00", "machine": {"gpus": [], "title": "2 cores, no GPU"},
        "notebooks": [{"name": "00_small", "outcome": "passed", "seconds": 90, "host_bytes": 1e9},
                      {"name": "04_large", "outcome": "passed", "seconds": 240,
                       "host_bytes": 3e9}]}))
    return tmp_path


@pytest.mark.parametrize(("free", "status", "value", "advice"), [
    (4e9, "ok", "all 2 run here, in minutes: 00 1.5, 04 4.0; measured on 2 cores, no GPU", ""),
    (2e9, "note", "1 run here, in minutes: 00 1.5, 04 4.0", "04 took up to 3.0 GB, and 2.0 GB")])
def test_which_notebooks_run_on_a_laptop(workbook, monkeypatch, free, status, value, advice):
    monkeypatch.setattr(nvidia_smi, "is_there", lambda: False)
    monkeypatch.setattr(host, "available_memory", lambda: free)
    found = notebooks.running(workbook)
    assert found.status == status and found.value.startswith(value) and advice in found.advice
    assert [row["seconds"] for row in found.data["notebooks"]] == [90, 240]
    assert [row["runs"] for row in found.data["notebooks"]] == [True, free > 3e9]


def test_a_notebook_that_no_reference_run_has(workbook, monkeypatch):
    monkeypatch.setattr(nvidia_smi, "is_there", lambda: False)
    for name in ("09_new", "07b_new"):
        (workbook / "notebooks" / f"{name}.ipynb").touch()
    assert "has no 07b and 09: how long that takes" in notebooks.running(workbook).advice


def test_minutes_on_gpus_are_predicted_and_say_so(smi):
    smi(CARDS)
    found = notebooks.running(ROOT)
    assert found.status == "ok" and "not yet measured. Predicted for 8 A100: " in found.value
    assert "dollars" in found.value and set(found.data["predicted"]) >= {"04_fsdp"}


@pytest.mark.slow
def test_as_a_command():
    done = subprocess.run([sys.executable, "-m", "_preflight", "--json"], cwd=ROOT, timeout=300,
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH":
                          f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"})
    found = json.loads(done.stdout)
    assert found["ok"] is (done.returncode == 0)
    assert [row["name"] for row in found["rows"]][:3] == ["Python", "packages", "torch"]
    assert all(f"{row['status']:6s}{row['name']}" in done.stderr for row in found["rows"])
    [minutes] = [row for row in found["rows"] if row["name"] == "notebooks"]
    assert minutes["data"]["notebooks"] or minutes["data"]["predicted"]

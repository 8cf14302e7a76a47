"""scripts/on-gpu with tiny parts in place of the real ones, and its summary of made results."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import leaks
import psutil
import pytest
import torch
from _on_gpu import gpu_tests, launcher_faults, one_rank, parts, session, summary
from _on_gpu.__main__ import check
from _on_gpu.parts import Part
from _unattended import machine, runner

ROOT = Path(__file__).resolve().parents[1]
CARD = {"name": "NVIDIA A100-SXM4-80GB", "bytes": 85_000_000_000, "capability": [8, 0]}
FOUND = {"gpus": [CARD] * 2, "torch": "2.13.0", "cuda": "13.0", "python": "3.11.2",
         "transformers": "5.0"}


def tiny(name, code, seconds=1, limit=60, needs=()):
    return Part(name, f"what {name} does", ("-c", code), seconds, limit, needs, ())


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs parts; returns (exit code, results.json, summary.md)."""
    monkeypatch.setattr(session.machine, "asked", lambda: FOUND)

    def run(*chosen, arguments=()):
        code = session.run(check(["--out", str(tmp_path / "out"), *arguments]), chosen, tmp_path)
        out = tmp_path / "out"
        return code, json.loads((out / "results.json").read_text()), (out /
                                                                      "summary.md").read_text()

    return run


def outcomes(data):
    return {part["name"]: part["outcome"] for part in data["parts"]}


def test_parts_that_fail_or_hang_stop_no_other(run, capsys, tmp_path):
    code, data, page = run(
        tiny("good", "print('all is well')"), tiny("bad", "print('first'); raise SystemExit('no')"),
        tiny("slow", "import time; time.sleep(99)", limit=1), tiny("last", "pass"),
        tiny("crash", "import os; os.abort()"), tiny("bare", "pass", needs=("no_such_module",)))
    assert code == 1
    assert outcomes(data) == {"good": "passed", "bad": "failed", "slow": "timed out",
                              "last": "passed", "crash": "failed", "bare": "skipped"}
    why = {part["name"]: part["why"] for part in data["parts"]}
    assert why == {"good": "", "bad": "no", "slow": "not done after 1 s", "last": "",
                   "crash": "ended by signal 6 (SIGABRT)", "bare": "needs no_such_module"}
    assert (tmp_path / "out" / "good.log").read_text() == "all is well\n"
    assert page.startswith("# 2x NVIDIA A100-SXM4-80GB, ")
    assert "**2 passed; 2 failed (bad, crash); 1 timed out (slow); 1 skipped (bare).**" in page
    assert "| slow | timed out | 1 | not done after 1 s; [log](slow.log) |" in page
    shown = capsys.readouterr().out
    assert "[ 2 of 6] bad: what bad does" in shown and "failed      bad  " in shown


def test_all_passed(run):
    assert run(tiny("a", "pass"), tiny("b", "1/0"), arguments=["--only", "faults"])[0] == 0
    assert run(tiny("a", "pass"))[0] == 0


def test_a_part_that_no_longer_fits_is_skipped(run):
    code, data, _ = run(
        tiny("first", "import time; time.sleep(99)", limit=2), tiny("long", "1/0", seconds=60),
        tiny("short", "pass", seconds=0), arguments=["--minutes", "0.6"])
    assert outcomes(data) == {"first": "timed out", "long": "skipped", "short": "passed"}
    assert data["parts"][1]["why"].startswith("takes about 60 s, and ") and code == 1


GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"],
                         start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
try: time.sleep(99)
except KeyboardInterrupt: print("interrupted")
"""


def gone(path):
    pid = int(path.read_text())
    return leaks.until(lambda: not psutil.pid_exists(pid)
                       or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)


def test_nothing_of_a_part_is_left(tmp_path):
    command = [sys.executable, "-c", GRANDCHILD, str(tmp_path / "pid")]
    found = runner.run("part", command, tmp_path / "log", 2, tmp_path)
    assert found.outcome == runner.TIMED_OUT and gone(tmp_path / "pid")
    assert (tmp_path / "log").read_text() == "interrupted\n"  # it could tidy up


def test_an_interrupt_leaves_a_summary(run, tmp_path):
    endless = Part("endless", "", ("-c", GRANDCHILD, str(tmp_path / "pid")), 1, 60, (), ())

    def interrupt():
        leaks.until((tmp_path / "pid").exists, 20)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    code, data, page = run(tiny("first", "pass"), endless, tiny("never", "1/0"))
    assert code == 130 and gone(tmp_path / "pid")
    assert outcomes(data) == {"first": "passed", "endless": "interrupted", "never": "skipped"}
    assert "1 interrupted (endless); 1 skipped (never)" in page


def test_the_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    progress = runner.Progress(3)
    progress.begin(tiny("part", ""), 60)
    progress.tick(2)
    progress.end(runner.Result("part", "passed", 3))
    assert "\r\x1b[K[ 1 of 3] part: what part does  2 s of at most 60" in capsys.readouterr().out


def on_gpu(*arguments):
    return subprocess.run([ROOT / "scripts" / "on-gpu", *arguments], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "PYTHON": sys.executable})


def test_help_names_every_part_and_its_files():
    done = on_gpu("--help")
    assert done.returncode == 0 and "summary.md" in done.stdout
    assert not [part.name for part in parts.PARTS if f"  {part.name} " not in done.stdout]
    assert on_gpu("--minutes", "0").returncode == 2 and on_gpu("--only", "x").returncode == 2


def test_the_parts_exist():
    assert len({part.name for part in parts.PARTS}) == len(parts.PARTS)
    for part in parts.PARTS:
        [_, *rest] = parts.command(part, Path("/out"), small=True)
        target = ROOT / "scripts" / rest[1].replace(".", "/") if rest[0] == "-m" else ROOT / rest[0]
        assert target.with_suffix(".py").exists(), part.name
    *first, last = parts.PARTS
    without_last = sum(part.seconds for part in first)
    assert round(without_last / 60) == 46 and round((without_last + last.seconds) / 60) == 56
    said = on_gpu("--help").stdout
    assert "with the solutions about 46 on 8 A100, with the last\none 56" in said


@pytest.mark.parametrize("solution", sorted((ROOT / "solutions").glob("[0-9]*.py")),
                         ids=lambda path: path.stem)
def test_each_solution_is_a_part_that_has_its_time(solution):
    [part] = [part for part in parts.PARTS if part.name == solution.stem]
    assert part.seconds < part.limit < 17 * 60


def test_tests_marked_gpu_run_in_two_parts():
    short, long = (set(gpu_tests.files(long)) for long in (False, True))
    assert "tests/faults/test_live.py" in short and not short & long
    assert long == {"tests/test_on_gpus.py", "tests/fsdp/test_node.py"}
    assert "tests/faults/test_gpu_faults.py" not in short  # the part "faults" runs them
    whole = gpu_tests.command(["/out.xml", "--long"])
    assert whole[whole.index("gpu") - 1] == "-m" and "--junitxml=/out.xml" in whole
    assert "gpu and not slow" in gpu_tests.command(["/out.xml", "--small"])
    assert "00_start_here or card_is_found" in gpu_tests.command(["/o", "--long", "--small"])


def test_no_gpu_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(session.machine, "asked", lambda: {"gpus": []})
    assert session.run(check(["--out", str(tmp_path / "out")])) == 2
    assert "no GPU that torch can use" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_missing_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(session, "NEEDED", ("torch", "no_such_package"))
    assert session.run(check([])) == 2
    assert "has no no_such_package: install what is missing" in capsys.readouterr().err


def test_a_machine_may_have_no_git_and_a_slow_driver(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", "")
    assert session.commit(tmp_path) == "unknown"
    monkeypatch.setattr(machine, "ANSWER", 0.01)
    assert machine.asked() == {"gpus": []}
    assert "did not say within 0.01 s" in capsys.readouterr().err


def test_what_this_machine_has(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'scripts'}")
    found = session.machine.asked()
    assert found["torch"] == torch.__version__
    assert all(gpu["bytes"] > 0 for gpu in found["gpus"])
    monkeypatch.setattr(session.sys, "executable", "/bin/false")
    assert session.machine.asked() == {"gpus": []}


def test_the_folder_has_day_and_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "ROOT", tmp_path)
    first, second = (session._folder(None, {"gpus": [CARD]}) for _ in range(2))
    assert first.parent == tmp_path / "experiments"
    assert first.name.endswith("-A100-SXM4-80GB") and second.name == first.name + "-2"
    (first / "faults.json").touch()
    (first / "notes.json").touch()
    assert session._folder(str(first), {}) == first  # with what is somebody else's
    assert [path.name for path in first.iterdir()] == ["notes.json"]


def fake_nvidia_smi(monkeypatch, tmp_path, *readings):
    """A program that says these MiB of one GPU, one after the other, the last for ever."""
    (tmp_path / "readings").write_text("\n".join(map(str, readings)) + "\n")
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncd {tmp_path}\nhead -n 1 readings\n'
                       '[ "$(wc -l < readings)" = 1 ] || sed -i 1d readings\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_memory_that_is_left_on_a_gpu(monkeypatch, tmp_path):
    fake_nvidia_smi(monkeypatch, tmp_path, 500, 9000, 540)
    before = machine.used_memory()
    assert before == [500] and machine.memory_left(before) == 0  # the driver took its time
    fake_nvidia_smi(monkeypatch, tmp_path, 500, 9000)
    assert leaks.gpu_memory() == [500]
    assert machine.memory_left([500], seconds=0) == 8500
    assert leaks.gpu_memory_left([500], seconds=0) == {0: 8500}
    assert leaks.gpu_memory_left([9000], seconds=0) == {}
    monkeypatch.setenv("PATH", "")
    assert machine.used_memory() == leaks.gpu_memory() == []
    assert machine.memory_left([500]) is None


def test_the_log_of_a_machine_has_its_reports(tmp_path):
    code = ("from _unattended import machine\n"
            "machine.subprocess.run = lambda command, **_: print('ran', command[0])\n"
            "machine._print_reports()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"})
    assert done.stdout.count("\nran ") == 3, done.stderr


# the summary


def write_results(out):
    rows = [dict(case="GPT-2 1B, ddp", predicted_bytes=20e9, fits=True, measured_bytes=19e9,
                 off_pct=5.3, seconds=0.5, operators="cpu", reserved=21e9),
            dict(case="Llama-3-8B, fp32", predicted_bytes=99e9, fits=False),
            dict(case="Llama-2-7B, mixed", predicted_bytes=None, error="RuntimeError: no")]
    (out / "one_rank.json").write_text(json.dumps({
        "ranks": 8, "card_bytes": 85e9, "workspace_bytes": 17e6, "rows": rows}))
    (out / "bench_memory.json").write_text(json.dumps({
        "cases": 3, "methods": {"dry run": {"cases": 3, "mean_pct": 1.2, "worst_pct": 3.4},
                                "DeepSpeed": {"cases": 0}},
        "residuals": [{"method": "dry run", "case": "GPT-2 deep", "off_pct": -3.4}]}))
    (out / "rates.json").write_text(json.dumps({
        "matmul torch.bfloat16 tf32=False 4096": [5e-4, 250],
        "matmul torch.float32 tf32=True 4096": [5e-4, 900],
        "copy, read+written GB/s": 1700, "h2d pinned GB/s": 25.5}))
    (out / "faults.json").write_text(json.dumps({"backend": "cpu:gloo,cuda:nccl", "rows": [
        {"fault": "fine", "wrong": []}, {"fault": "is_killed", "wrong": ["512 MiB left"]},
        {"fault": "one_gpu", "skipped": "needs several GPUs"}]}))
    (out / "gpu_tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="one"/>'
        '<testcase classname="tests.a" name="two"><failure/></testcase>'
        '<testcase name="three"><skipped/></testcase>'
        '</testsuite></testsuites>')
    (out / "long_gpu_tests.xml").write_text(
        '<testsuite><testcase classname="" name="tests.b"><error/></testcase></testsuite>')
    (out / "04_fsdp.log").write_text("✓ Exercise 4.1  good\n✗ Exercise 4.2  rank 1 differs\n"
                                     "✗ CPU offload  rank 0 raised\n")


def test_the_summary_says_what_agreed_and_what_did_not(tmp_path):
    write_results(tmp_path)
    data = {"machine": FOUND, "date": "2026-11-22", "commit": "abc", "seconds": 600, "small": False,
            "minutes_allowed": 30, "parts": [
                {"name": "04_fsdp", "outcome": "passed", "seconds": 99, "why": "", "left": 700},
                {"name": "07a_x", "outcome": "failed", "seconds": 1, "why": "", "left": 0}]}
    (tmp_path / "07a_x.log").write_text("✗ Exercise 7.1  rank 0 raised\n")
    page = summary.page(data, tmp_path)
    for line in ("85.0 GB per GPU; torch 2.13.0, CUDA 13.0, Python 3.11.2, transformers 5.0; "
                 "commit abc. 10.0 of 30 minutes.",
                 "| 04_fsdp | passed | 99 | **700 MiB left on a GPU** |",
                 "| GPT-2 1B, ddp | 20.000 | 19.000 | **+5.3 %** | 21.000 | 0.500 s |",
                 "| Llama-3-8B, fp32 | 99.000 | does not fit 85.0 GB | | | |",
                 "| Llama-2-7B, mixed | – | RuntimeError: no | | | |",
                 "Predicted: a dry run, and 0.017 GB of cuBLAS's workspaces. Measured: "
                 "torch.cuda.max_memory_allocated of the second step; reserved: what the "
                 "allocator had taken from the driver by then. Bold: more than 5 % off. "
                 "Predicted with the CPU's operators: GPT-2 1B, ddp.",
                 "## Rates, and the data sheet of A100-80",
                 "| bf16 products, TFLOP/s | 250 | 312 | 80% |",
                 "| memory, GB/s | 1700 | 2039 | 83% |", "| h2d pinned GB/s | 25.5 | | |",
                 "| dry run | 3 | 1.2 % | 3.4 % |",
                 "Ours: dry run and recording. The dry run's furthest off: GPT-2 deep -3.4 %.",
                 "## The launcher's faults over cpu:gloo,cuda:nccl: 1 of 2 as they should be",
                 "- **is_killed**: 512 MiB left", "- one_gpu: not tried, needs several GPUs",
                 "## Tests marked gpu: 1 passed, 1 failed, 1 skipped", "- **tests.a.two**",
                 "## Long tests marked gpu: 0 passed, 1 failed, 0 skipped", "- **tests.b**",
                 "- 04_fsdp: ✗ Exercise 4.2  rank 1 differs",
                 "- 04_fsdp: ✗ CPU offload  rank 0 raised",
                 "- 07a_x: ✗ Exercise 7.1  rank 0 raised"):
        assert line in page.splitlines(), line


def test_small_sizes_are_no_result(tmp_path):
    write_results(tmp_path)
    data = {"machine": FOUND, "date": "2026-11-22", "commit": "abc", "seconds": 1, "small": True,
            "minutes_allowed": 30, "parts": []}
    page = summary.page(data, tmp_path)
    assert "Nothing is judged: the workspaces are larger" in page and "Bold:" not in page
    assert "nothing here is a result.**" in page
    assert "| 19.000 | +5.3 % | 21.000 | 0.500 s |" in page


def test_a_summary_without_results_is_short(tmp_path):
    data = {"machine": FOUND, "date": "2026-11-22", "commit": "abc", "seconds": 1, "small": True,
            "minutes_allowed": 30, "parts": []}
    (tmp_path / "one_rank.json").write_text("{ half of")
    assert "##" not in summary.page(data, tmp_path)
    assert "only to try the command" in summary.page(data, tmp_path)
    (tmp_path / "faults.json").write_text('{"backend": "gloo", "rows": []}')
    assert "Ranks shared a GPU, so NCCL was not tried" in summary.page(data, tmp_path)
    (tmp_path / "faults.json").write_text('{"rows": []}')
    assert "## faults\n\n**Cannot be read: KeyError: 'backend'**" in summary.page(data, tmp_path)


# one rank of 8


def test_a_row_of_one_rank(monkeypatch):
    case = one_rank.CASES[-1]
    assert case.name == "Llama-3-8B, fsdp2, mixed, 4x2048, checkpointing"
    measured = {"bytes": 20_000_000_000, "reserved": 1, "driver": 2, "seconds": 0.25}

    def answer(function, *arguments):
        if arguments[-1] == "cuda":
            raise RuntimeError("cannot fake a GPU's tensors here")
        return dict(measured) if function is one_rank.measure else 20_000_000_000

    monkeypatch.setattr(one_rank, "in_fresh_process", answer)
    found = one_rank.row(case, 85_000_000_000, small=False)
    assert found["operators"] == "cpu"
    assert found["fits"] and found["off_pct"] == 0 and found["driver"] == 2
    assert one_rank.line(found).endswith("measured   20.000 GB  +0.0 %  step 0.250 s")
    small = one_rank.row(case, 16_000_000_000, small=False)
    assert small["measured_bytes"] is None and one_rank.line(small).endswith("does not fit")

    def fails(*_):
        raise RuntimeError("OutOfMemoryError: too much")

    monkeypatch.setattr(one_rank, "in_fresh_process", fails)
    assert one_rank.line(one_rank.row(case, 85e9, False)).endswith("OutOfMemoryError: too much")


def test_the_cases_are_models_of_one_seven_and_eight_billion():
    from labs.training.hf_configs import on_meta

    models = {case.model for case in one_rank.CASES}
    found = {model: sum(p.numel() for p in on_meta(one_rank._config(model, False)).parameters())
             for model in models}
    assert {model: round(count / 1e9, 1) for model, count in found.items()} == {
        "GPT-2 1B": 1.1, "Llama-2-7B": 6.7, "Llama-3-8B": 8.0}


def test_a_fault_that_is_not_as_it_should_be(monkeypatch, warm_launcher):
    from faults import on_gpus
    from faults.table import Fault

    monkeypatch.setattr(on_gpus, "shown", lambda fault: "RankFailed: rank 0 raised KeyError")
    monkeypatch.setattr(machine, "memory_left", lambda before: 512)
    found = launcher_faults.one(Fault(time.sleep, ("rank 1",)))
    assert found["wrong"] == ["does not say ['rank 1']", "512 MiB left"]


@pytest.mark.slow
def test_real_parts_on_the_pretend_node(tmp_path):
    """The launcher's faults on what says that it is NCCL, and one rank of 8 jobs, small."""
    node = pytest.importorskip("pretend.node")
    done = subprocess.run(
        [ROOT / "scripts" / "on-gpu", "--small", "--out", tmp_path, "--only", "machine", "faults",
         "one-rank"], capture_output=True, text=True, timeout=400,
        # its nvidia-smi lists the processes that share a temporary directory
        env=node.environment(2, PYTHON=sys.executable, TMPDIR=str(tmp_path)))
    page = (tmp_path / "summary.md").read_text()
    assert done.returncode == 0 and "**3 passed.**" in page, page + done.stderr
    assert page.startswith("# 2x NVIDIA A100") and page in done.stdout
    assert "## The launcher's faults over cpu:gloo,cuda:nccl: 9 of 9 as they should be" in page
    rows = json.loads((tmp_path / "one_rank.json").read_text())["rows"]
    assert {row["case"].split(",")[0] for row in rows} == {case.model for case in one_rank.CASES}
    assert all(row["measured_bytes"] > 0 and row["operators"] == "cuda" for row in rows)
    assert "torch" in (tmp_path / "machine.log").read_text()

"""Jobs of notebook 06: a script on ranks, as torchrun starts it and forked, and what is left."""

import json
import os
import re
import socket
import sys
import threading
import time
from _thread import interrupt_main
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from _build.source import read_source  # noqa: E402

import labs.scaling as lab  # noqa: E402
from labs.checks.scripts import commands, files, forked
from labs.checks.verdicts import Verdict  # noqa: E402
from labs.scaling import ragged  # noqa: E402
from labs.workers import devices, processes, reports  # noqa: E402
from labs.workers.launch_error import Stopped  # noqa: E402

SMALL = ("--samples", 12, "--batch", 3, "--layers", 1, "--hidden", 16)


def run(folder, text, *arguments, ranks=2, **options):
    (folder / "script.py").write_text(text)
    return forked.run(folder / "script.py", arguments, ranks, **options)


def interrupt_when(path):
    """Interrupts the main thread a moment after this file has been written."""
    def wait():
        while not path.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        interrupt_main()

    threading.Thread(target=wait).start()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The worked train.py on 2 ranks."""
    path = files.write_script("train.py", tmp_path_factory.mktemp("worked"))
    return forked.run(path, SMALL, 2)


@pytest.mark.parametrize("name", ["train.py", "job.py"])
def test_the_script_is_what_the_notebook_writes(tmp_path, name):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / name).write_text((files.SCRIPTS / name).read_text())
    (tmp_path / "06.py").write_text(f'# %%\nlab.write_script("{name}")\n')
    [cell], problems = read_source(tmp_path / "06.py", "06.py")
    shown = "\n".join(text for _, text in cell.solution_lines()).partition("\n")[2]
    assert not problems
    assert files.write_script(name, tmp_path).read_text() == shown + "\n"


def test_a_run_says_what_its_ranks_did(trained, nothing_left):
    assert (trained.code, trained.codes, trained.left) == (0, [0, 0], 0)
    assert trained.batches == [4, 4] and len(trained.metrics["steps"]) == 4
    assert re.fullmatch(r"4 steps on 2 ranks, loss \d.\d+\n", trained.output[0])
    assert trained.output[1] == ""
    first, second = trained.records
    assert [len(step.batches[0].rows) for step in first.steps] == [3, 3, 3, 3]
    assert first.steps[1].learning_rate == pytest.approx(0.75e-3)
    assert first.written == [trained.metrics_path] and second.written == []
    assert all((first.parameters[name] == second.parameters[name]).all()
               for name in first.parameters)
    assert {*first.steps[0].gradients} == {*first.parameters}


def test_with_fsdp_each_rank_has_a_shard(trained):
    path = files.SCRIPTS / "train.py"
    found = forked.run(path, (*SMALL, "--strategy", "fsdp"), 2)
    whole, shards = trained.records[0].parameters, [r.parameters for r in found.records]
    assert all(record.sharded for record in found.records)
    assert all(len(shards[0][name]) + len(shards[1][name]) == len(whole[name]) for name in whole)
    nbytes = sum(tensor.nbytes for tensor in whole.values())
    assert {step.held for record in trained.records for step in record.steps} == {nbytes}
    for rank, record in enumerate(found.records):
        assert {step.held for step in record.steps} == {nbytes // 2}
        assert record.shards == {name: (0, rank, 2) for name in whole}
        assert {members for size, members in record.gathered if size > 1000} == {(0, 1)}
    assert [step["loss"] for step in found.metrics["steps"]] == pytest.approx(
        [step["loss"] for step in trained.metrics["steps"]], abs=1e-4)


@pytest.mark.parametrize(("name", "arguments"), [("train.py", SMALL), ("job.py", ("--samples", 8))])
def test_ddp_ends_before_its_group(tmp_path, name, arguments):
    """On gloo the end of DDP's reducer, where it is the last to hold the group, joins a thread that
    may still drop a tensor: about one job in ten never ended on a busy machine."""
    held = """
import gc
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def destroyed(destroy=dist.destroy_process_group):
    print([type(o) for o in gc.get_objects() if isinstance(o, DistributedDataParallel)])
    destroy()
dist.destroy_process_group = destroyed
"""
    found = run(tmp_path, held + files.SCRIPTS.joinpath(name).read_text(), *arguments)
    assert [text.splitlines()[-1] for text in found.output] == ["[]", "[]"]


def test_a_default_mesh_is_the_cpus_where_gpus_are_hidden(tmp_path, monkeypatch):
    """As torch says it that was built for GPUs, on a rank of a check on a node with GPUs."""
    text = "import torch\nprint(torch._C._get_accelerator(), end='')\n"
    monkeypatch.setattr(devices, "gpus", lambda: 0)
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    with devices.meshes_on_cpu():
        assert torch._C._get_accelerator().type == "cpu"
    assert torch._C._get_accelerator().type == "cuda"
    assert run(tmp_path, text, ranks=1).output == ["cpu"]


def test_a_rank_that_fails_ends_the_others_and_the_job(nothing_left):
    found = forked.run(files.SCRIPTS / "train.py", SMALL, 2, failing_rank=1)
    assert (found.code, found.codes, found.left) == (1, [-15, 1], 0)
    assert found.records[1].error[1] == "raised on rank 1 on purpose, by the check"
    assert "in train" in found.output[1] and found.metrics is None


@pytest.mark.parametrize(("text", "code"), [
    ("import sys; sys.exit(3)", 3), ("raise SystemExit", 0), ("exit('why')", 1), ("def f(", 1),
    ("import os; os._exit(4)", 4), ("from __future__ import annotations", 0)])
def test_a_rank_has_the_exit_code_that_python_would_have(tmp_path, text, code):
    found = run(tmp_path, text, ranks=1)
    assert found.codes == [code] and found.code == (code != 0)


def test_a_process_that_a_rank_leaves_behind_is_counted_and_ended(tmp_path, nothing_left):
    text = ("import os, time\nif os.environ['RANK'] == '1' and os.fork() == 0:\n"
            "    time.sleep(300)\n    os._exit(0)\n")
    assert run(tmp_path, text).left == 1


def test_a_run_that_is_interrupted_while_ranks_start_leaves_none(tmp_path, monkeypatch,
                                                                 nothing_left):
    start, started = forked.processes.start, []

    def start_one(*arguments):
        if started:
            raise KeyboardInterrupt
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(forked.processes, "start", start_one)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "import time; time.sleep(60)")
    assert started[0].exitcode is not None


def test_ranks_meet_at_no_port_that_was_free_before(tmp_path, monkeypatch):
    """While the fork server starts, another program may have taken it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(forked.processes, "free_port", lambda: taken.getsockname()[1])
        found = run(tmp_path, "import torch.distributed as dist; dist.init_process_group('gloo')")
    assert found.code == 0, found.output


def test_ranks_believe_in_hosts(tmp_path):
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    text = f"import os\nprint(*(os.environ[name] for name in {names}))\n"
    found = run(tmp_path, text, ranks=4, hosts=2)
    assert found.output == ["0 0 0 2 2\n", "1 1 0 2 2\n", "2 0 1 2 2\n", "3 1 1 2 2\n"]


def test_ranks_that_wait_for_each_other_are_stopped(tmp_path, monkeypatch, nothing_left):
    monkeypatch.setattr(reports, "QUIET", 1.5)
    text = ("import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
            "if dist.get_rank():\n    dist.broadcast(torch.zeros(1), 0)\n"
            "dist.all_reduce(torch.zeros(1))\n")
    found = run(tmp_path, text)
    assert found.code is None and "broadcast" in found.waiting[1]
    assert found.last_calls()[0].startswith("rank 0 waited in all_reduce at ")


def test_an_interrupt_says_where_the_ranks_were(tmp_path, nothing_left):
    text = ("import time, torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\ndist.all_reduce(torch.zeros(1))\n"
            "open('../ready', 'a').close()\ntime.sleep(300)\n")
    ready = Path(processes.private_directory(), "ready")
    interrupt_when(ready)
    try:
        with pytest.raises(Stopped) as stopped:
            run(tmp_path, text)
    finally:
        ready.unlink()
    assert str(stopped.value) == ("interrupted; all ranks were stopped\nrank 0 had last called "
                                  "all_reduce\nrank 1 had last called all_reduce")
    assert not list(Path(processes.private_directory()).glob("tmp*"))


def test_samples_are_prompts_with_answers():
    samples = ragged.answer_samples(50, seed=1)
    counts = [int(ragged.count_answers(sample)) for sample in samples]
    assert set(counts) <= set(range(1, 25)) and len(set(counts)) > 10
    assert {sample["input_ids"].shape for sample in samples} == {(32,)}
    assert all((sample["labels"][:8] == -100).all() for sample in samples)
    assert len({tuple(sample["input_ids"].tolist()) for sample in samples}) == 50


PRINTS = ("import json, os, sys\n"
          "print(json.dumps([sys.argv[1:], sorted(os.environ), __name__, sys.path[0]]))\n")


@pytest.mark.slow
def test_a_forked_rank_begins_as_one_of_torchruns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forked_rank = json.loads(run(tmp_path, PRINTS, "--a", 1, ranks=1).output[0])
    result = commands.torchrun("script.py", "--a", "1", ranks=1)
    real = json.loads(result.output)
    assert result.code == 0 and "torchrun --standalone" in capsys.readouterr().out
    assert forked_rank[0][:2] == real[0] and forked_rank[2] == real[2] == "__main__"
    assert os.path.realpath(forked_rank[3]) == os.path.realpath(real[3])
    assert {name for name in {*real[1]} - {*forked_rank[1]}
            if not name.startswith("TORCH")} == set()  # what concerns torchrun's own process


@pytest.mark.slow
def test_torchrun_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(300)")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    found = commands.torchrun("script.py", ranks=1, seconds=8)
    assert found.code is None and "stopped" in repr(found)
    (tmp_path / "script.py").write_text("import time\nopen('ready', 'a').close()\ntime.sleep(300)")
    interrupt_when(tmp_path / "ready")
    with pytest.raises(Stopped, match="^interrupted; torchrun was stopped, with all that it had"):
        commands.torchrun("script.py", ranks=1)
    time.sleep(0.5)
    assert not [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(tmp_path)
                and "script.py" in " ".join(p.info["cmdline"])]
    assert not list((tmp_path / "temporary").iterdir())
    assert not list(Path(processes.private_directory()).glob("tmp*"))


def test_a_script_with_a_gap_is_not_started(tmp_path, capsys):
    (tmp_path / "train.py").write_text('raise NotImplementedError("Exercise 6.1")\n')
    found = commands.torchrun(str(tmp_path / "train.py"), ranks=2)
    assert isinstance(found, Verdict) and found.passed is None
    assert capsys.readouterr().out == ""


def test_a_script_that_is_not_there_is_not_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    found = commands.torchrun("trian.py")
    assert found.passed is False and "no file trian.py; there is train.py" in str(found)
    assert "no such command" in str(commands.run_command(["torchrum", "train.py"]))
    assert capsys.readouterr().out == ""


def test_a_commands_exit_code_and_output(capsys):
    found = commands.run_command([sys.executable, "-c", "print('one'); exit(7)"])
    assert (found.code, found.output) == (7, "one\n")
    assert capsys.readouterr().out.endswith("one\n")


# ---- what a run has written

STEP = {"loss": 1.5, "learning_rate": 1e-3, "seconds": 0.5, "tokens": 64}
METRICS = {"ranks": 2, "steps": [STEP, STEP]}


def ended(code=0):
    """A run that begins now and takes a second."""
    return commands.CommandResult(("torchrun", "train.py"), code, 1.0, "", time.time())


def test_what_a_run_wrote_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = ended()
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    assert lab.show_metrics(run).rows[1] == (1, "1.500", "1.0e-03", "64", "500.0", "128")


@pytest.mark.parametrize(("text", "code", "age", "said"), [
    (json.dumps(METRICS), 1, 0, "the run has failed (exit code 1 after 1 s), so there is no "),
    (json.dumps(METRICS), None, 0, "the run has been stopped (stopped after 1 s)"),
    (json.dumps(METRICS), 0, 60, "metrics.json is of an earlier run: this one wrote none"),
    (json.dumps(METRICS), 0, -60, "another run has written metrics.json since"),
    (None, 0, 0, "there is no metrics.json: the run wrote none"),
    ("{", 0, 0, "metrics.json is not JSON"),
    ('{"losses": [], "ranks": []}', 0, 0, 'no int "ranks" and list "steps": has another script'),
    ('{"ranks": 2, "steps": [{"loss": 1.0}]}', 0, 0, "step 0 in metrics.json lacks a number that "
                                                     "is shown here: KeyError: 'learning_rate'")])
def test_what_a_run_has_not_written_is_said_in_a_sentence(tmp_path, monkeypatch, text, code, age,
                                                          said):
    monkeypatch.chdir(tmp_path)
    run = ended(code)
    if text:
        (tmp_path / "metrics.json").write_text(text)
        os.utime("metrics.json", (run.began - age,) * 2)
    verdict = lab.show_metrics(run)
    assert verdict.passed is False and said in str(verdict)
    assert lab.show_metrics(verdict) is verdict

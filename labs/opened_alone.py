"""What is missing where a notebook was opened alone and its first cell has cloned the workbook: the
packages, installed into the kernel's own Python, as on Colab and Kaggle.

torch stays as it is there, and so does everything that this kernel has loaded already: a notebook
could not go on without a restart otherwise.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of the page and of the kernel that are there already.
OF_THE_HOST = {"torch", "jupyterlab", "ipykernel"}
_REASON = re.compile(r"ERROR: (?!ResolutionImpossible)|.* depends on .*\d|The user requested ")
# "Downloading https://HOST/PATH/tqdm-4.67-py3-none-any.whl (78 kB)": the package, the size
_LOOKED_UP = re.compile(r"Collecting ([\w.-]+)")
_DOWNLOAD = re.compile(r"Downloading (?:\S*/)?([\w.]+-[\w.]+?)(?:-\S*\.whl|\.tar\.gz|\.zip) "
                       r"\(([\d.]+ \wB)\)")  # and not what pip reads first, .whl.metadata


def complete(error: type[Exception], root: Path = ROOT) -> None:
    """Installs what is missing, and lets ranks find labs; raises `error` with one sentence where
    that cannot be done.

    error: of the notebook's first cell, shown without a traceback.
    """
    if (root / ".venv" / "setup.stamp").exists():
        raise error(f"This kernel is not the workbook's own: choose the one of {root / '.venv'} "
                    "(VS Code: Select Kernel, Python Environments), or start ./scripts/lab.")
    needs = requirements(root)
    torch = installed("torch")
    if not torch or not needs["torch"].specifier.contains(torch, prereleases=True):
        raise error(f"The workbook needs torch{needs['torch'].specifier} and this kernel's Python "
                    f"has {torch or 'none'}: start ./scripts/lab in {root}, or install one and "
                    "restart the kernel.")
    missing = [need for name, need in needs.items() if name not in OF_THE_HOST
               and not is_met(need) and name not in loaded()]
    if missing:
        install(missing, error)
    # Ranks and scripts are processes of their own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root),
                                                             os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()
    print("The workbook is complete: the notebook goes on below.", flush=True)


def requirements(root: Path) -> dict:
    """Name -> the requirement, of what the workbook needs (packaging.requirements.Requirement)."""
    from packaging.requirements import Requirement  # every ipykernel comes with it

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [Requirement(text) for text in project["dependencies"]]
    return {need.name: need for need in needs}


def installed(name: str) -> str:
    """The version of a package in this Python, '' if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def is_met(need) -> bool:
    found = installed(need.name)
    return bool(found) and need.specifier.contains(found, prereleases=True)


def loaded() -> dict[str, str]:
    """Name -> version, of the packages that this kernel has loaded, and of torch."""
    modules = {name.partition(".")[0] for name in sys.modules} | {"torch"}
    found = {package for module, packages in metadata.packages_distributions().items()
             if module in modules for package in packages}
    return {name: installed(name) for name in found if installed(name)}


def install(missing: list, error: type[Exception]) -> None:
    """Installs requirements by pip; says what it downloads while it does."""
    start, kept = time.monotonic(), loaded()
    print(f"Installing {', '.join(need.name for need in missing)} into {sys.prefix}, with what "
          f"they need; torch {kept['torch']} stays. Looked up and downloaded:",
          end="", flush=True)
    code, said = run_pip([f"{name}=={version}" for name, version in kept.items()], missing)
    if code:
        why = [line for line in said if _REASON.match(line)] or said[-1:]
        raise error(f"The packages of the workbook could not be installed into {sys.prefix}: "
                    f"{'; '.join(why).replace('ERROR: ', '')}. On a machine of your own start "
                    f"./scripts/lab in {ROOT}.")
    print(f"Installed in {time.monotonic() - start:.0f} s.", flush=True)


def run_pip(constraints: list[str], requirements: list) -> tuple[int, list[str]]:
    """(exit code, lines) of pip, which installs; prints each download, with its size, at once."""
    said = []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:  # pip takes none as arguments
        file.write("\n".join(constraints))
        file.flush()
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check",
                   "--progress-bar", "off", "-c", file.name, *map(str, requirements)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as pip:
            for line in pip.stdout:
                said.append(line.strip())
                if text := progress(said):
                    print(text, end="", flush=True)
    print(flush=True)
    return pip.returncode, said


def progress(lines: list[str]) -> str:
    """What to print of pip's last line: a name that it looks up, or a download with its size."""
    if found := _DOWNLOAD.match(lines[-1]):
        return f"\n  {found[1]}, {found[2]}"
    if not (found := _LOOKED_UP.match(lines[-1])):
        return ""
    # pip looks up several, one after the other, before it downloads them
    earlier = [line for line in lines[:-1] if _LOOKED_UP.match(line) or _DOWNLOAD.match(line)]
    return f" {found[1]}" if earlier and _LOOKED_UP.match(earlier[-1]) else f"\n  {found[1]}"

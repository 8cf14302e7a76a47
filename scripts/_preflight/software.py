"""Python, packages, torch, CUDA, NCCL and the driver, and whether they fit together."""

import contextlib
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from _unattended import nvidia_smi

from _preflight.found import NOTE, STOP, Found, none, ok, stop, worst
from _preflight.row import DRIVER

ROOT = Path(__file__).resolve().parents[2]
LOWEST_PYTHON, LOWEST_TORCH = (3, 11), (2, 11)
# CUDA major version -> the oldest driver for Linux that runs it, of whatever minor version.
# Source: CUDA Compatibility, "Minor Version Compatibility".
LOWEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
_NEEDED = ("torch", "transformers", "accelerate", "jupyterlab", "ipywidgets", "anywidget",
           "matplotlib")


def python() -> Found:
    """This process's Python."""
    version = platform.python_version()
    value = f"{version} at {sys.executable}"
    if sys.version_info < LOWEST_PYTHON:
        return stop(value, "The workbook needs Python 3.11 or newer: "
                           "PYTHON=python3.12 scripts/preflight.")
    return ok(value, version=version)


def packages() -> Found:
    """The workbook's packages against requirements.lock."""
    versions, missing, other = {}, [], []
    for name, pinned in locked().items():
        found = _version(name)
        if found is None:
            missing += [name] if name in _NEEDED else []
        elif name in _NEEDED:
            versions[name] = found
            # a torch that was there already is kept, whatever its version
            if name != "torch" and found != pinned:
                other.append(f"{name} {found} instead of {pinned}")
    value = ", ".join(f"{name} {found}" for name, found in versions.items())
    if missing:
        return stop(value or "none", f"{', '.join(missing)} missing: remove .venv and run "
                                     "scripts/lab.", versions=versions)
    problems = [(NOTE, f"The lock has others: {', '.join(other)}.")] if other else []
    return worst(value, problems, versions=versions)


def locked() -> dict[str, str]:
    """Name -> version, of requirements.lock."""
    found = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    return {name.lower(): version for name, version in found}


def _version(name) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def torch_build() -> Found:
    """torch's own version, and what it was built for."""
    import torch

    build = torch.version.cuda and f"CUDA {torch.version.cuda}" or "CPU"
    value = f"{torch.__version__}, a build for {build}"
    data = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if numbers(torch.__version__)[:2] < LOWEST_TORCH:
        return stop(value, "The workbook needs torch 2.11 or newer: remove .venv, or install a "
                           "newer torch into it.", **data)
    if not torch.version.cuda and nvidia_smi.is_there():
        return stop(value, "This machine has a GPU that a CPU build of torch cannot use: remove "
                           ".venv and run scripts/lab, which installs a build for CUDA.", **data)
    return ok(value, **data)


def driver() -> Found:
    """The driver against torch's CUDA, NCCL, and whether torch can use the GPUs."""
    if not nvidia_smi.is_there():
        return none("no GPU")
    versions = nvidia_smi.query("driver_version").get("driver_version")
    if not versions:
        return stop(nvidia_smi.complaint(), DRIVER)
    return _fit(versions[0])


def _fit(installed) -> Found:
    import torch

    from labs.workers import cuda

    if not torch.version.cuda:  # the row of torch says what to do
        return none(f"driver {installed}, which a CPU build of torch does not use")
    nccl, found = ".".join(map(str, cuda.nccl_version())), cuda.count()
    value = f"driver {installed}, NCCL {nccl}, {found} GPUs for torch"
    lowest = LOWEST_DRIVERS.get(numbers(torch.version.cuda)[0], (0,))
    problems = []
    if numbers(installed)[:2] < lowest:
        problems.append((STOP, f"CUDA {torch.version.cuda} needs driver "
                               f"{'.'.join(map(str, lowest))} or newer: rent a machine with one, "
                               "or install a torch that is built for an older CUDA."))
    elif not found:
        problems.append((STOP, "torch sees no GPU although the driver does: look at "
                               "CUDA_VISIBLE_DEVICES, and start the container with --gpus all."))
    return worst(value, problems, driver=installed, nccl=nccl, gpus=found)


def numbers(version: str) -> tuple[int, ...]:
    """"2.13.0+cu129" -> (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])))

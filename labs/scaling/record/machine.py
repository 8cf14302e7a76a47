"""The machine and the versions of a record, and the name of its folder."""

import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from labs.pictures.machine import inspect_machine
from labs.workers import cuda

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "numpy")


def facts(root: Path) -> dict[str, object]:
    """Cores, bytes of memory, GPUs, ranks of a launch, system, versions, and the commit of root."""
    found = inspect_machine()
    return {"cores": found.cores, "memory": found.memory,
            "gpus": [{"name": name, "bytes": nbytes} for name, nbytes in found.gpus],
            "ranks": found.plan.ranks, "backend": found.plan.library,
            "system": platform.platform(), "versions": versions(), "commit": commit(root)}


def versions() -> dict[str, str]:
    """Name -> version, of what is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if cuda.count():
        found["nccl"] = ".".join(map(str, cuda.nccl_version()))
    return found


def commit(root: Path) -> str:
    """The commit in short, with "-dirty" where files have changed; "unknown" without git."""
    try:
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"],
                              capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def title(found: dict) -> str:
    """"8x NVIDIA A100-SXM4-80GB", or "2 cores, no GPU"."""
    names = [gpu["name"] for gpu in found["gpus"]]
    if not names:
        return f"{found['cores']} cores, no GPU"
    return f"{len(names)}x {names[0]}" if len(names) > 1 else names[0]


def folder_name(found: dict) -> str:
    """"laptop" without a GPU, else the GPUs, as scripts/solutions names its folders."""
    if not found["gpus"]:
        return "laptop"
    return re.sub(r"[^\w.-]+", "-", title(found).replace("NVIDIA ", ""))

"""Packages of other makers, for tests that ask them what they think of our files: their wheels,
unpacked and never installed, without what they need."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpacked(folder: Path, *requirements: str) -> Path:
    """A folder for sys.path with these wheels; skips the test where they are not to be had."""
    done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps",
                           "--only-binary=:all:", *requirements, "-d", folder],
                          capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"{', '.join(requirements)}: not to be had: "
                    f"{done.stderr.strip().splitlines()[-1]}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder / "unpacked")
    return folder / "unpacked"

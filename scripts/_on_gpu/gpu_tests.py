"""The tests marked gpu, from the files that have any: others may need what is not installed."""

import os
import sys

from _on_gpu.parts import ROOT

REPEATED = "test_gpu_faults"  # the part "faults" runs the same table


def files() -> list[str]:
    """Returns the test files with a test marked gpu."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))
            if "pytest.mark.gpu" in path.read_text() and path.stem != REPEATED]


if __name__ == "__main__":
    os.chdir(ROOT)
    os.execv(sys.executable, [
        sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-m", "gpu", "-v",
        "-p", "no:cacheprovider", "--continue-on-collection-errors",
        f"--junitxml={sys.argv[1]}", *files()])

"""What nvidia-smi answers, for a bounded time: a driver that is broken does not answer at all."""

import shutil
import subprocess

SECONDS = 20  # of one call


def is_there() -> bool:
    """Whether this machine has the driver's program."""
    return shutil.which("nvidia-smi") is not None


def query(*fields: str, of: str = "gpu") -> dict[str, list[str]]:
    """Field -> its value for each GPU (or each row of `of`, such as "compute-apps"). A field that
    this driver does not know, such as one that was renamed, is left out. Raises OSError or
    subprocess.SubprocessError where nvidia-smi does not answer."""
    answer = _asked(fields, of)
    if answer is None and len(fields) > 1:  # one unknown field makes it refuse all
        return {name: column for field in fields for name, column in query(field, of=of).items()}
    if answer is None:
        return {}
    rows = [[cell.strip() for cell in line.split(",", len(fields) - 1)] for line in answer]
    return {field: [row[number] for row in rows] for number, field in enumerate(fields)}


def _asked(fields, of):
    done = run(f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits")
    return done.stdout.strip().splitlines() if done.returncode == 0 else None


def complaint() -> str:
    """The first line that it prints when it is asked for nothing: why it has no answers."""
    done = run()
    return ((done.stdout + done.stderr).strip().splitlines() or ["nvidia-smi says nothing"])[0]


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Calls nvidia-smi."""
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                          timeout=SECONDS)


def number(text: str) -> float | None:
    """A cell as a number; None for "[N/A]", "[Not Supported]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None

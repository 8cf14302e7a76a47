"""Which processes have a context on which GPU: one empty file for each, in a directory that all
processes of this user share. nvidia-smi lists those that live."""

import contextlib
import os
import tempfile

FOLDER = os.path.join(tempfile.gettempdir(), f"pretend-gpus-{os.getuid()}")


def enter(gpu: int) -> None:
    """Says that this process has a context on a GPU."""
    with contextlib.suppress(OSError):
        os.makedirs(FOLDER, exist_ok=True)
        with open(os.path.join(FOLDER, f"{os.getpid()}.{gpu}"), "w"):
            pass


def on_gpus(gpu: int) -> list[int]:
    """Returns the living processes with a context on a GPU, and forgets the others."""
    found = []
    for name in sorted(os.listdir(FOLDER)) if os.path.isdir(FOLDER) else []:
        pid, _, number = name.partition(".")
        if not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(FOLDER, name))
        elif int(number) == gpu:
            found.append(int(pid))
    return found

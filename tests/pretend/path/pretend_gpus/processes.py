"""Which processes of this node have a context on which GPU: one empty file for each, in a directory
of this user. nvidia-smi lists those that live."""

import contextlib
import os
import tempfile

FOLDER = os.path.join(tempfile.gettempdir(), f"pretend-nodes-{os.getuid()}")
NODE = os.environ.get("PRETEND_NODE", "")  # several are there at once, when tests run beside others


def enter(gpu: int) -> None:
    """Says that this process has a context on a GPU."""
    with contextlib.suppress(OSError):
        os.makedirs(FOLDER, exist_ok=True)
        with open(os.path.join(FOLDER, f"{NODE}.{os.getpid()}.{gpu}"), "w"):
            pass


def on_gpus(gpu: int) -> list[int]:
    """Returns the living processes with a context on a GPU of this node, and forgets all that are
    dead."""
    found = []
    for name in sorted(os.listdir(FOLDER)) if os.path.isdir(FOLDER) else []:
        node, pid, number = name.split(".")
        if not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(FOLDER, name))
        elif (node, int(number)) == (NODE, gpu):
            found.append(int(pid))
    return found

"""The files of one checkout that set-up reads and writes. Readable by Python 3.6."""

import os

from _trouble import Trouble

PEERS = '; extra == "peers"'  # pip and conda pass over a line with this marker


class Checkout:
    """The paths that set-up reads and writes in one checkout of the workbook."""

    def __init__(self, root):
        self.root = root
        self.venv = os.path.join(root, ".venv")
        self.python = os.path.join(self.venv, "bin", "python")
        self.lock = os.path.join(root, "requirements.lock")
        self.project = os.path.join(root, "pyproject.toml")
        self.log = os.path.join(self.venv, "install.log")
        self.stamp = os.path.join(self.venv, "setup.stamp")
        # Says which torch set-up itself installed: any other one is the student's, and stays.
        self.own_torch = os.path.join(self.venv, "setup.torch")
        # Says that .venv stands on the packages of the Python it was made with.
        self.on_base = os.path.join(self.venv, "setup.base")

    def lines(self):
        """Return the requirement lines of the lock, the peers' with their marker."""
        lines = [line.strip() for line in read(self.lock).splitlines()]
        return [line for line in lines if line and not line.startswith("#")]

    def pins(self):
        """Return the requirement lines of what everybody gets."""
        return [line for line in self.lines() if not line.endswith(PEERS)]

    def peers(self):
        """Return the pins, without marker, of what only the tests compare with."""
        return [line[: -len(PEERS)].strip() for line in self.lines() if line.endswith(PEERS)]

    def torch_pin(self):
        """Return the version of torch that the lock names."""
        for pin in self.pins():
            if pin.startswith("torch=="):
                return pin[len("torch==") :]
        raise Trouble(f"{self.lock} is missing or names no torch: restore it from git.")


def read(path):
    """Return the text of a file, or '' if there is none."""
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def write(path, text):
    """Write a file so that a reader sees the old text or the new one, never half of it."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)

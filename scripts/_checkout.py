"""The files of one checkout that set-up reads and writes. Readable by Python 3.6."""

import os
import re
from collections import namedtuple

from _setup_errors import SetupError

# Lines with a marker of these extras are passed over by pip and conda: only scripts/test installs
# the packages.
EXTRAS = ("third-party", "jax", "ft", "types", "book")
THIRD_PARTY = {extra: 'extra == "%s"' % extra for extra in EXTRAS}
LINE = re.compile(
    r"(?P<requirement>[^;#\s]+)(?:\s*;\s*(?P<marker>[^#]*?))?(?:\s+#\s*python (?P<python>.+))?$"
)

# A line of the lock: 'torch==2.13.0', its marker or '', and the package's Requires-Python or ''.
Pin = namedtuple("Pin", "requirement marker python")


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
        # Names the torch that set-up itself installed: any other one is the user's, and stays.
        self.own_torch = os.path.join(self.venv, "setup.torch")
        # Names the Python whose packages .venv sees, where it was made on top of them.
        self.base_python = os.path.join(self.venv, "setup.base")

    def all_pins(self):
        """Return every pin of the lock."""
        lines = [line.strip() for line in read(self.lock).splitlines()]
        found = [LINE.match(line) for line in lines if line and not line.startswith("#")]
        return [Pin(*(part or "" for part in match.groups())) for match in found if match]

    def pins(self):
        """Return the pins of what everybody gets."""
        return [pin for pin in self.all_pins() if pin.marker not in THIRD_PARTY.values()]

    def third_party_pins(self):
        """Return the pins of the libraries that the workbook is only compared with."""
        return [pin for pin in self.all_pins() if pin.marker in THIRD_PARTY.values()]

    def torch_version(self):
        """Return the version of torch that the lock names."""
        for pin in self.pins():
            if pin.requirement.startswith("torch=="):
                return pin.requirement[len("torch==") :]
        raise SetupError(f"{self.lock} is missing or names no torch: restore it from git.")


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

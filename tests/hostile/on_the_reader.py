"""Submissions that would harm who reads them, before a line of them runs: each is handed in as
NAME.ipynb, and has the words that its row must have. Those with no words are answers that count."""

import gzip
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import class_of_students as students

RIGHT = students.RIGHT[0]
CHAIN = 11_000  # statements of one cell


def notebook(answer: str) -> bytes:
    return json.dumps(students.notebook(answer)).encode()


def of(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data)


def cells(number: int) -> bytes:
    """A notebook with so many cells more, each of which needs the next one."""
    found = students.notebook(RIGHT)
    found["cells"] += [{"cell_type": "code", "id": f"c{n}", "metadata": {}, "outputs": [],
                        "execution_count": None, "source": f"a{n} = a{n + 1}"}
                       for n in range(number)]
    return json.dumps(found).encode()


def sparse(path):
    """1 GB that takes no room."""
    with open(path, "wb") as file:
        file.write(notebook(RIGHT))
        file.truncate(10**9)


def bind(path):
    """A name of a socket may have 107 bytes only."""
    with socket.socket(socket.AF_UNIX) as one:
        folder = os.open(path.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def linked_folder(path):
    """A link on the folder above, so that a walk that follows it has no end."""
    path.with_suffix("").mkdir()
    (path.with_suffix("") / "again").symlink_to("..")


# Large in memory for their size on disk, as a zip bomb is.
OUTPUTS = b'{"cells": [{"cell_type": "code", "source": "", "outputs": [' + b"[{}]," * 9_500_000 + (
    b"[]]}]}")
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "link_loop": (lambda path: path.symlink_to(path.name), "is no file: a link"),
    "link_elsewhere": (lambda path: path.symlink_to("/etc/shadow"), "is no file: a link"),
    "link_to_a_folder": (lambda path: path.symlink_to("/"), "is no file: a link"),
    "folder_loop": (linked_folder, "is no file: a link"),
    "pipe": (os.mkfifo, "is no file: a pipe"),
    "socket": (bind, "is no file: a socket"),
    "no_longer_utf8_\udcfc\udcff": (of(notebook(RIGHT)), ""),
    "escape\x1b[2J\x1b]0;title\x07\u202e": (of(notebook(RIGHT)), ""),
    "line\nfeed,\"quote\"": (of(notebook(RIGHT)), ""),
    "=1+1": (of(notebook(RIGHT)), ""),
    "name_" + "x" * 200: (of(notebook(RIGHT)), ""),
    "attributes": (of(notebook(f"x = lab{'.b' * 2000}\ndef combine(gradients, sizes):\n"
                               "    return x\n")), "nested too deeply"),
    "sum": (of(notebook(f"x = 1{'+1' * 90_000}\ndef combine(gradients, sizes):\n    return x\n")),
            "is not Python|nested too deeply|RecursionError|ended Python's parser"),
    "calls": (of(notebook(f"x = {'f(' * 150}1{')' * 150}\n{RIGHT}x.y = 1\n")), ""),
    "blank_lines": (of(notebook("\n" * 199_000 + f"!pip list\n{RIGHT}")), ""),
    "chain_of_cells": (of(cells(20_000)), r"has 20,0\d\d code cells"),
    "chain_of_statements": (of(notebook("\n".join(f"a{n} = a{n + 1}" for n in range(CHAIN)) +
                                        "\ndef combine(gradients, sizes):\n    return a0\n")),
                            "NameError"),
    "one_gigabyte": (sparse, "has 1,000 MB"),
    "outputs": (of(OUTPUTS), r"is no notebook \(MemoryError\)"),
    "compressed": (of(gzip.compress(bytes(10**8))), "is no notebook"),
    "brackets": (of(b"[" * 10**7), "is no notebook"),
    "much_code": (of(json.dumps({"cells": [{"cell_type": "code", "source": "x = 1\n" * 30_000}
                                           for _ in range(20)]}).encode()), "characters of code"),
    "surrogates": (of(notebook(f"x = '\ud800'\n{RIGHT}")), "not Python|✓|^$|gradients give"),
}


def hand_in(folder: Path) -> dict[str, str]:
    """Writes them all; returns name -> words. A device, too, where one may be made."""
    found = {}
    for name, (write, words) in ATTACKS.items():
        write(folder / f"{name}.ipynb")
        found[name] = words
    try:
        os.mknod(folder / "device.ipynb", 0o20666, os.makedev(1, 5))  # /dev/zero
        found["device"] = "is no file: a device"
    except PermissionError:
        pass
    return found

"""The files of a class: whose each is, how it is read, and how its name is shown."""

import errno
import os
import re
import stat
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import _notebooks

from _grade import limits


class Unreadable(Exception):
    """A file that is no notebook, or none of the workbook's."""


def files_of(given: list[Path]) -> list[tuple[str, Path]]:
    """(student, path), sorted: NAME.ipynb, or NAME/02_manual_ddp.ipynb, of files and folders. A
    name that several files would have becomes the path below the given folder. Also what cannot be
    read is one, as a link is: `read` says why."""
    relative = {}
    for folder in map(Path, map(os.path.abspath, given)):
        inside = sorted(_below(folder)) if folder.is_dir() and not folder.is_symlink() else [folder]
        for path in inside:
            below = path.relative_to(folder) if path != folder else Path(path.name)
            # of links above the folder only: those below it are not followed
            real = os.path.join(os.path.realpath(path.parent), path.name)
            relative.setdefault(Path(real), below.with_suffix("").as_posix())
    names = {path: [*map(shown, (_student(path), below, str(path.with_suffix(""))))]
             for path, below in relative.items()}
    for _ in range(2):  # a student's name, else the path below the folder, else the whole path
        taken = Counter((left[0], _notebooks.number(path.stem)) for path, left in names.items())
        for path, left in names.items():
            if taken[left[0], _notebooks.number(path.stem)] > 1:
                del left[0]
    return sorted((left[0], path) for path, left in names.items())


def _below(folder) -> Iterator[Path]:
    """Yields the notebooks below a folder, and what may hide some: links to folders, and folders
    that cannot be listed."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            entries = list(os.scandir(here))
        except OSError:
            yield here
            continue
        for entry in entries:
            if entry.name in _OURS or _OLD.search(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(here / entry.name)
            elif entry.name.endswith(".ipynb") or entry.is_symlink() and os.path.isdir(entry):
                yield here / entry.name


def _student(path) -> str:
    if not _notebooks.number(path.stem):
        return path.stem
    return next((folder.name for folder in path.parents if folder.name not in _WORK),
                path.parent.name)


def shown(name: str) -> str:
    """A name as a terminal and a table may have it: what is no UTF-8, and what moves a cursor or
    turns the direction of the text, is written as \\x1b. No two names become the same."""
    return plain(name.replace("\\", "\\\\")).replace("\n", "\\x0a")


def plain(text: str) -> str:
    """The same for a text, whose lines and backslashes stay."""
    return "".join(_escaped(character) for character in text)


def _escaped(character) -> str:
    if character == "\n" or unicodedata.category(character) not in _UNSEEN:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # how Python writes a byte of a file's name that is no UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return (f"\\x{number:02x}" if number < 128 else
            f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}")


# What an editor and scripts/work leave beside the notebooks: copies, which nobody hands in.
_OURS = (".ipynb_checkpoints", ".originals")
_OLD = re.compile(r"\.old-\d+\.ipynb$")
_WORK = ("work", "workbook")  # a hub's ~/workbook/work has no name of a student's
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # categories of Unicode
_KINDS = {stat.S_ISLNK: "a link, which is not followed",
          stat.S_ISDIR: "a folder that cannot be listed", stat.S_ISFIFO: "a pipe",
          stat.S_ISCHR: "a device", stat.S_ISBLK: "a device",
          stat.S_ISSOCK: "a socket"}


def read(path: Path) -> bytes:
    """The bytes of a regular file, at most limits.FILE. Raises Unreadable."""
    try:
        # first a look that opens nothing: to open a device can have effects
        _require_regular(os.lstat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
                             | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            _require_regular(os.fstat(descriptor))
            return _content(file)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unreadable("is no file: a link, which is not followed") from None
        raise Unreadable(f"cannot be read ({error.strerror})") from None


def _require_regular(found):
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for test, name in _KINDS.items() if test(found.st_mode)), "special")
        raise Unreadable(f"is no file: {kind}")
    if found.st_size > limits.FILE:
        raise Unreadable(_too_large(found.st_size))


def _content(file) -> bytes:
    pieces, size, deadline = [], 0, time.monotonic() + limits.FILE_SECONDS
    while piece := file.read(1 << 20):
        pieces.append(piece)
        size += len(piece)
        if size > limits.FILE:  # it has grown since
            raise Unreadable(_too_large(size))
        if time.monotonic() > deadline:
            raise Unreadable(f"cannot be read within {limits.FILE_SECONDS:g} s")
    return b"".join(pieces)


def _too_large(size) -> str:
    return f"has {size / 1e6:,.0f} MB: no notebook needs more than {limits.FILE / 1e6:g}"

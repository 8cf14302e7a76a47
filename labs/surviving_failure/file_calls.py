"""Notes which files and folders a function syncs to the disk and which it renames, in order.

A killed process loses nothing that it has written: the kernel has it. A machine without power does.
That cannot be tried here, so the calls that protect from it are looked at.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class FileCall:
    """kind: "sync" or "rename". path: real path of the file or folder. to: where it is renamed to.
    size: bytes of the file at that moment, for those that read it; 0 of a folder."""

    kind: str
    path: str
    to: str = ""
    size: int = 0


@contextlib.contextmanager
def recorded() -> Iterator[list[FileCall]]:
    """Yields a list that fills with the calls of os.fsync, os.fdatasync, os.rename and os.replace
    (pathlib and shutil use these)."""
    calls = []

    def syncing(name):
        function = getattr(os, name)

        def called(file):
            number = file if isinstance(file, int) else file.fileno()
            # The path is read by the file's number, because a file may be renamed while it is open.
            function(number)
            path = _path_of(number)
            calls.append(FileCall("sync", path, size=_size(path)))
        return called

    def renaming(name):
        function = getattr(os, name)

        def called(source, target, **options):
            path, to = os.path.realpath(source), os.path.realpath(target)
            # before the rename: afterwards this path is gone
            size = _size(path)
            function(source, target, **options)
            calls.append(FileCall("rename", path, to, size))
        return called

    made = {"fsync": syncing, "fdatasync": syncing, "rename": renaming, "replace": renaming}
    with contextlib.ExitStack() as patches:
        for name in filter(lambda name: hasattr(os, name), made):
            patches.enter_context(mock.patch.object(os, name, made[name](name)))
        yield calls


def _path_of(number) -> str:
    if os.path.isdir("/proc/self/fd"):
        return os.path.realpath(f"/proc/self/fd/{number}")
    import fcntl  # macOS
    path = fcntl.fcntl(number, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return os.path.realpath(path)


def _size(path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0

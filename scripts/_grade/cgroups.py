"""A control group for one exercise, where this user may make one: then memory and processes are
bounded for all of its processes together, else for each by rlimits."""

import contextlib
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def remove_left_behind() -> None:
    """Removes the empty groups of graders that were killed: those run no more."""
    for folder in {found.parent for found in _ROOT.glob("**/workbook-*/cgroup.procs")}:
        number = folder.name.split("-")[1]
        if number.isdigit() and not os.path.exists(f"/proc/{number}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Group:
    """One control group, of version 1 or 2."""

    def __init__(self, name: str, memory: int, processes: int):
        self._folders = []
        found = _version_2(name) or _version_1(name)
        for folder, values in found:
            if not _create(folder, values, memory, processes):
                continue
            self._folders.append(folder)

    def take(self, process: int) -> None:
        """Puts a process into the group, and what it will start."""
        for folder in self._folders:
            with contextlib.suppress(PermissionError):  # of version 2, for what is not below it
                (folder / "cgroup.procs").write_text(str(process))

    def remove(self) -> None:
        """Removes the group, which must be empty by now."""
        for folder in self._folders:
            for _ in range(20):
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.05)


def _version_2(name):
    """Where this process's own group is, a group beside it: one with processes has no children."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
        folder = (_ROOT / own.lstrip("/")).parent if own != "/" else _ROOT
        if "memory" in (folder / "cgroup.subtree_control").read_text():
            return [(folder / name, {"memory.max": "memory", "memory.swap.max": "none",
                                     "pids.max": "processes"})]
    return []


def _version_1(name):
    return [(_ROOT / "memory" / name, {"memory.limit_in_bytes": "memory"}),
            (_ROOT / "pids" / name, {"pids.max": "processes"})]


def _create(folder, values, memory, processes) -> bool:
    """Makes the group with its limits; whether that was possible."""
    amounts = {"memory": memory, "processes": processes, "none": 0}
    try:
        folder.mkdir()
    except OSError:
        return False
    try:
        for file, what in values.items():
            if (folder / file).exists():
                (folder / file).write_text(str(amounts[what]))
        return os.access(folder / "cgroup.procs", os.W_OK)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return False

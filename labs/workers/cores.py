"""How many cores this process may use: on a machine that a class shares, not all that there are."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
HUB_LIMIT = "CPU_LIMIT"  # JupyterHub sets it to c.Spawner.cpu_limit, enforced or not


def available() -> int:
    """Returns the whole cores that this process may use: those it may run on, no more than its
    control groups give it time of, and no more than a JupyterHub allows each student."""
    limits = [limit for limit in (quota(), _number(os.environ.get(HUB_LIMIT, ""))) if limit]
    # Rounded down: what is used beyond a quota stops all ranks at once, in the middle of a step.
    return max(1, math.floor(min([allowed(), *limits])))


def allowed() -> int:
    """Returns the number of cores that this process may run on, whatever share of their time."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def quota() -> float | None:
    """Returns the cores' worth of time that this process's control groups may use, the minimum of
    its own group and of those above it; None without a quota."""
    return min(filter(None, map(_quota_of, _groups())), default=None)


def _groups() -> list[Path]:
    """The folders of this process's control groups that count time, innermost first. A container
    sees its own group as the root, and often a path that is valid only outside."""
    folders = []
    for line in _text(OWN_GROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            root = CGROUP if number == "0" else CGROUP / "cpu"
            own = Path(path.lstrip("/"))
            folders += [root / part for part in (own, *own.parents)]
    return [*dict.fromkeys([*folders, CGROUP, CGROUP / "cpu"])]


def _quota_of(group) -> float | None:
    """Of one group, in the files of version 2 or of version 1."""
    words = _text(group / "cpu.max").split() or [
        _text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    used, period = map(_number, words) if len(words) == 2 else (None, None)
    return used / period if used and period else None  # "max" and -1 are no quota


def _text(path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None

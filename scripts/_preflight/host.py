"""What the host gives: memory, shared memory, disk, limits, and whether it is a container."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from _grade import bubblewrap
from _unattended import nvidia_smi

from _preflight.found import NOTE, STOP, Found, none, note, ok, worst

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9
LEAST_MEMORY, ENOUGH_MEMORY = 1.5 * GB, 4 * GB  # to be had: two ranks and a kernel; four ranks
LEAST_DISK, ENOUGH_DISK = 0.3 * GB, 3 * GB  # executed notebooks and traces
ENOUGH_SHM = 1 * GB  # of /dev/shm: NCCL takes some 10 MB for each pair of GPUs without peer access
LEAST_FILES = 256  # open files of a process: each rank takes 5 of the notebook's
LEAST_PROCESSES = 512  # and threads
CGROUP = Path("/sys/fs/cgroup")
_CONTAINERS = {"docker": "/.dockerenv", "podman": "/run/.containerenv"}


def memory() -> Found:
    """Memory that programs may still take, also under a container's limit."""
    host, (limit, _), available = psutil.virtual_memory(), memory_limit(), available_memory()
    value = f"{available / GB:.1f} of {host.total / GB:.1f} GB to be had"
    if limit and limit < host.total:
        value += f", under a limit of {limit / GB:.1f} GB"
    problems = []
    if available < LEAST_MEMORY:
        problems = [(STOP, f"Two ranks and a kernel need {LEAST_MEMORY / GB:g} GB: end other "
                           "programs, or raise the container's limit.")]
    elif available < ENOUGH_MEMORY:
        problems = [(NOTE, "Some labs use four ranks, together up to 3 GB: end other programs.")]
    return worst(value, problems, available=available, total=host.total, limit=limit)


def available_memory() -> int:
    """Bytes that programs may still take, also under a container's limit."""
    available, (limit, used) = psutil.virtual_memory().available, memory_limit()
    return min(available, limit - used) if limit else available


def memory_limit() -> tuple[int | None, int]:
    """(bytes that this control group may hold, bytes that it holds); (None, 0) without a limit."""
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        found = _number(CGROUP / limit)
        if found is not None and found < 2**60:  # version 1 writes a huge number for none
            return found, _number(CGROUP / used) or 0
    return None, 0


def _number(path) -> int | None:
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def shared_memory() -> Found:
    """/dev/shm, which NCCL uses between GPUs that cannot reach each other's memory."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return none("none on this system")
    free = shutil.disk_usage(path).free
    problems = []
    if free < ENOUGH_SHM and len(_gpus()) > 1:
        problems = [(NOTE, "NCCL may find no room there: docker run --shm-size=8g, or "
                           "--ipc=host.")]
    return worst(f"{free / GB:.2f} GB free", problems, free=free)


def _gpus() -> list[str]:
    return nvidia_smi.query("index").get("index", []) if nvidia_smi.is_there() else []


def disk() -> Found:
    """Room in the checkout, and for temporary files."""
    places = {"here": ROOT, "temporary files": Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(path).free for name, path in places.items()}
    value = ", ".join(f"{name} {nbytes / GB:.1f} GB free" for name, nbytes in free.items())
    problems = []
    for name, path in places.items():
        if free[name] < LEAST_DISK:
            problems.append((STOP, f"{path} is full: remove what is not needed there."))
        elif free[name] < ENOUGH_DISK:
            problems.append((NOTE, f"Traces and executed notebooks take up to {ENOUGH_DISK / GB:g} "
                                   f"GB in {path}."))
    return worst(value, problems, free=free)


def limits() -> Found:
    """Open files, processes and cores that this user and this control group may use."""
    import resource

    from labs.workers.cores import allowed, available, quota

    files, processes = (resource.getrlimit(which)[1]
                        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    pids = _number(CGROUP / "pids.max") or _number(CGROUP / "pids/pids.max")
    cores, share = available(), quota()
    most = min([each for each in (processes, pids) if each and each > 0], default=None)
    value = (f"{cores} cores" + (f" under a quota of {share:g}" if share else "")
             + f", {_text(files)} open files, {_text(most)} processes")
    problems = []
    if 0 < files < LEAST_FILES:
        problems.append((STOP, f"Ranks need at least {LEAST_FILES} open files: ulimit -n 4096."))
    if most and most < LEAST_PROCESSES:
        problems.append((NOTE, "Each rank has some 20 threads, and a thread counts as a process: "
                               "docker run --pids-limit=-1, or ulimit -u."))
    if share and share < allowed():
        problems.append((NOTE, "The quota stops all ranks at once when it is used up: what is "
                               "timed will jump."))
    if cores < 2:
        problems.append((NOTE, "Ranks on one core take turns: everything works, and is slow."))
    return worst(value, problems, cores=cores, quota=share, files=files, processes=most)


def _text(limit) -> str:
    return "any number of" if limit is None or limit < 0 else f"{limit:,}"


def container() -> Found:
    """Whether this is a container, a virtual machine's guest, or neither."""
    for name, path in _CONTAINERS.items():
        if os.path.exists(path):
            return ok(f"in {name}", container=name)
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return ok("in kubernetes", container="kubernetes")
    return ok("in none", container=None)


def grading() -> Found:
    """Whether scripts/grade can put what students hand in behind walls; nothing else needs it."""
    if sys.platform != "linux":
        return none("scripts/grade needs Linux")
    if not bubblewrap.program():
        return note("no bwrap", f"Only scripts/grade needs it: {bubblewrap.INSTALL}.")
    # as an ordinary user, also where this is root: so does scripts/grade
    user = {"user": 60_000, "group": 60_000, "extra_groups": []} if os.geteuid() == 0 else {}
    done = subprocess.run([bubblewrap.program(), "--unshare-all", "--ro-bind", "/", "/", "--proc",
                           "/proc", "true"], capture_output=True, text=True, cwd="/", **user)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["bwrap says nothing"])[-1]
        return note(why, "Only scripts/grade needs an ordinary user's namespaces: on Ubuntu sysctl "
                         "kernel.apparmor_restrict_unprivileged_userns=0; in docker --security-opt "
                         "seccomp=unconfined --security-opt systempaths=unconfined.")
    return ok("in bubblewrap's sandbox")

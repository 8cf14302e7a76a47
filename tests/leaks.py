"""Finds what a launch has left behind: processes, files, ports, shared memory."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil


class Snapshot:
    """What process `pid` holds now; `left` returns what it holds in addition, later. temporary: a
    directory that nobody else uses. The fork server, which stays by design, does not count."""

    def __init__(self, pid: int = None, temporary: str = None):
        self.pid, self.temporary = pid or os.getpid(), temporary
        self.before = self._look()

    def _look(self) -> dict:
        return {"processes": {worker.pid for worker in workers_of(self.pid)},
                "listening": {str(c.laddr) for c in _listening([psutil.Process(self.pid)])},
                "temporary files": temporary_files(self.temporary),
                "shared memory": shared_memory()}

    def left(self, seconds: float = 3.0) -> dict:
        """What is there more than before, after `seconds` to clear up; empty if nothing is."""
        until(lambda: not self._more(), seconds)
        return self._more()

    def _more(self) -> dict:
        now = self._look()
        more = {what: now[what] - self.before[what] for what in now}
        if more["shared memory"]:
            more["shared memory"] -= in_use_elsewhere(self.pid)
        return {what: things for what, things in more.items() if things}


def workers_of(pid: int) -> list:
    """Processes that run on behalf of process `pid` below its fork server."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_worker(child, pid)]


def workers_below(pid: int) -> list:
    """The ranks of every process that `pid` started: those of a server's kernels, for example."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [worker for process in below for worker in workers_of(process.pid)]


def _is_worker(process, pid) -> bool:
    try:
        parent = process.parent()
        return (process.status() != psutil.STATUS_ZOMBIE and parent is not None
                and parent.ppid() == pid and "forkserver" in " ".join(parent.cmdline()))
    except psutil.NoSuchProcess:
        return False


def programs(*words: str) -> set[str]:
    """Command lines that hold one of `words`, of processes that this one started, however far
    below. Those of tests that run beside this one do not count, so that not the command line alone
    decides: whoever runs tests side by side gives each process a name in its environment."""
    names = ("PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER")
    ours, found = [os.environ.get(name) for name in names], set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = " ".join(process.cmdline())
            if any(word in line for word in words):
                environment = process.environ()
                if [environment.get(name) for name in names] == ours:
                    found.add(line)
    return found


def listening_elsewhere(processes) -> list:
    """Listening sockets of the processes that are not on the loopback interface."""
    return [c.laddr for c in _listening(processes) if c.laddr.ip not in ("127.0.0.1", "::1")]


def _listening(processes) -> list:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [c for c in process.net_connections(kind="inet")
                      if c.status == psutil.CONN_LISTEN]
    return found


def temporary_files(directory) -> set:
    """Files and directories below `directory`; torch's own cache, one for all processes, apart."""
    if directory is None:
        return set()
    found = {path.relative_to(directory) for path in Path(directory).rglob("*")}
    return {str(path) for path in found if not path.parts[0].startswith("torchinductor_")}


def private_directories() -> set:
    """multiprocessing's directories: sockets of fork servers, rendezvous files."""
    return set(Path(tempfile.gettempdir()).glob("pymp-*"))


def gpu_memory() -> list:
    """MiB in use on each GPU, as the driver counts them (NVML, which nvidia-smi asks), of all
    processes; empty where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    asked = subprocess.run([program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                           capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in asked.stdout.split()]


def gpu_memory_left(before: list, seconds: float = 10.0, varies: int = 64) -> dict:
    """GPU -> MiB in use more than `before`, after `seconds` for the driver to free them; empty if
    nothing is left. varies: MiB by which the driver's figure may vary."""
    def more():
        now = enumerate(zip(before, gpu_memory(), strict=True))
        return {index: used - held for index, (held, used) in now if used - held > varies}

    until(lambda: not more(), seconds)
    return more()


def shared_memory() -> set:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def in_use_elsewhere(pid) -> set:
    """Shared memory of processes that are none of `pid`'s: whoever else works on this machine."""
    try:
        ours = {child.pid for child in psutil.Process(pid).children(recursive=True)} | {pid}
    except psutil.NoSuchProcess:
        ours = {pid}
    names = set()
    for other in set(psutil.pids()) - ours:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{other}/maps").read_text()
            names |= {os.path.basename(part) for part in re.findall(r"/dev/shm/(\S+)", maps)}
    return names


def until(condition, seconds: float = 5.0) -> bool:
    """Waits until `condition()` holds; whether it came to hold."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())

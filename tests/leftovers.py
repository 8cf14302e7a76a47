"""What a launch may leave behind: nothing. Looks at processes, files, ports of this machine."""

import os
import tempfile
import time
from pathlib import Path

import psutil


def workers_of(pid: int) -> list:
    """Processes that run on behalf of process `pid` below its fork server."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_worker(child)]


def _is_worker(process) -> bool:
    try:
        parent = process.parent()
        return (process.status() != psutil.STATUS_ZOMBIE and parent is not None
                and "forkserver" in " ".join(parent.cmdline()))
    except psutil.NoSuchProcess:
        return False


def listening_elsewhere(processes) -> list:
    """Listening sockets of the processes that are not on the loopback interface."""
    found = []
    for process in processes:
        try:
            found += [c.laddr for c in process.net_connections(kind="inet")
                      if c.status == psutil.CONN_LISTEN and c.laddr.ip not in ("127.0.0.1", "::1")]
        except psutil.NoSuchProcess:
            pass
    return found


def private_directories() -> set:
    """multiprocessing's directories: sockets of fork servers, rendezvous files."""
    return set(Path(tempfile.gettempdir()).glob("pymp-*"))


def shared_memory() -> set:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def until(condition, seconds: float = 5.0) -> bool:
    """Waits until `condition()` holds; whether it came to hold."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())

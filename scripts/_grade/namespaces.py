"""What a fork of the zygote does to stand behind a submission's walls: it joins the namespaces that
bubblewrap has made, mounts there what may be written to, and gives up its rights.

It works as root and, where the kernel allows user namespaces, as an ordinary user.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _grade import bubblewrap

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one exercise may use. memory: bytes of heap of one process; disk: bytes that it may
    write; files: that it may make; seconds: of one processor, of one process."""

    memory: int = 3 * 10**9
    disk: int = 128 * 10**6
    files: int = 4000
    processes: int = 300
    seconds: int = 240


def become(user: int) -> None:
    """Gives up root for good: the kernel does not count root's processes, and lets it read all."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call("prctl", _DUMPABLE, 1, 0, 0, 0)  # else the kernel gives this process's /proc to root


def run_isolated(shown: list[str], limits: Limits, main: Callable[[], None],
                 passed_on: tuple[int, ...] = (), instead: tuple[str, str] | None = None) -> int:
    """Runs main() as an ordinary user in namespaces of its own, and returns when nothing of it is
    left: the bytes that went over its loopback interface, headers included. SIGTERM ends it
    earlier. shown: paths to see; instead: as of `bubblewrap.around_submission`. passed_on:
    descriptors for main() alone."""
    info, told = os.pipe()
    # A bwrap that is killed while it starts leaves a process behind: what comes now has to wait.
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    holder = subprocess.Popen(bubblewrap.around_submission(shown, told, instead), pass_fds=[told],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)  # a submission could write into our log
    os.close(told)
    _require_ready(holder)
    first = bubblewrap.first_process(info)
    signal.signal(signal.SIGTERM, lambda *_: _kill(first))
    if ended:
        _kill(first)
    # The interface is that of the process whose file this is. What runs in the namespaces sees
    # neither this process nor the file.
    interfaces = open(f"/proc/{number_of(first)}/net/dev", encoding="ascii")
    call("setns", first, _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP)
    child = os.fork()
    if child == 0:
        os.close(first)
        os.setsid()  # else kill(0) would end the zygote, which is of the same process group
        for file in (holder.stdin, holder.stdout, holder.stderr, interfaces):
            file.close()
        or_exit(lambda: (_enter(limits), main()))
    _drop_capabilities()
    for each in passed_on:
        os.close(each)
    os.waitpid(child, 0)
    sent = _sent(interfaces)
    # The end of the first process is the end of all in its namespace.
    _kill(first)
    holder.wait()
    return sent


def _sent(interfaces) -> int:
    """The bytes that the loopback interface has sent, of a /proc/PROCESS/net/dev."""
    interfaces.seek(0)
    values = next(line.split(":")[1] for line in interfaces if line.split(":")[0].strip() == "lo")
    return int(values.split()[8])


def number_of(process: int) -> int:
    """The number that the process of a descriptor has here; -1 where it has ended."""
    lines = Path(f"/proc/self/fdinfo/{process}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def _kill(process):
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        signal.pidfd_send_signal(process, signal.SIGKILL)


def _require_ready(holder):
    """Returns when the namespaces are complete. Raises RuntimeError, with bwrap's words, where it
    ends before; a process of its may then still have its pipes."""
    ended = os.pidfd_open(holder.pid)
    readable, _, _ = select.select([holder.stdout, ended], [], [])
    os.close(ended)
    if holder.stdout in readable and holder.stdout.readline() == bubblewrap.READY:
        return
    said = b"it says nothing"
    if select.select([holder.stderr], [], [], 1)[0]:
        said = os.read(holder.stderr.fileno(), 4000)
    raise RuntimeError(f"bwrap has ended: {said.decode(errors='replace').strip()}")


def or_exit(function: Callable[[], None]) -> None:
    """Runs a function and ends this process, whatever it does."""
    try:
        function()
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(71)


def _enter(limits):
    """In the namespaces: mounts the folders to write into, and gives up the rights to do so.
    bubblewrap can limit a tmpfs's bytes, but neither its files, nor forbid to run what lies there
    (noexec): these mounts are the ones that are ours."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for path in bubblewrap.OWN_FOLDERS:
        options = (f"size={limits.disk},nr_inodes={limits.files},mode=755,"
                   f"uid={bubblewrap.INNER},gid={bubblewrap.INNER}")
        call("mount", b"tmpfs", path.encode(), b"tmpfs",
             ctypes.c_ulong(_NOSUID | _NODEV | _NOEXEC), options.encode())
    # No capabilities by another user namespace. bwrap's --disable-userns would put these processes
    # into a second one, which may not mount anything in the first one's tree.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.chdir(bubblewrap.HOME)
    restrict(limits)
    _drop_capabilities()


def restrict(limits: Limits, count_processes: bool = True) -> None:
    """Sets this process's limits, which those that it starts inherit. count_processes: outside of a
    user namespace the kernel counts all processes of the user."""
    for name, most in (("CORE", 0), ("DATA", limits.memory), ("FSIZE", limits.disk),
                       ("NOFILE", 1024), ("NPROC", limits.processes), ("CPU", limits.seconds)):
        kind = getattr(resource, f"RLIMIT_{name}")
        if name == "NPROC" and not count_processes:
            continue
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _drop_capabilities():
    version, none = 0x20080522, (0,) * 6
    header, data = struct.pack("II", version, 0), struct.pack("6I", *none)
    call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", header, data)


def hide_memory() -> None:
    """Keeps other processes of the same user from reading or writing this one's memory, or that of
    its forks."""
    call("prctl", _DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    """Asks to be killed when the parent ends."""
    call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def call(name, *arguments):
    """Calls a function of the C library. Raises OSError."""
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments[:2]}: {os.strerror(number)}")

"""A process tree of its own in Linux namespaces: user, mount, pid, network, IPC and host name.

What it sees: a read-only system, the Python that runs it, labs/, and two small tmpfs to write into.
It works as root and, where the kernel allows user namespaces, as an ordinary user. As root it maps
to another user, because the kernel does not count root's processes.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

INNER = 1000  # user and group inside
HOME = "/student"
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18)
_DETACH = 2
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FILES = {"/etc/passwd": "student:x:1000:1000::/student:/bin/sh\n",
          "/etc/group": "student:x:1000:\n", "/etc/hosts": "127.0.0.1 localhost\n",
          "/etc/nsswitch.conf": "hosts: files\n"}
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


# Where a submission may write: each is an empty tmpfs, which hides what else lies there.
OWN_FOLDERS = (HOME, "/tmp", "/dev/shm")


def hidden(shown: list[str]) -> str:
    """The first path that a submission needs and would not see; or empty."""
    return next((path for path in shown for own in OWN_FOLDERS
                 if f"{path}/".startswith(f"{own}/")), "")


def run_isolated(stage: str, shown: list[str], own: list[str], limits: Limits,
                 main: Callable[[], None], passed_on: tuple[int, ...] = ()) -> None:
    """Runs main() as an ordinary user in namespaces of its own, and returns when nothing of it is
    left. SIGTERM ends it earlier. stage: an empty folder, to mount on. shown: paths to see.
    own: folders to write into. passed_on: descriptors for main() alone."""
    as_root = os.geteuid() == 0
    if as_root:
        os.setgroups([])
        call("unshare", _NEWNS)
        _build(stage, shown, own)
    ready, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        or_exit(lambda: _unshared(stage, shown, own, limits, main, as_root, ready, mapped,
                                  passed_on))
    _forward_signals(child)
    for each in (*passed_on, ready[1]):
        os.close(each)
    if os.read(ready[0], 1):
        _map(child, 60_000 + child % 5_000 if as_root else os.geteuid(),
             60_000 + child % 5_000 if as_root else os.getegid())
        os.write(mapped[1], b"1")
    os.waitpid(child, 0)


def _unshared(stage, shown, own, limits, main, as_root, ready, mapped, passed_on):
    """In the second process: the namespaces. Its child is their first process, whose end is the
    end of all others in them."""
    call("unshare", _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS)
    die_with_parent()  # what changes a process's rights takes this wish back
    os.write(ready[1], b"1")
    os.close(mapped[1])
    if not os.read(mapped[0], 1):
        return
    if not as_root:
        _build(stage, shown, own)
    parent_alive, held = os.pipe()  # by this process alone
    child = os.fork()
    if child == 0:
        os.close(held)
        or_exit(lambda: (_enter(stage, own, limits), _leave_if_alone(parent_alive), main()))
    _forward_signals(child, signal.SIGKILL)
    for each in passed_on:
        os.close(each)
    os.waitpid(child, 0)


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


def _forward_signals(child, number=signal.SIGTERM):
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, number))


def _map(pid, user, group):
    """Gives the process's user namespace one user and one group."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INNER} {user} 1"),
                       ("gid_map", f"{INNER} {group} 1")):
        Path(f"/proc/{pid}/{name}").write_text(text)


def _build(stage, shown, own):
    """Mounts on the stage a small tree: what is shown, read-only, and nothing else."""
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", stage, "tmpfs", _NOSUID, "size=1m,mode=755")
    for path in (*own, "/proc", "/etc", "/old"):
        os.makedirs(stage + path, exist_ok=True)
    for path, text in _FILES.items():
        Path(stage + path).write_text(text)
    for name in _DEVICES:
        _show(stage, f"/dev/{name}", 0)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"),
                         ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")):
        os.symlink(target, f"{stage}/dev/{name}")
    for path in [*_SYSTEM, "/etc/ld.so.cache", *shown]:
        _show(stage, path, _RDONLY | _NOSUID | _NODEV)


def _show(stage, path, flags):
    """Binds one path of the system into the tree; a link is made again as a link."""
    target = stage + path
    if not os.path.exists(path) or os.path.lexists(target) and os.path.ismount(target):
        return
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        if not os.path.isdir(target):
            os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(path, target, None, _BIND | _REC)
    if flags:
        _read_only(target, flags)


def _read_only(target, flags):
    """Makes a mount and those below it read-only: by mount_setattr, before Linux 5.12 only the
    mount itself."""
    here, recursive, mount_setattr = -100, 0x8000, 442
    attributes = struct.pack("QQQQ", flags & (_RDONLY | _NOSUID | _NODEV), 0, 0, 0)
    if _libc.syscall(mount_setattr, here, target.encode(), recursive, attributes, 32):
        kept = os.statvfs(target).f_flag & (_NOSUID | _NODEV | _NOEXEC)  # a user may not drop these
        _mount(None, target, None, _REMOUNT | _BIND | flags | kept)


def _enter(stage, own, limits):
    """In the first process of the new pid namespace: makes the tree its root, and gives up all
    that it does not need any more."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setresgid(INNER, INNER, INNER)
    os.setresuid(INNER, INNER, INNER)
    _mount(stage, stage, None, _BIND | _REC)  # one that is ours: others are locked in place
    os.chdir(stage)  # the path still leads to what is below
    _mount("proc", "proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for path in own:
        _mount("tmpfs", "." + path, "tmpfs", _NOSUID | _NODEV,
               f"size={limits.disk},nr_inodes={limits.files},mode=755,uid={INNER},gid={INNER}")
    call("pivot_root", b".", b"old")
    os.chdir("/")
    call("umount2", b"/old", _DETACH)
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID)
    _raise_loopback()
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # no capabilities by another one
    os.chdir(HOME)
    restrict(limits)
    _drop_capabilities()


def _leave_if_alone(parent_alive):
    """Ends this process with its parent, also with one that has ended already: the other end of the
    pipe is closed then."""
    die_with_parent()
    if select.select([parent_alive], [], [], 0)[0]:
        os._exit(0)
    os.close(parent_alive)


def _raise_loopback():
    """Switches the namespace's only interface on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        set_flags, up = 0x8914, 1
        ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", up))


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


def _mount(source, target, kind, flags, data=None):
    call("mount", *(None if text is None else text.encode() for text in (source, target, kind)),
          ctypes.c_ulong(flags), None if data is None else data.encode())


def call(name, *arguments):
    if name == "pivot_root":  # the C library has no function for it
        numbers = {"x86_64": 155, "aarch64": 41}
        name, arguments = "syscall", (numbers[os.uname().machine], *arguments)
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments[:2]}: {os.strerror(number)}")


def shown_paths(root: Path) -> list[str]:
    """What a submission needs of this machine: its Python with all packages, and labs."""
    found = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found |= {sys.prefix, sys.base_prefix, str(root / "labs"),
              *(path for path in sys.path if path.endswith("-packages"))}
    kept = sorted(path for path in found if os.path.exists(path) and path not in ("/", "/usr"))
    return [path for path in kept if not any(path.startswith(other + "/") for other in kept)]

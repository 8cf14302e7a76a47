"""The queue: a folder of tickets and locks that all accounts of a node share.

NNNNNN.waiting and NNNNNN.running are the tickets, numbered in order of arrival; each is locked
(flock) by the process that it belongs to, so that a ticket without a lock belongs to nobody any
more. gpu-N.lock is locked by the turn that uses GPU N. A process that reads or changes the tickets
locks queue.lock first. The kernel releases a lock when the last process that has it exits, so
nothing stays taken after a crash. The folder has to be on the node's own disk: flock over NFS is
slow, and on some systems local to each host.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

WAITING, RUNNING = "waiting", "running"
SECONDS = 60  # for the lock of the queue itself, which nobody has for longer than milliseconds


class Refused(Exception):
    """What was asked for cannot be done; one sentence that says why, and what to do."""


class Queue:
    """The queue in a folder, which is made if there is none."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                folder.chmod(0o777)  # mkdir's mode is cut by umask. Not sticky: whoever comes
                # later removes the tickets of processes that were killed.
        except FileExistsError:  # somebody else was faster, or it is a file
            if not folder.is_dir():
                raise Refused(f"{folder} is no folder: name another by --queue.") from None
        except OSError as error:
            raise Refused(f"The queue {folder} cannot be made: {error.strerror}.") from None
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise Refused(f"You may not write to the queue {folder}: its owner, "
                          f"{_owner(folder)}, has to run chmod a+rwx {folder}.")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time read or change the tickets."""
        descriptor = self.open("queue.lock")
        try:
            deadline = time.monotonic() + SECONDS
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise Refused(f"A process has locked {self.folder}/queue.lock for {SECONDS} s: "
                                  f"look for it with fuser {self.folder}/queue.lock.")
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    def open(self, name: str) -> int:
        """A file descriptor of a file that every account may lock; it is made if there is none."""
        path = self.folder / name
        while True:
            try:
                # Without O_CREAT where it exists: Linux refuses to create over another account's
                # file in a sticky folder (fs.protected_regular).
                return os.open(path, os.O_RDWR)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                    os.fchmod(descriptor, 0o666)
                    return descriptor
            except PermissionError:
                raise Refused(f"You may not write to {path}: its owner, {_owner(path)}, has to run "
                              f"chmod a+rw {path}.") from None

    def tickets(self, state: str = "*") -> list[Path]:
        """The tickets in their order, also those of processes that have gone."""
        return sorted(self.folder.glob(f"[0-9]*.{state}"))

    def is_alive(self, ticket: Path) -> bool:
        """Whether a ticket's process is there; the ticket is removed if it is not."""
        try:
            descriptor = os.open(ticket, os.O_RDONLY)
        except OSError:
            return False
        try:
            if not try_lock(descriptor):
                return True
            with contextlib.suppress(OSError):  # another account's, in a sticky folder
                ticket.unlink()
            return False
        finally:
            os.close(descriptor)

    def living(self) -> list[dict]:
        """What stands on the tickets of processes that are there, in their order."""
        with self.locked():
            found = [ticket for ticket in self.tickets() if self.is_alive(ticket)]
            return [json.loads(ticket.read_text()) for ticket in found]


class Ticket:
    """A place in the queue. descriptors: of the ticket and of the locks that it has, for a process
    that is to keep them locked as well."""

    def __init__(self, queue: Queue, notebook: str, count: int, minutes: float):
        self._queue, self.count = queue, count
        self.descriptors: list[int] = []
        self._facts = {"state": WAITING, "user": _user(), "pid": os.getpid(), "notebook": notebook,
                       "count": count, "minutes": minutes, "since": time.time()}
        with queue.locked():
            last = max([int(path.stem) for path in queue.tickets()], default=0)
            self.path = queue.folder / f"{last + 1:06d}.{WAITING}"
            self._write()

    def _write(self):
        """Writes the ticket; queue.lock is locked, so that nobody reads half of it."""
        if not self.descriptors:
            self.descriptors = [self._queue.open(self.path.name)]
            try_lock(self.descriptors[0])
        os.ftruncate(self.descriptors[0], 0)
        os.pwrite(self.descriptors[0], json.dumps(self._facts).encode(), 0)

    def place(self) -> int:
        """1 for the first that waits."""
        with self._queue.locked():
            before = [one for one in self._queue.tickets(WAITING) if one.name < self.path.name]
            return 1 + sum(self._queue.is_alive(one) for one in before)

    def take(self, names: list[str]) -> list[str] | None:
        """Locks as many as the ticket is for, of locks with these names; None where that is not
        possible yet. It never keeps a part of them, so two tickets cannot wait for each other."""
        with self._queue.locked():
            for other in self._queue.tickets(WAITING):
                if other.name >= self.path.name:
                    break
                if self._queue.is_alive(other):  # nobody is overtaken
                    return None
            taken: dict[str, int] = {}
            for name in names:
                descriptor = self._queue.open(f"{name}.lock")
                if len(taken) < self.count and try_lock(descriptor):
                    taken[name] = descriptor
                else:
                    os.close(descriptor)
            if len(taken) < self.count:
                for descriptor in taken.values():
                    os.close(descriptor)
                return None
            self.descriptors += taken.values()
            self._facts |= {"state": RUNNING, "on": list(taken), "began": time.time()}
            running = self.path.with_suffix(f".{RUNNING}")
            self.path.rename(running)
            self.path = running
            self._write()
            return list(taken)

    def give_back(self) -> None:
        """Leaves the queue; its locks are free for the next."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def try_lock(descriptor: int) -> bool:
    """Locks a file for this process alone; False where another one has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise Refused(f"The queue's folder knows no locks ({error.strerror}): name one on the "
                      "node's own disk by --queue.") from None
    return True


def _owner(path) -> str:
    with contextlib.suppress(OSError, KeyError):
        return path.owner()
    return "unknown"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in containers
        return str(os.getuid())

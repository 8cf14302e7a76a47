"""Exercise 8.3: a file that is always complete, whenever the process that writes it is killed."""

import contextlib
import errno
import os
import random
import stat
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from labs.checks.generator import new_generator
from labs.checks.on_ranks import on_ranks
from labs.checks.verdicts import Wrong, check, kind_of
from labs.faults.full_disk import on_full_disk
from labs.faults.kill_process import SYNCS, kill_at_steps, kill_while
from labs.surviving_failure.file_calls import FileCall, recorded
from labs.words import counted
from labs.workers import processes

KILLS = 30
SIZE = 1_000_000  # bytes of a version: takes long enough to be met in the middle
NAME = "checkpoint.pt"


@check("8.3")
def check_atomic_write(atomic_write: Callable):
    """atomic_write(path, data) replaces the file `path` by these bytes, or leaves it as it was."""
    with processes.temporary_folder() as folder:
        [(old, new, disk)] = on_ranks(_on_rank, atomic_write, folder, new_generator().random(),
                                      world_sizes=(1,), timeout=120.0)
    return (f"killed {KILLS} times while it saved: {old} times the old version was there, {new} "
            "times the new one, complete each time; it is synced, then renamed, and a full disk "
            f"({disk}) does no harm")


def _on_rank(atomic_write, folder, seed) -> tuple[int, int, str]:
    """In a process of its own, because it forks and sets limits."""
    _judge_one(atomic_write, Path(folder, "one"))
    counts = _judge_kills(atomic_write, Path(folder, "kills"), random.Random(seed))
    _judge_steps(atomic_write, Path(folder, "steps"))
    _judge_order(atomic_write, Path(folder, "order"))
    kind = _judge_full_disk(atomic_write, Path(folder, "full"))
    _judge_failed_sync(atomic_write, Path(folder, "sync"))
    return *counts, kind


def _data(version: int, size: int = SIZE) -> bytes:
    """Content that shows at each place which version it is of."""
    return version.to_bytes(8, "little") * (size // 8)


def _judge_one(atomic_write, folder):
    """New, then replaced by something shorter; as a string as well."""
    folder.mkdir()
    path = folder / NAME
    before = _open_files()
    # Shorter than before, and empty: a file that is opened without truncating it keeps the old end.
    for data, given in ((_data(1), path), (b"short", path), (b"", path), (_data(2), str(path))):
        returned = atomic_write(given, data)
        if returned is not None:
            raise Wrong(f"atomic_write returned {kind_of(returned)}",
                        "It writes, and returns None.", code="wrong_type")
        _judge_content(path, data, "after atomic_write has returned")
        _judge_alone(path, "after atomic_write has returned")
    # Invariant: no file stays open. A job that saves for weeks runs out of file numbers.
    if (left := _open_files() - before) >= 4:
        raise Wrong(f"4 calls of atomic_write have left {counted(left, 'file')} open",
                    "What os.open returns needs an os.close.", code="file_left_open")


def _open_files() -> int:
    """How many files this process has open; 0 where the system does not tell. The minimum of five
    readings, because other threads open files too."""
    return min(len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
               for _ in range(5))


def _judge_content(path, want, when, hint=""):
    if not path.exists():
        raise Wrong(f"{when}, there is no file {path.name}", code="file_missing")
    found = path.read_bytes()
    if found != want:
        raise Wrong(f"{when}, {path.name} has {len(found):,} bytes that are not the {len(want):,} "
                    "that it was given", hint, code="wrong_bytes")


def _judge_alone(path, when):
    others = sorted(other.name for other in path.parent.iterdir() if other != path)
    if others:
        raise Wrong(f"{when}, {', '.join(others[:3])} is beside {path.name}",
                    "A temporary file must not stay: with each kill there would be one more.",
                    code="temporary_file_left")


def _judge_steps(atomic_write, folder):
    """Killed at each call that changes names, one after the other: a moment that is too short for a
    random kill is met too."""
    folder.mkdir()
    path = folder / NAME
    path.write_bytes(_data(0))
    # Invariant: the name stands for one complete version at any moment. Catches a remove before the
    # rename, and a rename before all is written.
    for number, name in enumerate(kill_at_steps(lambda: atomic_write(path, _data(1)))):
        _judge_version(path, 0, f"killed with SIGKILL just before its call {number + 1}, of "
                       f"os.{name}")
    _write_after_kill(atomic_write, path, _data(2))


def _judge_order(atomic_write, folder):
    """What a machine needs that loses its power: the content on the disk before the name points to
    it, and then the name itself."""
    folder.mkdir()
    path = folder / NAME
    path.write_bytes(_data(1))
    with recorded() as calls:
        atomic_write(path, _data(2))
    # Invariants of the order: write to another name in the same folder, sync that file, rename it,
    # sync the folder. What a killed process has written is in the kernel's page cache, so a kill
    # cannot show that a sync is missing.
    into = [call for call in calls if call.kind == "rename" and call.to == os.path.realpath(path)]
    if not into:
        raise Wrong(f"nothing is renamed to {NAME}: while it is written over, it is neither the "
                    "old nor the new version", "Write to another name in the same folder first.",
                    code="not_renamed")
    # os.replace between two file systems fails, and shutil.move copies there, which is not atomic.
    [rename, *_] = into
    if os.path.dirname(rename.path) != os.path.realpath(folder):
        raise Wrong(f"the file is written in {os.path.dirname(rename.path)} and then renamed to "
                    "another folder", "Folders may be on different disks, and then a rename "
                    "copies. Use a name in the same folder.", code="other_folder")
    _judge_syncs(calls, rename, os.path.realpath(folder))


def _judge_syncs(calls: list[FileCall], rename: FileCall, folder: str):
    before = calls[:calls.index(rename)]
    syncs = [call for call in before if call.kind == "sync" and call.path == rename.path]
    if not syncs:
        late = any(call.kind == "sync" and call.path == rename.to for call in calls)
        raise Wrong("the file is renamed before its bytes are on the disk" if late else
                    "the bytes are never synced to the disk",
                    "A machine that loses its power then has the new name with an empty file: "
                    "os.fsync(file.fileno()) before the rename.", code="not_synced")
    if syncs[-1].size < SIZE:
        raise Wrong(f"os.fsync is called when {syncs[-1].size:,} of {SIZE:,} bytes are in the file",
                    "Python keeps what is written in a buffer of its own: file.flush() first.",
                    code="not_flushed")
    after = calls[calls.index(rename) + 1:]
    if not any(call.kind == "sync" and call.path == folder for call in after):
        raise Wrong("the folder is not synced after the rename: the new name may be lost with the "
                    "power, although atomic_write has returned", "number = os.open(folder, "
                    "os.O_RDONLY), os.fsync(number), os.close(number)", code="folder_not_synced")


def _judge_full_disk(atomic_write, folder) -> str:
    """What kind of full disk it was, in words."""
    folder.mkdir()
    path = folder / NAME

    def fill(full):
        atomic_write(path, _data(1))
        with full():
            raised = _raised(atomic_write, path, "when the disk is full")
        # Invariant: after a write that failed, the old version is there, the temporary file is gone
        # (it takes the room that the next save needs), and the caller gets the error.
        _judge_content(path, _data(1), "when the disk is full", "Without a buffer, write may write "
                       "less than it is given, and returns how much it was.")
        _judge_failure(path, raised, "when the disk is full")

    # The old version has room, the new one beside it has not.
    _, disk = on_full_disk(fill, str(folder), size=SIZE * 3 // 2, room=SIZE // 2)
    return disk


def _judge_failed_sync(atomic_write, folder):
    """A network file system may take all bytes, and say only at the sync that the disk is full."""
    folder.mkdir()
    path = folder / NAME
    when = "when os.fsync of the file raises OSError, because the disk is full"
    atomic_write(path, _data(1))
    with contextlib.ExitStack() as patches:
        for name in filter(lambda name: hasattr(os, name), SYNCS):
            # The system calls cannot be made to fail without a broken disk, so Python's functions
            # do.
            patches.enter_context(mock.patch.object(os, name, _failing(getattr(os, name))))
        raised = _raised(atomic_write, path, when)
    _judge_content(path, _data(1), when, "Rename only what is on the disk.")
    _judge_failure(path, raised, when)


def _failing(sync: Callable) -> Callable:
    """Folders are synced as ever: a rename needs no room."""
    def called(*of):
        if not of:  # os.sync takes no file, and reports no error
            return sync()
        (file,) = of
        if stat.S_ISREG(os.stat(file if isinstance(file, int) else file.fileno()).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sync(file)
    return called


def _raised(atomic_write, path, when) -> OSError | None:
    try:
        atomic_write(path, _data(2))
    except OSError as error:
        return error
    except Exception as error:
        raise Wrong(f"{when}, atomic_write raises {type(error).__name__}, not that OSError",
                    "The caller gets the error itself: a bare `raise` does it, when the temporary "
                    "file is removed.", code="wrong_error") from error


def _judge_failure(path, raised, when):
    if raised is None:
        raise Wrong(f"{when}, atomic_write returns as if all were well",
                    "Let the OSError through: who called must know that nothing was saved.",
                    code="error_lost")
    _judge_alone(path, when)


def _judge_kills(atomic_write, folder, rng) -> tuple[int, int]:
    """(kills that left the old version, kills that left the one that was being saved)"""
    folder.mkdir()
    path, seconds = folder / NAME, _seconds(atomic_write, folder)
    last, old = 0, 0
    atomic_write(path, _data(last))
    for number in range(1, KILLS + 1):
        # Up to 2.5 times the duration of a write: the kill meets the first, second or third
        # version.
        killed = kill_while(lambda version: atomic_write(path, _data(version)), last + 1,
                            rng.uniform(0, 2.5 * seconds))
        # Invariant: what a killed process has left does not stop the next one. Catches a temporary
        # file that is opened with "x", and a folder that is made without exist_ok.
        if killed.raised:
            raise _stumbles(killed.raised.strip().splitlines()[-1])
        saved = last if killed.acknowledged is None else killed.acknowledged
        last = _judge_version(path, saved, f"killed with SIGKILL while it wrote version "
                              f"{saved + 1} (kill {number} of {KILLS})")
        old += last == saved
    _write_after_kill(atomic_write, path, _data(last + 1))
    _judge_content(path, _data(last + 1), "after a complete write")
    # Invariant: at most one temporary file is left by a kill, and the next write replaces it.
    # Catches names with a random part or the process id: they fill the disk, one per kill.
    _judge_alone(path, f"after {KILLS} kills and one complete write")
    return old, KILLS - old


def _write_after_kill(atomic_write, path, data):
    """Writes where a killed process may have left something. Raises Wrong where that fails."""
    try:
        atomic_write(path, data)
    except Exception as error:  # it has written before, with the same arguments
        raise _stumbles(f"{type(error).__name__}: {error}") from error


def _stumbles(error) -> Wrong:
    return Wrong("atomic_write raised an error in a process whose predecessor had been killed: "
                 f"{error}", "What a killed process has left must not stop the next one.",
                 code="stumbles_over_remains")


def _seconds(atomic_write, folder) -> float:
    """Median seconds of a write, without the time that the disk needs to sync."""
    taken = []
    with contextlib.ExitStack() as patches:
        for name in filter(lambda name: hasattr(os, name), SYNCS):
            # kill_while does not sync either: with syncs, nearly all kills would come inside of
            # one.
            patches.enter_context(mock.patch.object(os, name, lambda *_: None))
        for version in range(5):
            began = time.perf_counter()
            atomic_write(folder / NAME, _data(version))
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _judge_version(path, saved, when) -> int:
    """The version of the file, which is complete, and `saved` or the one after it."""
    if not path.exists():
        raise Wrong(f"{when}: {NAME} is gone", "Never remove the old file before the new one is "
                    "complete: os.replace does both in one step.", code="old_file_gone")
    found = path.read_bytes()
    version = int.from_bytes(found[:8], "little")
    if found != _data(version):
        first, rest = version, int.from_bytes(found[-8:], "little")
        mixed = f", from versions {first} and {rest}" if len(found) == SIZE else ""
        raise Wrong(f"{when}: {NAME} has {len(found):,} of {SIZE:,} bytes{mixed}",
                    "Write to another name, and rename when all is there.", code="half_written")
    if version < saved:
        raise Wrong(f"{when}: {NAME} is version {version}, although atomic_write had returned for "
                    f"version {saved}", "When it returns, the new version must be there.",
                    code="save_lost")
    return version

"""In a rank that the check of elastic.py has started: notes on which samples each step trains, at
which learning rate, and which files are written; and kills the process where it is to crash."""

import contextlib
import functools
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labs.checks.scripts.probe import RankStart, become, leave, run_script
from labs.training import models
from labs.workers import cuda
from labs.workers.programs import note

OTHERS = 0.3  # seconds that the other ranks get to finish what they write: the worst for a save
_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Crash:
    """A rank that kills itself with SIGKILL. step: in the forward of this step, counted from its
    start. save, call: else in this save since its start, at this one of its calls that write or
    rename files."""

    rank: int
    step: int | None = None
    save: int | None = None
    call: int = 0


@dataclass(frozen=True)
class Start:
    """How the ranks of a (re)start differ from those before. crash: None where all run to the end.
    stale: rank 1 does not see the newest entry of the folder of checkpoints yet, as on a network
    file system."""

    ranks: int
    crash: Crash | None = None
    stale: bool = False


def main(rank: RankStart, start: Start) -> None:
    """Is a rank that torchrun would have started; never returns."""
    become(rank)
    probe = _Probe(rank, start)
    with probe.installed():
        code, error = run_script(rank.script)
    if error:
        probe.note("error", error)
    leave(code)


def key_of(rows: torch.Tensor) -> str:
    """Of a batch: another one for other samples, or another order."""
    return hashlib.sha256(rows.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


def _random_state(device) -> torch.Tensor:
    """Of the generator from which dropout draws on this device."""
    return cuda.random_state(str(device)) if device.type == "cuda" else torch.get_rng_state()


class _Probe:
    def __init__(self, rank, start):
        self._notes, self._rank = rank.notes, int(rank.environment["RANK"])
        self._stale = start.stale and self._rank == 1
        self._crash = start.crash if start.crash and start.crash.rank == self._rank else None
        self._folder = os.path.realpath(rank.arguments[rank.arguments.index("--checkpoints") + 1])
        self._steps = self._saves = self._calls = 0  # calls: of this save
        self._saved_at = None  # the number of steps when the last save began
        self._is_forward_done = False  # since the last step of the optimizer
        self._inside = False

    def note(self, what: str, value: object) -> None:
        """Writes down something for the check, at once: this process may be killed."""
        inside, self._inside = self._inside, True
        note(self._notes, what, self._rank, json.dumps(value))
        self._inside = inside

    @contextlib.contextmanager
    def installed(self):
        """Inside, the probe notes, and crashes."""
        # An audit hook sees every open and rename that goes through Python, whichever function the
        # script calls. It cannot be removed, but this process ends with the script.
        sys.addaudithook(self._audit)
        # A global hook: the script makes its optimizer itself, in a place that the probe does not
        # know.
        hook = register_optimizer_step_pre_hook(self._before_step)
        with contextlib.ExitStack() as stack:
            stack.callback(hook.remove)
            for owner, name, wrapper in ((models.Decoder, "forward", self._noting),
                                         (torch, "save", self._saving)):
                stack.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))
            if self._stale:
                stack.enter_context(mock.patch.object(os, "scandir", self._hiding(os.scandir)))
                stack.enter_context(mock.patch.object(os, "listdir", self._hiding(os.listdir)))
            yield

    def _noting(self, forward) -> Callable:
        @functools.wraps(forward)
        def noting(model, input_ids):
            # An evaluation is not a step of the training.
            if torch.is_grad_enabled():
                self.note("batch", key_of(input_ids))
                self.note("random", key_of(_random_state(input_ids.device)))
                if self._crash and self._crash.step == self._steps:
                    self._die()
                self._steps += 1
                self._is_forward_done = True
            return forward(model, input_ids)

        return noting

    def _before_step(self, optimizer, args, kwargs):
        # get_state_dict of an optimizer that has no state yet takes a step with gradients of 0
        if self._is_forward_done:
            self.note("rate", float(optimizer.param_groups[0]["lr"]))
        self._is_forward_done = False

    def _audit(self, event, args):
        if self._inside:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            flags = args[2] if isinstance(args[2], int) else 0
            if flags & _WRITES:
                self._call("write", os.fsdecode(args[0]), functools.partial(_open, args[0], flags))
        elif event == "os.rename":
            self._call("rename", os.fsdecode(args[1]))

    def _saving(self, save) -> Callable:
        """torch.save opens a file by its name without Python's knowing of it."""
        @functools.wraps(save)
        def saving(obj, f, *args, **kwargs):
            if isinstance(f, str | os.PathLike):
                self._call("write", os.fsdecode(f),
                           lambda: (save(obj, f, *args, **kwargs), _halve(f)))
            return save(obj, f, *args, **kwargs)

        return saving

    def _call(self, kind, path, half=lambda: None):
        """Notes a call, if it is one on a checkpoint. half: does a part of it."""
        path = os.path.realpath(path)
        if not path.startswith(self._folder + os.sep):
            return
        if self._saved_at != self._steps:
            self._saved_at, self._calls = self._steps, 0
            self._saves += 1
        self.note("call", (self._steps, kind, os.path.relpath(path, self._folder)))
        crash = self._crash
        if crash and (crash.save, crash.call) == (self._saves - 1, self._calls):
            # The files that the crash itself writes are not calls of the script.
            self._inside = True
            time.sleep(OTHERS)
            with contextlib.suppress(OSError):
                half()
            self._die()
        self._calls += 1

    def _die(self):
        self.note("killed", self._steps)
        os.kill(os.getpid(), signal.SIGKILL)

    def _hiding(self, listing) -> Callable:
        """os.listdir or os.scandir without the entry of the folder that was made last."""
        def hiding(path="."):
            found = listing(path)
            if isinstance(path, int) or os.path.realpath(path) != self._folder:
                return found
            with found if hasattr(found, "close") else contextlib.nullcontext():
                entries = list(found)
            # A network file system caches directories, so another host may see a new entry later.
            names = [getattr(entry, "name", entry) for entry in entries]
            newest = max(names, key=lambda name: os.stat(Path(path, name)).st_mtime, default=None)
            shown = [entry for entry, name in zip(entries, names, strict=True) if name != newest]
            return _Entries(shown) if listing.__name__ == "scandir" else shown

        return hiding


class _Entries(list):
    """What os.scandir returns: an iterator that can be closed, and a context manager."""

    def __init__(self, entries):
        super().__init__(entries)
        self._left = iter(entries)

    def __next__(self):
        return next(self._left)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """There is nothing to close."""


def _open(path, flags):
    """As a process that is killed after it has opened a file: it is there, and empty."""
    os.close(os.open(path, flags & ~os.O_EXCL, 0o666))


def _halve(path):
    os.truncate(path, os.path.getsize(path) // 2)

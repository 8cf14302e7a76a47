"""Runs a student's script as a terminal would, in fresh processes with a time limit, and notes what
its ranks do. The script imports this module too: nothing here or in what it imports draws."""

import ast
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from labs.meters.collective_hooks import CollectiveObserver, IssuedCollective
from labs.workers import programs
from labs.workers.programs import FAILING_RANK, note
from labs.workers.reports import Reporter

ROOT = str(Path(__file__).resolve().parents[2])
# Appended, so that nothing in the workbook hides a module that the script would find without it.
_PROBE = (f"import sys; sys.path.append({ROOT!r}); "
          "__import__('labs.start_here.scripts', fromlist=['probe']).probe()")


@dataclass(frozen=True)
class Run:
    """A run of a script.

    code: its exit code, None where it was stopped. seconds: how long it ran. output: what it and
    its ranks printed; errors: what they wrote to stderr. places: where its ranks wanted to meet.
    joined, communicated: the ranks that joined a group, and those that called a collective.
    world_sizes: of their groups. waiting: where its ranks were when it was stopped, a
    sentence for each. left: how many processes were still there after it.
    """

    ranks: int
    code: int | None
    seconds: float
    output: str
    errors: str
    places: frozenset[str]
    joined: frozenset[int]
    communicated: frozenset[int]
    world_sizes: frozenset[int]
    waiting: tuple[str, ...]
    left: int

    def __repr__(self):
        end = f"stopped after {self.seconds:.0f} s" if self.code is None else (
            f"exit code {self.code}")
        return "\n".join(filter(None, [f"$ python script.py {self.ranks}", self.output.rstrip(),
                                       self.errors.rstrip(), end]))


class Running:
    """A script that runs on so many ranks, in a process group of its own. hold: its ranks wait in
    init_process_group until `release`. fails: rank FAILING_RANK raises when it has joined."""

    def __init__(self, folder: Path, ranks: int, hold: bool = False, fails: bool = False):
        self.ranks, self._notes = ranks, Path(tempfile.mkdtemp(dir=folder))
        self._hold = self._notes / "hold"
        if hold:
            self._hold.touch()
        self._process = start([str(folder / "script.py"), str(ranks)], self._notes,
                              programs.environment() | {
                                  "LABS_SCRIPT_NOTES": str(self._notes),
                                  "LABS_SCRIPT_FAILS": str(int(fails))})
        self._watch = programs.StallWatch(lambda: [self._process.pid], notes=self._notes)

    def is_running(self) -> bool:
        """Whether it has neither ended nor come to a stop."""
        return self._process.poll() is None and not self._watch.is_over()

    def has_joined(self) -> bool:
        """Whether all its ranks have joined a group."""
        return len(self._noted("joined")) >= self.ranks

    def places(self) -> frozenset[str]:
        """Where its ranks have wanted to meet so far."""
        return frozenset(place for _, place in self._noted("place"))

    def release(self) -> None:
        self._watch.restart()
        self._hold.unlink(missing_ok=True)

    def finish(self) -> Run:
        """Waits for the script's end or the limit; ends what it has left behind."""
        while self.is_running():
            time.sleep(0.02)
        code, seconds = self._process.poll(), self._watch.seconds
        left = programs.count_left([self._process.pid]) if code is not None else 0
        self.kill()
        joined = self._noted("joined")
        waits = self._watch.waits if code is None else {}
        output, errors = ((self._notes / name).read_text(errors="replace")
                          for name in ("output", "errors"))
        return Run(self.ranks, code, seconds, output, errors, self.places(),
                   frozenset(int(rank) for rank, _ in joined),
                   frozenset(int(rank) for rank, _ in self._noted("called")),
                   frozenset(int(size) for _, size in joined),
                   tuple(f"rank {rank} {waits[rank]}" for rank in sorted(waits)), left)

    def kill(self) -> None:
        """Ends the script and all its processes."""
        programs.end([self._process.pid])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)

    def _noted(self, what) -> list[tuple[str, str]]:
        return programs.noted(self._notes, what)


@contextlib.contextmanager
def ended(running: Running) -> Iterator[Running]:
    """Yields it and ends its processes, also where the student interrupts the check."""
    try:
        yield running
    finally:
        running.kill()


def run_two_at_once(script: str) -> tuple[Run, Run | None, str]:
    """A run on 2 ranks, which are held when they have met, and one on 3 ranks meanwhile; None for
    the second where the first did not get as far. And the place where ranks of both wanted to meet,
    or nothing: then neither is waited for."""
    with written(script) as folder, ended(Running(folder, 2, hold=True)) as first:
        while first.is_running() and not first.has_joined():
            time.sleep(0.02)
        if not first.has_joined():
            return first.finish(), None, ""
        with ended(Running(folder, 3)) as second:
            while second.is_running():
                if same := first.places() & second.places():
                    first.kill()
                    second.kill()
                    return first.finish(), None, min(same)
                time.sleep(0.02)
            first.release()
            return first.finish(), second.finish(), ""


def run_failing(script: str) -> Run:
    """A run on 2 ranks, of which FAILING_RANK raises when it has joined."""
    with written(script) as folder, ended(Running(folder, 2, fails=True)) as running:
        return running.finish()


def start(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Starts Python with these arguments in a process group of its own; what it prints goes to
    files, because a process that is left behind would keep a pipe open."""
    with open(folder / "output", "wb") as output, open(folder / "errors", "wb") as errors:
        return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment,
                                stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                                # A session of its own: all that the script has started can be ended
                                # together.
                                start_new_session=True)


@contextlib.contextmanager
def written(script: str) -> Iterator[Path]:
    """Yields the folder with the script as script.py, which calls `probe` first."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(with_probe(script), encoding="utf-8")
        yield Path(folder)


def with_probe(script: str) -> str:
    """Returns the script with a call of `probe` before its first statement that does anything. Its
    lines keep their numbers, but where a `match` or a decorator stands in its first line."""
    first = _first_that_acts(ast.parse(script).body)
    if first is None:
        return script
    lines = script.split("\n")
    at = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))]) - 1
    # In the first line nothing stands above, so the probe goes into the statement's own body.
    while at == 0 and isinstance(first, ast.If | ast.Try | ast.With | ast.For | ast.While):
        first = first.body[0]
        at = first.lineno - 1
    # A simple statement may follow another one in its line.
    if not hasattr(first, "body") and not hasattr(first, "cases"):
        head = lines[at].encode()[:first.col_offset].decode()
        lines[at] = f"{head}{_PROBE}; {lines[at][len(head):]}"
    elif at and not lines[at - 1].split("#")[0].strip():  # an empty line, or a comment
        lines[at - 1] = " " * first.col_offset + _PROBE + lines[at - 1].strip()
    else:
        lines.insert(at, " " * first.col_offset + _PROBE)
    return "\n".join(lines)


def _first_that_acts(body: list[ast.stmt]) -> ast.stmt | None:
    """The statement before which the probe stands."""
    # Not before a docstring or an import from __future__, which have to come first.
    body = [node for node in body
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                    or isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    # A function is defined before the probe where it can be: a line above it would move the others.
    return next((node for node in body if node.lineno > 1
                 or not isinstance(node, ast.FunctionDef) or node.decorator_list),
                None)


# in the script's processes


def probe() -> None:
    """Makes init_process_group note where ranks meet, which rank joined, and whether it
    communicates; there the check holds ranks, and lets one fail."""
    folder = os.environ.get("LABS_SCRIPT_NOTES")
    if not folder:
        return
    original = dist.init_process_group

    def init_process_group(*args, **options):
        note(folder, "place", "-", _place(*args, **options))
        result = original(*args, **options)
        rank = dist.get_rank()
        note(folder, "joined", rank, dist.get_world_size())
        # Both never left: they observe until the process ends.
        _Called(folder).__enter__()
        Reporter(folder, rank, dist.get_world_size()).start()
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.02)
        if os.environ["LABS_SCRIPT_FAILS"] == "1" and rank == FAILING_RANK:
            raise RuntimeError(f"raised on rank {rank} on purpose, by the check")
        return result

    # Each module has its own name for the function.
    for module in (dist, distributed_c10d, device_mesh):  # init_device_mesh calls it, too
        if hasattr(module, "init_process_group"):
            module.init_process_group = init_process_group


def _place(backend=None, init_method=None, *_, store=None, **options) -> str:
    if store is not None:
        found = getattr(store, "path", None) or getattr(store, "port", None)
        return f"{type(store).__name__} {found or id(store)}"
    if init_method in (None, "env://"):
        return ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return str(init_method)


class _Called(CollectiveObserver):
    """Notes that this rank has called a collective."""

    def __init__(self, folder):
        self._folder = folder

    def before(self, collective: IssuedCollective) -> None:
        note(self._folder, "called", dist.get_rank(), collective.kind)

"""Starts torchft's lighthouse and two replica groups, kills one of them, and replaces it."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from labs.checks.verdicts import Verdict
from labs.pictures.in_scripts import print_in_script
from labs.surviving_failure import replica_process
from labs.workers import processes, programs
from labs.workers.launch_error import LaunchError, Stopped
from labs.workers.output import last_lines
from labs.workers.pickling import pack
from labs.workers.progress import progress_bar

VERSION = "0.2.0"  # as the extra `ft` in pyproject.toml
TITLE = "torchft"
NOT_INSTALLED = (f"waits for torchft, which is not installed: run %pip install torchft=={VERSION} "
                 "in a cell of its own (20 MB, only for Linux on x86-64), then this cell again; "
                 "nothing else needs it")
LIGHTHOUSE = "lighthouse"
GROUPS, REPLACEMENT = ("group0", "group1"), "replacement"
TOGETHER = 12  # steps that the replacement takes with the survivor
AHEAD = 8  # steps from when the last one is chosen to the last one
KILLED_AT = 12  # the step after which the last group is killed
REPLACED_AFTER = 2.5  # seconds from the kill to the start of its replacement
SILENT = 2.0  # seconds without a heartbeat after which a group is dead; torchft's default is 5
LIMIT = 120.0  # seconds of the whole run, on a busy machine
_ROOT = str(Path(__file__).resolve().parents[2])
_VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RUST_LOG": "error"}


@dataclass(frozen=True)
class Step:
    """A step that a group has taken: when it ended, in seconds of the run; its number; how many
    groups took part; this group's loss; and how long it lasted."""

    time: float
    step: int
    groups: int
    loss: float
    seconds: float


@dataclass
class ReplicaRun:
    """What a run with a kill left. killed_at, replaced_at: seconds since the first step that all
    groups took together; when it is made, since the epoch, as the times of the steps. steps: of
    each process, by its name; the killed group's replacement is "replacement". digests: of the
    parameters in the end, by the same names, for those that came to the end."""

    killed_at: float
    replaced_at: float
    steps: dict[str, list[Step]]
    digests: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        # time 0: the first step of all groups together
        first = min(step.time for steps in self.steps.values() for step in steps
                    if step.groups == len(GROUPS))
        self.killed_at, self.replaced_at = self.killed_at - first, self.replaced_at - first
        self.steps = {name: [replace(step, time=step.time - first) for step in steps]
                      for name, steps in self.steps.items()}

    @property
    def survivor(self) -> list[Step]:
        """The steps of the group that nobody killed."""
        return self.steps[GROUPS[0]]

    @property
    def stall(self) -> Step:
        """The survivor's longest step after the kill."""
        return max((step for step in self.survivor if step.time > self.killed_at),
                   key=lambda step: step.seconds)

    @property
    def alone(self) -> float:
        """Seconds from the kill until two groups train again."""
        first = next(step for step in self.steps[REPLACEMENT] if step.groups == len(GROUPS))
        return first.time - self.killed_at

    def __repr__(self):
        return (f"{len(self.survivor)} steps of the survivor; equal parameters in the end: "
                f"{len(set(self.digests.values())) == 1}")


def has_torchft() -> bool:
    """Whether torchft is installed: the extra `ft`. Does not import it."""
    return importlib.util.find_spec("torchft") is not None


def run_replicas(train: Callable) -> ReplicaRun | Verdict:
    """Runs train(name) in two replica groups, kills one of them with SIGKILL when it has taken 12
    steps, and starts a replacement 2.5 seconds later.

    Returns a Verdict where torchft is not installed, or where a process failed. Raises Stopped
    where it is interrupted. No process is left behind.
    """
    if not has_torchft():
        return print_in_script(Verdict(TITLE, None, NOT_INSTALLED))
    try:
        with processes.temporary_folder() as folder, _Family(Path(folder)) as family:
            return family.run(train)
    except KeyboardInterrupt:
        raise Stopped("interrupted; the lighthouse and all groups were stopped") from None
    except _Failed as error:
        return print_in_script(Verdict(TITLE, False, str(error), printed=error.printed,
                                       code="replicas_failed"))


class _Failed(LaunchError):
    def __init__(self, sentence, printed=""):
        super().__init__(sentence)
        self.printed = printed


class _Family:
    """The lighthouse and the groups, and their end."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._processes: dict[str, subprocess.Popen] = {}
        self._until = time.monotonic() + LIMIT
        self._port = processes.free_port()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with processes.deferred():
            programs.end([started.pid for started in self._processes.values()])
            for started in self._processes.values():
                started.kill()
                started.wait()

    def run(self, train) -> ReplicaRun:
        (self._folder / replica_process.TRAIN).write_bytes(pack(train, ()))
        self._start(LIGHTHOUSE, [str(Path(__file__).with_name("replica_lighthouse.py")),
                                 "--bind", f"127.0.0.1:{self._port}", "--min_replicas", "1",
                                 "--heartbeat_timeout_ms", f"{1000 * SILENT:.0f}"])
        for name in GROUPS:
            self._start_group(name)
        with progress_bar(desc="two replica groups", unit=" steps") as bar:
            victim, survivor = GROUPS[1], GROUPS[0]
            self._wait(lambda: self._taken(victim) >= KILLED_AT, bar)
            programs.end([self._processes[victim].pid])
            killed = time.time()
            self._processes.pop(victim).wait()
            self._wait(lambda: time.time() > killed + REPLACED_AFTER, bar)
            replaced = time.time()
            self._start_group(REPLACEMENT)
            self._wait(lambda: self._taken(REPLACEMENT, together=True) >= TOGETHER - AHEAD, bar)
            # A step in the future: no group has passed it when the file appears, so all end after
            # the same one.
            last = max(line.get("step", 0) for line in self._lines(survivor)) + AHEAD
            unfinished = self._folder / "unfinished"
            unfinished.write_text(str(last))
            # The groups read this file while it appears: it has its content when it gets its name.
            unfinished.replace(self._folder / replica_process.END)
            running = [survivor, REPLACEMENT]
            self._wait(lambda: all(self._processes[name].poll() == 0 for name in running), bar)
        return self._result(killed, replaced)

    def _start_group(self, name):
        self._start(name, ["-m", replica_process.__name__, str(self._folder), name])

    def _start(self, name, words):
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        with processes.deferred(), open(self._folder / f"{name}.output", "wb") as output:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *words],
                env={**programs.environment(), **_VARIABLES, "PYTHONPATH": path,
                     "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True)

    def _wait(self, is_done, bar):
        """Until is_done(). Raises _Failed where a process has failed, or time is up."""
        while not is_done():
            for name, started in self._processes.items():
                if started.poll() or (name == LIGHTHOUSE and started.poll() is not None):
                    raise _Failed(f"{name} ended with exit code {started.returncode}",
                                  self._said(name))
            if time.monotonic() > self._until:
                raise _Failed(f"stopped: it took more than {LIMIT:g} s", self._said(GROUPS[0]))
            bar.update(max(0, self._taken(GROUPS[0]) - bar.n))
            time.sleep(0.02)

    def _said(self, name) -> str:
        return "\n".join(last_lines((self._folder / f"{name}.output").read_text(errors="replace"),
                                    60))

    def _taken(self, name, together=False) -> int:
        """How many steps a process has noted; together: with all groups."""
        return sum(line.get("groups", 0) >= (len(GROUPS) if together else 1)
                   for line in self._lines(name))

    def _lines(self, name) -> Iterator[dict]:
        """What a process has noted."""
        started = self._processes.get(name)
        for path in self._folder.glob(f"*-{started.pid if started else ''}.steps"):
            yield from _lines_of(path)

    def _result(self, killed, replaced) -> ReplicaRun:
        pids = {str(started.pid): name for name, started in self._processes.items()}
        found = {pids.get(path.stem.partition("-")[2], GROUPS[-1]): list(_lines_of(path))
                 for path in self._folder.glob("*.steps")}
        steps = {name: [Step(line["time"], line["step"], line["groups"], line["loss"],
                             line["seconds"]) for line in lines if line["event"] == "step"]
                 for name, lines in sorted(found.items())}
        digests = {name: line["digest"] for name, lines in sorted(found.items()) for line in lines
                   if line["event"] == "ended"}
        return ReplicaRun(killed, replaced, steps, digests)


def _lines_of(path) -> Iterator[dict]:
    """The whole lines of a file that may be written just now."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)

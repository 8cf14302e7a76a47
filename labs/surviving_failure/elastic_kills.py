"""Runs a script under torchrun and kills its ranks, one after the other, while it trains."""

import contextlib
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from labs.checks.scripts.commands import CommandResult, run_command
from labs.checks.scripts.files import missing_script, waiting_exercise
from labs.checks.verdicts import Verdict, Wrong
from labs.surviving_failure.elastic_crashes import Start
from labs.surviving_failure.elastic_metrics import Metrics
from labs.surviving_failure.forked_starts import run_starts
from labs.surviving_failure.restarts import OWN_STORE, AgentEvent, agent_events
from labs.workers import processes
from labs.workers.progress import status

SECONDS = 120.0  # that a run with kills may take
NEAR = 4  # steps before a kill in which nothing is drawn: it would come late
_STEP = re.compile(r"step_(\d+)$")


@dataclass(frozen=True)
class Kill:
    """A rank that was killed. step: the last one that was noted before. time: seconds since the
    epoch."""

    rank: int
    step: int
    time: float


@dataclass
class ElasticRun:
    """A run of a script that notes what elastic.py notes. saved: step -> when its checkpoint was
    first seen. log: what torchrun's agent said. result: None while it runs."""

    metrics: Metrics
    began: float
    kills: list[Kill] = field(default_factory=list)
    saved: dict[int, float] = field(default_factory=dict)
    log: list[AgentEvent] = field(default_factory=list)
    result: CommandResult | None = None

    def __repr__(self):
        steps = self.metrics.steps
        restarts = max((joined.restart for joined in self.metrics.joined), default=0)
        return (f"{len({step.step for step in steps})} steps, {len(steps)} with those that were "
                f"run again; {restarts} restarts; {self.result!r}")


def run_with_kills(script: str, kills: Mapping[int, int], *options: object, ranks: int = 2,
                   max_restarts: int = 3, show: Callable[[ElasticRun], None] | None = None,
                   ) -> ElasticRun | Verdict:
    """Runs the script with torchrun in a folder of its own and kills ranks of it with SIGKILL.

    kills: step -> the rank that is killed as soon as this step has been noted. options: of the
    script. show: called again and again with what there is so far. Returns a Verdict where the
    script has a gap or is missing.
    """
    with processes.temporary_folder() as folder:
        metrics, checkpoints = Path(folder, "metrics.jsonl"), Path(folder, "checkpoints")
        run = ElasticRun(Metrics(metrics), time.time())
        killer = _Killer(run, checkpoints, dict(sorted(kills.items())), show)
        command = [str(word) for word in (
            "torchrun", "--standalone", "--nproc-per-node", ranks, "--max-restarts", max_restarts,
            script, *options)]
        # A store of its own for each restart: see OWN_STORE.
        killer.title = shlex.join([f"{OWN_STORE}=1", *command])
        result = run_command(
            [*command, "--metrics", metrics, "--checkpoints", checkpoints],
            SECONDS, {"LOGLEVEL": "INFO", OWN_STORE: "1"}, killer.look)
        if isinstance(result, Verdict):
            return result
        run.metrics.read()
        run.result, run.log = result, agent_events(result.output)
        return run


class _Killer:
    def __init__(self, run, checkpoints, kills, show):
        self._run, self._checkpoints, self._kills, self._show = run, checkpoints, kills, show
        self._length, self.title = 0, ""

    def look(self, agent: int, output: str) -> None:
        """Kills where it is time to; notes what is new."""
        if self.title:
            print(f"$ {self.title}", flush=True)
            self.title = ""
        if self._run.metrics.read() and self._kills:
            self._kill(agent)
        if len(output) > self._length:
            self._length, self._run.log = len(output), agent_events(output)
        with contextlib.suppress(FileNotFoundError):
            for name in filter(None, map(_STEP.match, os.listdir(self._checkpoints))):
                self._run.saved.setdefault(int(name[1]), time.time())
        if self._show and not self._is_near():
            self._show(self._run)

    def _is_near(self) -> bool:
        """Whether a rank is about to be killed."""
        steps = self._run.metrics.steps
        return bool(self._kills and steps) and 0 < next(iter(self._kills)) - steps[-1].step <= NEAR

    def _kill(self, agent):
        step, rank = next(iter(self._kills.items()))
        metrics = self._run.metrics
        if not metrics.steps or metrics.steps[-1].step < step:
            return
        joined = metrics.joined[-1]
        # The pids of the newest (re)start: after a restart all ranks are new processes.
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(joined.pids[rank])
            if process.ppid() == agent:  # and no stranger that has got the same number
                process.send_signal(signal.SIGKILL)
                self._run.kills.append(Kill(rank, metrics.steps[-1].step, time.time()))
        del self._kills[step]


def run_alone(script: str, *options: object, ranks: int = 2) -> ElasticRun:
    """The same script on ranks that nobody kills. They are forked, which takes less time than to
    start Python. Raises Wrong where it fails."""
    if number := waiting_exercise(script):
        raise NotImplementedError(f"Exercise {number}")
    if missing := missing_script(script):
        raise Wrong(missing, code="file_missing")
    began = time.time()
    with status(f"{script} on {ranks} ranks that nobody kills"):
        [started] = run_starts(script, options, [Start(ranks)])
    if started.code != 0:
        raise Wrong(f"{script} has failed where nobody killed a rank",
                    "The check says at which line.", code="script_failed")
    metrics = Metrics("")
    metrics.steps = started.steps
    return ElasticRun(metrics, began, result=CommandResult((script,), 0, time.time() - began, ""))

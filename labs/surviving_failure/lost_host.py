"""Runs a script on two hosts of this machine, takes one away, and brings in another one."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from labs.checks.scripts.files import missing_script, waiting_exercise
from labs.checks.verdicts import Verdict
from labs.pictures.in_scripts import print_in_script
from labs.surviving_failure.elastic_metrics import Metrics
from labs.surviving_failure.restarts import OWN_STORE, AgentEvent, agent_events
from labs.workers import processes
from labs.workers.hosts import HostsUnavailable, hosts
from labs.workers.hosts.jobs import HostsJob
from labs.workers.launch_error import Stopped
from labs.workers.output import last_lines
from labs.workers.progress import status

TITLE = "Two hosts"
FIRST, SPARE = 1, 2  # the host that is lost, and the one that replaces it
# Steps with two hosts, with one, with two again.
STEPS_BEFORE, STEPS_DEGRADED, STEPS_AFTER = 8, 8, 12
TIMEOUT = 4  # seconds after which a collective fails; torch's default for gloo is 1800
LAST_CALL = 1  # seconds that a rendezvous waits for more hosts; torch's default is 30
LIMIT = 100.0  # seconds of a run, on a busy machine
_ROOT = str(Path(__file__).resolve().parents[2])
_PORT = 29_499


@dataclass(frozen=True)
class Event:
    """Something that was done to a host: "unplugged", "killed", "started" or "ended". time: seconds
    since the epoch."""

    what: str
    host: int
    time: float


@dataclass
class HostsRun:
    """What a run left. metrics: what the script noted. events: in order. logs: what each host's
    agent said. output: all that was printed on each host. error: why torchrun ended on the first
    host before the replacement trained; "" where it did train."""

    metrics: Metrics
    began: float
    events: list[Event] = field(default_factory=list)
    logs: dict[int, list[AgentEvent]] = field(default_factory=dict)
    output: dict[int, str] = field(default_factory=dict)
    error: str = ""

    def event(self, what: str, host: int) -> Event | None:
        """The first event of this kind on a host."""
        return next((event for event in self.events if (event.what, event.host) == (what, host)),
                    None)

    @property
    def lost(self) -> Event:
        """When the host was lost."""
        return next(event for event in self.events if event.what in ("unplugged", "killed"))

    @property
    def zero(self) -> float:
        """When the first step began."""
        return self.metrics.steps[0].began if self.metrics.steps else self.began

    @property
    def accepted(self) -> bool:
        """Whether the replacement has trained with the host that was left."""
        return not self.error

    def __repr__(self):
        end = f"the job failed: {self.error}" if self.error else "the replacement trained"
        return f"{len({step.step for step in self.metrics.steps})} steps; {end}"


def lose_host(script: str, lost: str = "link", environment: dict[str, str] | None = None,
              ) -> HostsRun | Verdict:
    """Runs the script with torchrun on two hosts, one rank on each, and takes host 1 away after 8
    steps. Host 2 replaces it. After 12 steps of both, all processes on host 0 are killed.

    lost: "link": host 1 is unplugged, and the replacement comes when host 0 has gone on alone for
    8 steps. "processes": all processes on host 1 are killed, and the replacement comes at once.
    environment: variables of all processes in addition. Returns a Verdict where this machine cannot
    have hosts, or the script has a gap. No process and no namespace is left behind.
    """
    if number := waiting_exercise(script):
        return print_in_script(Verdict(number, None, "is waiting for your code"))
    if sentence := missing_script(script):
        return print_in_script(Verdict(TITLE, False, sentence, code="file_missing"))
    try:
        with processes.temporary_folder() as folder, hosts(3) as three:
            return _Run(three, Path(script).absolute(), Path(folder), environment or {}).run(lost)
    except HostsUnavailable as error:
        return print_in_script(Verdict(TITLE, None, f"cannot be shown here. {error}"))
    except KeyboardInterrupt:
        raise Stopped("interrupted; all processes on all hosts were stopped") from None


class _Run:
    def __init__(self, three, script, folder, environment):
        self._hosts, self._script, self._folder = three, script, folder
        self._variables = environment
        # A host that finds no address must not wait for a minute, as it does by default. Where one
        # is found, seconds that a busy machine needs end nothing.
        self._read_timeout = 30 if environment.get(OWN_STORE) == "1" else 5
        self._jobs: dict[int, HostsJob] = {}
        self._found = HostsRun(Metrics(folder / "metrics.jsonl"), time.time())
        self._until = time.monotonic() + LIMIT

    def run(self, lost) -> HostsRun | Verdict:
        (self._folder / "checkpoints").mkdir()
        for host in (0, FIRST):
            self._start(host)
        if not self._wait("two hosts start and train", lambda: self._steps(2) >= STEPS_BEFORE):
            return self._stopped(f"{STEPS_BEFORE} steps of two hosts")
        if lost == "link":
            self._hosts[FIRST].unplug()
            self._note("unplugged", FIRST)
            if not self._wait("one host is left", lambda: self._steps(1) >= STEPS_DEGRADED):
                return self._stopped(f"{STEPS_DEGRADED} steps of the host that was left")
        else:
            self._note("killed", FIRST)
            self._jobs[FIRST].stop()
        self._start(SPARE)
        self._wait("another host joins", lambda: self._steps(2, since=SPARE) >= STEPS_AFTER)
        self._found.error = "" if self._steps(2, since=SPARE) else self._why()
        self._note("killed" if self._jobs[0].running else "ended", 0)
        self._jobs[0].stop()
        self._wait("the store is gone", lambda: not self._jobs[SPARE].running, on=SPARE)
        if not self._jobs[SPARE].running:
            self._note("ended", SPARE)
        for host, job in self._jobs.items():
            job.stop()
            self._found.output[host] = job.result().output[host]
            self._found.logs[host] = agent_events(self._found.output[host])
        self._found.metrics.read()
        return self._found

    def _start(self, host):
        self._note("started", host)
        address, own = self._hosts[0].address, self._hosts[host].address
        settings = {"is_host": "true" if host == 0 else "false", "read_timeout": self._read_timeout,
                    "last_call_timeout": LAST_CALL, "keep_alive_interval": 1,
                    "keep_alive_max_attempt": 3, "join_timeout": 60}
        command = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "6",
                   "--rdzv-endpoint", f"{address}:{_PORT}", "--rdzv-id", "elastic",
                   "--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items()),
                   "--local-addr", own, str(self._script), "--steps", "1000", "--every", "4",
                   "--timeout", str(TIMEOUT), "--dropout", "0",
                   "--metrics", str(self._folder / "metrics.jsonl"),
                   "--checkpoints", str(self._folder / "checkpoints")]
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._jobs[host] = self._hosts.start(
            command, on=host, folder=str(self._folder), quiet=True,
            environment={"CUDA_VISIBLE_DEVICES": "", "LOGLEVEL": "INFO", "PYTHONPATH": path,
                         **self._variables})

    def _note(self, what, host):
        self._found.events.append(Event(what, host, time.time()))

    def _wait(self, words: str, is_done: Callable[[], bool], on: int = 0) -> bool:
        """Until is_done(), which it returns: False where torchrun has ended on a host, the ranks
        fail again and again, or the run's time is up."""
        metrics = self._found.metrics
        with status(words):
            while not is_done() and self._jobs[on].running and time.monotonic() < self._until:
                time.sleep(0.02)
                metrics.read()
                if not metrics.steps and len(metrics.joined) > 2:
                    break
        return is_done()

    def _stopped(self, before: str) -> Verdict:
        printed = last_lines(self._jobs[0].result().output[0], 400)
        errors = [line for line in printed if line.startswith("rank ")][-8:]
        return print_in_script(Verdict(TITLE, False, f"stopped on host 0 before {before}",
                                       printed="\n".join(errors or printed[-8:]),
                                       code="script_failed"))

    def _steps(self, ranks: int, since: int = 0) -> int:
        """Steps that so many ranks have taken since a host was started."""
        began = self._found.event("started", since).time
        return sum(step.ranks == ranks and step.began > began
                   for step in self._found.metrics.steps)

    def _why(self) -> str:
        """The line in which torchrun on the first host, or on the new one, says why it ended."""
        lines = [line.strip() for host in (SPARE, 0)
                 for line in reversed(self._jobs[host].result().output[host].splitlines())]
        for words in ("MASTER_ADDR", "DistStoreError", "RendezvousConnectionError"):
            if found := [line for line in lines if words in line and "Error" in line]:
                return found[0]
        return "stopped when its time was up" if self._jobs[0].running else "torchrun ended"

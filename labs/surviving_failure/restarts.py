"""What torchrun's agent logs of a restart, where the variable LOGLEVEL is INFO, and how long the
restart took by that and by what the script noted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from labs.surviving_failure.elastic_metrics import Metrics

_LINE = re.compile(r"^[IWE](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6}) \d+ \S+:\d+\] (.*)$")
# The words of torch 2.13 -> what has happened
_EVENTS = {
    "closing signal": "noticed",
    "failed (exitcode": "noticed",
    "Worker group FAILED": "stopped",
    "detected": "stopped",  # "Detected 1 new nodes from group_rank=0; will restart worker group"
    "Rendezvous'ing worker group": "rendezvous",
    "Rendezvous complete": "found",
    "Starting worker group": "starting",
    "successfully finished": "finished",
}


@dataclass(frozen=True)
class AgentEvent:
    """what: "noticed" that a process has failed, "stopped" the others, began the "rendezvous",
    "found" all hosts, is "starting" processes, or all have "finished". time: seconds since the
    epoch."""

    what: str
    time: float


def agent_events(output: str, year: int | None = None) -> list[AgentEvent]:
    """The events among all that torchrun has printed, in order. year: of the run; the log has
    none."""
    found = []
    for line in output.splitlines():
        if match := _LINE.match(line):
            what = next((what for words, what in _EVENTS.items() if words in match[7]), None)
            if what:
                month, day, hour, minute, second, micro = map(int, match.groups()[:6])
                moment = datetime(year or datetime.now().year, month, day, hour, minute, second,
                                  micro)
                found.append(AgentEvent(what, moment.timestamp()))
    return found


# Set to 1, each restart has a store of its own. By default torch 2.13 keeps the store of a job over
# its restarts, and with it the addresses of ranks that are dead: a new rank that comes first reads
# them (pytorch 135712).
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
NOTICED, STOPPED, MET, STARTED, LOADED, CAUGHT_UP = PARTS = (
    "the agent notices", "the others are stopped", "rendezvous", "Python starts, imports torch",
    "model and checkpoint are loaded", "lost steps are run again")


@dataclass(frozen=True)
class Restart:
    """What followed a failure. seconds: of each part of PARTS, one after the other. done: steps
    that were done before. start: the step with which it continued."""

    seconds: dict[str, float]
    done: int
    start: int

    @property
    def total(self) -> float:
        """Seconds from the failure until all that was done before was done again."""
        return sum(self.seconds.values())


def restart_after(failed_at: float, log: Sequence[AgentEvent], metrics: Metrics) -> Restart | None:
    """What followed a failure at this time (seconds since the epoch); None where the training did
    not continue. log: of the agent whose rank failed."""
    def first(what, after):
        return next((event.time for event in log if event.what == what and event.time >= after),
                    None)

    # Each search begins where the last one ended, because the log has the events of all restarts.
    noticed = first("noticed", failed_at)
    stopped = noticed and first("rendezvous", noticed)
    starting = stopped and first("starting", stopped)
    joined = starting and next((one for one in metrics.joined if one.time >= starting), None)
    # a host that joins restarts all without being counted as a restart
    steps = joined and [step for step in metrics.steps
                        if step.restart == joined.restart and step.began >= joined.time]
    if not steps:
        return None
    done = 1 + max((step.step for step in metrics.steps if step.time <= failed_at), default=-1)
    caught_up = next((step.time for step in steps if step.step >= done - 1), None)
    if caught_up is None:
        return None
    times = [failed_at, noticed, stopped, starting, joined.time, steps[0].began,
             max(caught_up, steps[0].began) if steps[0].step < done else steps[0].began]
    return Restart({part: end - begin for part, begin, end in
                    zip(PARTS, times, times[1:], strict=False)}, done, steps[0].step)

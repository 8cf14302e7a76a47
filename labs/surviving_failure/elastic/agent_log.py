"""What torchrun's agent logs of a restart, where the variable LOGLEVEL is INFO."""

import re
from dataclasses import dataclass
from datetime import datetime

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

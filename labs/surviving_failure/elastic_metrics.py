"""The file in which elastic.py notes what it does: a line of JSON for each event, of which those of
all restarts follow one another."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """A training step as rank 0 noted it. restart: the number of restarts before it. began, time:
    seconds since the epoch. loss: the mean over all ranks."""

    step: int
    loss: float
    ranks: int
    restart: int
    began: float
    time: float


@dataclass(frozen=True)
class Joined:
    """The ranks of a (re)start have found each other. pids: their processes, by rank."""

    pids: tuple[int, ...]
    ranks: int
    restart: int
    time: float


class Metrics:
    """What has been noted so far; `read` adds what is new. steps, joined: in the order of the file.
    """

    def __init__(self, path: Path | str):
        self.path, self.steps, self.joined = Path(path), [], []
        self._at = 0

    def read(self) -> bool:
        """Reads the lines that are new; returns whether there was any. A line that is not ended
        waits: a process that was killed may have left it, or one is writing it."""
        try:
            # In binary: the place in the file is counted in bytes.
            with open(self.path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[:data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._add(json.loads(line))
        return bool(whole)

    def _add(self, line):
        event = line.pop("event")
        if event == "step":
            self.steps.append(Step(**line))
        elif event == "joined":
            self.joined.append(Joined(tuple(line.pop("pids")), **line))


def final_curve(steps: Iterable[Step]) -> dict[int, float]:
    """Step -> loss, of a step that was run several times the last one."""
    return dict(sorted({step.step: step.loss for step in steps}.items()))


def run_again(steps: Iterable[Step]) -> list[Step]:
    """The steps that had been done before, in an earlier (re)start."""
    seen, again = set(), []
    for step in steps:
        if step.step in seen:
            again.append(step)
        seen.add(step.step)
    return again

"""Starts elastic.py again and again, as torchrun does when ranks are killed, but forks the ranks: a
start takes a second instead of five."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labs.checks.scripts.forked import ForkedJob
from labs.surviving_failure.elastic_crashes import Start, main
from labs.surviving_failure.elastic_metrics import Metrics, Step
from labs.workers import processes, programs
from labs.workers.launch_error import Stopped

SECONDS = 40.0  # that a start may take


@dataclass
class Started:
    """What the ranks of one (re)start did. code: the job's exit code, None where it was stopped
    because it hung; codes: of the ranks. killed: (rank, steps that it had begun) of the one that
    crashed. batches[rank]: a key of the samples of each step; random_states[rank]: of the state of
    the random numbers at the start of its forward; rates[rank]: its learning rates.
    calls[rank]: (steps done, "write" or "rename", path) of each call that changed the checkpoints.
    errors[rank]: (type, message, line of the script) of what it raised. waiting[rank]: where it
    was when the start was stopped, the rest of a sentence, else "". steps: what rank 0 noted.
    left: processes that were still there after its end."""

    start: Start
    code: int | None
    codes: list[int | None]
    killed: tuple[int, int] | None
    batches: list[list[str]]
    random_states: list[list[str]]
    rates: list[list[float]]
    calls: list[list[tuple[int, str, str]]]
    errors: list[tuple[str, str, int] | None]
    waiting: list[str]
    output: list[str]
    steps: list[Step]
    left: int


def run_starts(script: str | Path, options: Sequence[object], starts: Sequence[Start],
               ) -> list[Started]:
    """Starts the script on ranks until it has crashed in the planned ways; ends with the first
    start that does not crash."""
    found = []
    with processes.temporary_folder() as folder:
        metrics = Metrics(Path(folder, "metrics.jsonl"))
        words = ("--metrics", str(metrics.path), "--checkpoints", os.path.join(folder, "saved"),
                 *map(str, options))
        for number, start in enumerate(starts):
            found.append(_run(script, words, start, number, folder, metrics))
            if found[-1].killed is None:
                break
    return found


def _run(script, words, start, number, folder, metrics) -> Started:
    notes = Path(folder, f"notes-{number}")
    job = ForkedJob(start.ranks, 1, notes, {"TORCHELASTIC_RESTART_COUNT": str(number)})
    try:
        job.start(str(Path(script).absolute()), words, folder, SECONDS, None, main, start)
        job.wait()
    except KeyboardInterrupt:
        raise Stopped("interrupted; all ranks were stopped") from None
    finally:
        job.kill()
    # All starts append to one file of metrics: only its new steps are of this start.
    result, before = job.result(words, ""), len(metrics.steps)
    metrics.read()
    by_rank = {what: _noted(notes, what, start.ranks)
               for what in ("batch", "random", "rate", "call", "error", "killed")}
    killed = next(((rank, steps[0]) for rank, steps in enumerate(by_rank["killed"]) if steps),
                  None)
    return Started(start, result.code, result.codes, killed, by_rank["batch"],
                   by_rank["random"], by_rank["rate"],
                   [[tuple(call) for call in calls] for calls in by_rank["call"]],
                   [tuple(errors[0]) if errors else None for errors in by_rank["error"]],
                   result.waiting, result.output, metrics.steps[before:], result.left)


def _noted(notes, what, ranks) -> list[list]:
    found = programs.noted(notes, what)
    return [[json.loads(value) for who, value in found if who == str(rank)]
            for rank in range(ranks)]

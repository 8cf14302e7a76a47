"""Steps that the student's function of exercise 5.12 records, and what its file must hold.

The lab calls the function as `record_step(train_one_step, path, **options)` on every rank, and
reads the file. Where the function is not written yet, or leaves a file that cannot be read as one
step, the lab records with a call of its own, so that the notebook goes on.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from labs.checks.verdicts import Wrong
from labs.meters.trace import Trace
from labs.meters.trace_file import (
    RecordedStep,
    TraceError,
    keep,
    load,
    profiler_options,
    read_events,
    record_step,
)
from labs.words import counted
from labs.workers import devices, slow_link

STEP = "labs::step"
_LABEL = f'with record_function("{STEP}"): around train_one_step().'
_OPTIONS = "profile(..., **options)"


@dataclass(frozen=True)
class RecordedFile:
    """A step that the student's function recorded, as a `RecordedStep`. trace: of the file that it
    left; seconds: what the step took."""

    trace: Trace
    seconds: float

    def write(self, path: Path) -> Trace:
        """Moves the file to `path`, and returns the trace with this path."""
        keep(Path(self.trace.path), path)
        return replace(self.trace, path=str(path))


class Recorder:
    """On a rank: records steps by the student's function `record`, or, where it is None or cannot,
    by the lab's own call. note: why not by the student's, one line; "" if there is no reason."""

    def __init__(self, record: Callable | None, step: Callable[[], object], folder: str,
                 stacks: bool):
        self.record, self.step, self.folder, self.stacks = record, step, Path(folder), stacks
        self.note, self.files = "", 0

    def __call__(self) -> RecordedStep | RecordedFile:
        if self.record is None:
            return record_step(self.step, self.stacks)
        self.files += 1
        path, problem, found = self.folder / f"{self.files}_{dist.get_rank()}.json", "", None
        try:
            found = record_by(self.record, self.step, path, self.stacks)
        except NotImplementedError as error:
            if not str(error).startswith("Exercise"):
                raise
            problem = f"{error} waits for your code"
        except Wrong as error:
            problem = f"the check of 5.12 rejects record_step: {error.sentence}"
        # All ranks take the same recorder: a barrier of one would meet a collective of another.
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if not any(problems):
            return found
        self.record, self.note = None, next(filter(None, problems))
        return record_step(self.step, self.stacks)


def record_by(record: Callable, step: Callable[[], object], path: Path,
              stacks: bool = False) -> RecordedFile:
    """On a rank: the step that `record` records into `path`. Raises Wrong where the file cannot be
    read as that step."""
    seconds = []

    def train_one_step():
        began = time.perf_counter()
        step()
        devices.synchronize()  # kernels run behind the program: the label must contain the last one
        seconds.append(time.perf_counter() - began)

    record(train_one_step, str(path), **profiler_options(stacks))
    # Invariant: one step. A second one, as a warm-up, would train on a batch more than the caller
    # knows of.
    if len(seconds) != 1:
        raise Wrong(f"train_one_step() was called {counted(len(seconds), 'time')}, not once",
                    "Call it once, inside of the label.", code="wrong_count")
    trace = _load(path)
    _require_step(trace)
    _require_options(trace, stacks)
    return RecordedFile(trace, seconds[0])


def _load(path) -> Trace:
    if not path.exists():
        raise Wrong("there is no file at `path`",
                    "profiler.export_chrome_trace(path), on every rank: each gets a path of its "
                    "own.", code="file_missing")
    try:
        return load(path)
    except TraceError as error:
        raise Wrong(str(error), "profiler.export_chrome_trace(path), when the profiler has "
                    "stopped.", code="unreadable_file") from None


def _require_step(trace):
    # Invariant: one label around the step. It says when the step begins and ends; what the profiler
    # records before and after it is no part of the step.
    if len(trace.steps) != 1:
        raise Wrong(f"the trace has the label {STEP!r} {counted(len(trace.steps), 'time')}, not "
                    "once", _LABEL, code="missing_label")
    # The lab's step has labels of its own. Catches a step that ran before the profiler started, or
    # after it stopped.
    if not (forward := trace.labelled("labs::forward")):
        raise Wrong("the trace has no operation of the step: it ran while the profiler did not",
                    "train_one_step() belongs inside of `with profile(...)`, or between start() "
                    "and stop().", code="step_not_recorded")
    [label] = trace.steps
    if not label.begin <= forward[0].begin <= label.end:
        raise Wrong(f"the step ran outside of the label {STEP!r}", _LABEL, code="outside_label")


def _require_options(trace, stacks):
    sent = trace.of("all_gather")
    # Invariant: the bytes of collectives. gloo's and NCCL's events have the shapes only if they are
    # recorded; a slow link writes the bytes into its own labels.
    if not all(one.bytes for one in sent):
        raise Wrong("the collectives have no shapes, so that nobody knows their bytes",
                    "profile(record_shapes=True, ...)", code="no_shapes")
    if stacks and not any(one.stack for one in sent):
        raise Wrong("the trace has no call stacks, which `options` asks for", _OPTIONS,
                    code="no_stacks")
    # Without its thread, gloo's own events are left, far shorter than the collectives were in
    # flight.
    if slow_link.is_slow() and not any(one.name.startswith(slow_link.LABEL) for one in sent):
        raise Wrong("the trace has nothing of the slow link's thread, which `options` asks for",
                    _OPTIONS, code="no_link")


def require_common_begin(path: Path) -> None:
    """Raises Wrong where no collective of the file in `path` lies before its step: then the ranks
    do not begin the step together, because their profilers start at different times, and the
    first collective of the step waits for the last rank."""
    begins = {category: min((event["ts"] for event in read_events(path)
                             if event.get("cat") == category and event["name"].startswith(name)),
                            default=float("inf"))
              for category, name in (("user_annotation", STEP), ("cpu_op", "c10d::"))}
    if begins["cpu_op"] > begins["user_annotation"]:
        raise Wrong("the ranks do not begin the step together: there is no barrier between the "
                    "profiler's start and the label", "dist.barrier(), while the profiler records, "
                    "before the label.", code="no_barrier")

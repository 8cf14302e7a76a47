"""Records steps with torch.profiler, and reads the Chrome trace files that it writes.

A file of a few steps with stacks has hundreds of megabytes. So it is read in pieces, one event at a
time, and only the trace is kept (`labs.meters.trace_events`).
"""

import gzip
import json
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from labs.meters.trace import Trace
from labs.meters.trace_events import TraceBuilder
from labs.workers import cuda, devices, slow_link

WORKBOOK = Path(__file__).resolve().parents[2]
PIECE = 1 << 20  # characters that are read at once
_HEADER, _LONGEST = 1 << 22, 1 << 24  # characters before the events, and of one event, at most
_EVENTS, _SEPARATORS = re.compile(r'"traceEvents"\s*:\s*\['), re.compile(r"[\s,]*")
_decoder = json.JSONDecoder(strict=False)


class TraceError(ValueError):
    """Raised for a file that is not a trace, or not a whole one; the message says what to do."""


@dataclass(frozen=True)
class RecordedStep:
    """A step under torch.profiler, which no file has yet: to write and read one takes longer than
    the step. seconds: what the step took, or all that were recorded."""

    profiled: profile
    seconds: float

    def write(self, path=None) -> Trace:
        """Returns the trace, and writes it to `path` (.json or .json.gz); without a path the file
        is deleted. Once: torch gives a recording away."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self.profiled.export_chrome_trace(str(file))
            trace = load(file)
            if path:
                keep(file, Path(path))
            return replace(trace, path=str(path or ""))


def experiments_folder() -> Path:
    """Where notebooks keep traces and records: `experiments` of the workbook, or, where the
    notebook lies outside of it, beside the notebook: then several students may use one copy of the
    workbook, and none may write to it."""
    here = Path.cwd()
    return (WORKBOOK if here.is_relative_to(WORKBOOK) else here) / "experiments"


def fastest(recorded: Sequence[RecordedStep]) -> int:
    """On a rank: which of the steps, that all ranks recorded together, was the shortest: a delay of
    the machine only makes a step longer. A step takes as long as on its slowest rank."""
    seconds = torch.tensor([one.seconds for one in recorded], device=devices.device())
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return int(seconds.argmin())


def record_trace(step: Callable[[], None], path=None, stacks: bool = False) -> Trace:
    """Runs `step()` under torch.profiler on this rank and returns the trace. path: as for
    `RecordedStep.write`; stacks: as for `record_step`."""
    return record_step(step, stacks).write(path)


def record_step(step: Callable[[], None], stacks: bool = False, steps: int = 1) -> RecordedStep:
    """Runs `step()` so many times under torch.profiler on this rank. Recording slows a step down,
    most of all with stacks: order and proportions are right, seconds are too long."""
    activities = [ProfilerActivity.CPU]
    if devices.device().type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True,
                 **profiler_options(stacks)) as recorded:
        if dist.is_initialized():
            dist.barrier()  # so that the ranks begin together
        began = time.perf_counter()
        for _ in range(steps):
            with record_function("labs::step"):
                step()
                if activities[1:]:
                    cuda.synchronize()  # the step is over when its last kernel is
        seconds = time.perf_counter() - began
    return RecordedStep(recorded, seconds)


def profiler_options(stacks: bool = False) -> dict[str, Any]:
    """On a rank: returns the arguments of torch.profiler.profile that differ between recordings."""
    options = {"with_stack": True} if stacks else {}
    if slow_link.is_slow():
        # The slow link is a Python thread that began before the recording. The profiler leaves such
        # threads out by default. Experimental.
        options["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
    return options


def keep(file: Path, path: Path) -> None:
    """Moves a trace to `path`. Compressed here: torch compresses line by line, and at the highest
    level, which takes five times as long for a tenth of the size."""
    if path.suffix != ".gz":
        shutil.move(file, path)
        return
    with open(file, "rb") as events, gzip.open(path, "wb", compresslevel=6) as kept:
        shutil.copyfileobj(events, kept, PIECE)


def load(path) -> Trace:
    """Returns the trace in a file that torch.profiler exported (.json or .json.gz). Raises
    TraceError and FileNotFoundError."""
    builder, header = TraceBuilder(), {}
    for event in read_events(path, header):
        if event.get("ph") == "X" and "ts" in event:  # a complete event: it has begin and duration
            builder.add(event)
    if builder.last < builder.first:
        raise TraceError(f"{path} holds no operation that torch.profiler recorded")
    return builder.trace(header.get("distributedInfo", {}), str(path))


def read_events(path, header: dict | None = None) -> Iterator[dict]:
    """Yields the events of a trace file as dictionaries, in the file's order.

    header, if given, receives "distributedInfo" (rank, world size, backend), which stands before
    the events. Raises TraceError where the file is foreign or cut off, and FileNotFoundError.
    """
    path = Path(path)
    try:
        with _open(path) as file:
            yield from _events(file, path.name, {} if header is None else header)
    except (EOFError, zlib.error):
        raise TraceError(f"{path.name} ends in the middle of its compressed data: copy it again, "
                         "or record it again") from None
    except gzip.BadGzipFile as error:
        raise TraceError(f"{path.name} is damaged ({error}): copy it again, or record it "
                         "again") from None


def _open(path):
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"  # whatever its name says
    # With stacks, FSDP2's labels hold bytes that are not UTF-8 (a bug of torch): replace them.
    return (gzip.open if compressed else open)(path, "rt", encoding="utf-8", errors="replace")


def _events(file, name, header):
    text, at = _to_first_event(file, name, header)
    number = 0
    while True:
        at = _SEPARATORS.match(text, at).end()
        if text.startswith("]", at):
            return
        try:
            event, at = _decoder.raw_decode(text, at)
        except ValueError:  # the event goes on in the next piece
            text, at = text[at:], 0
            more = file.read(PIECE)
            if not more or len(text) > _LONGEST:
                raise _cut_off(name, number, text, at_end=not more) from None
            text += more
            continue
        if not isinstance(event, dict):
            raise TraceError(f"{name} is no trace: its event {number} is {event!r}")
        number += 1
        yield event


def _to_first_event(file, name, header):
    """Returns (text, position of the first event in it)."""
    text = ""
    while not (found := _EVENTS.search(text)):
        more = file.read(PIECE)
        if not more or len(text) > _HEADER:
            raise TraceError(f"{name} is no trace of torch.profiler: it has no traceEvents" if text
                             else f"{name} is empty: the run that wrote it did not end its "
                             "profiler")
        text += more
    if "distributedInfo" in text[:found.start()]:
        begin = text.index("{", text.index('"distributedInfo"'))
        header["distributedInfo"] = _decoder.raw_decode(text, begin)[0]
    return text, found.end()


def _cut_off(name, number, rest, at_end) -> TraceError:
    if not at_end or (rest and not rest.startswith("{")):
        return TraceError(f"{name} is damaged: after event {number:,} stands {rest[:20]!r}")
    return TraceError(f"{name} ends in the middle, after {number:,} events: the copy, or the "
                      "disk, was too short; record it again")

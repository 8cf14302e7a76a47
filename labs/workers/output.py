"""What ranks print and report, shown in the caller: live, whole lines, marked by rank, in rank
order, and never so much that it drowns the notebook; numbers of rank 0 as a progress bar."""

import math
import os
import re
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass, field

from labs.words import counted, named_ranks
from labs.workers import source_lines
from labs.workers.progress import OFF, in_notebook, progress_bar

HOLD = 0.2  # seconds a line may wait, so that lines of the same moment appear in rank order
SHOWN = 200  # lines of each rank that are shown as they come; of the rest, the last ones
LAST = 20
GATHER = 1.0  # seconds in which the same warning from other ranks may join the first
WIDEST = 2_000  # characters shown of one line
WARNINGS_SHOWN = 30  # different Python warnings of one launch
KEPT = 16_000_000  # bytes of each rank that are kept
ARRIVAL_SHOWN = 50_000_000  # bytes of results from which their arrival is shown
NO_TEXT = "(bytes that are no text; all are in .output)"

# What torch's C++ prints when a peer has gone (the diagnosis says it better), what its profiler
# prints at every start, the stacks that faulthandler and c10 write, and a log of torch's of its own
# work. Kept in `text`.
NOISE = re.compile(r"(\[rank\d+\]:)?\[[EW]\d{4} [\d:.]+ (ProcessGroup|Utils|socket)\w*\.cpp"
                   r"|USDT:.*ProfilerHandler|Fatal Python error: |(Current t|T)hread 0x"
                   r"|terminate called after throwing an instance of 'gloo::"
                   r"|  what\(\):  \[enforce fail at \S*/gloo/"
                   r"|terminate called after throwing an instance of 'c10::"
                   r"|  what\(\):  \[PG ID|Exception raised from |frame #\d+: "
                   r'|  File ".*", line \d+ in |Extension modules: '
                   # DTensor's log where a tensor that is sharded twice is gathered to be saved
                   r"|(\[rank\d+\]:)?W\d{4} [\d:.]+ \d+ \S*torch/distributed/tensor/"
                   r"_redistribute\.py:\d+\] While redistributing ")
_CONTROL = re.compile("\x1b(?!\\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


class LaunchOutput:
    """Collects what `ranks` ranks print, and shows it. text[r] is all that rank r printed. who: the
    word before a rank's number in its mark; without one its lines have no mark."""

    def __init__(self, ranks: int, quiet: bool = False, who: str = "rank"):
        self.quiet, self.who = quiet, who
        self.by_rank = [RankOutput() for _ in range(ranks)]
        self._warnings: dict[str, RepeatedWarning] = {}
        self._pending_since = None
        self.changed = time.monotonic()  # when a rank last printed anything

    @property
    def text(self) -> list[str]:
        return [output.text for output in self.by_rank]

    def read(self, rank: int, descriptor: int) -> bool:
        """Takes what rank `rank` printed; False at the end of its output."""
        # One read: it returns what is there and never waits, because the selector found the pipe
        # ready.
        data = os.read(descriptor, 1 << 16)
        self.by_rank[rank].feed(data)
        self.changed = time.monotonic()
        if self.by_rank[rank].pending:
            self._pending_since = self._pending_since or self.changed
        return bool(data)

    def add_warning(self, rank: int, text: str, place) -> None:
        """Takes a Python warning; the same one from several ranks is shown once, and of too many
        different ones how many there were."""
        self.by_rank[rank].keep(f"{place}: {text}\n".encode())
        title = f"{cut(text)}, at {place}"
        if title not in self._warnings and len(self._warnings) >= WARNINGS_SHOWN:
            title = "other warnings, which are not shown here; all are in .output"
        self._warnings.setdefault(title, RepeatedWarning(title)).add(rank)

    def show_notice(self, text: str) -> None:
        """Shows a sentence of the launcher's own, also where the ranks' output is not shown; not in
        outputs that are compared or kept, as only a slow machine has it there."""
        if in_notebook() and os.environ.get(OFF) == "0":
            return
        self._show_pending()
        print(text, flush=True)

    def show(self) -> None:
        """Shows the lines and warnings that have waited long enough."""
        now = time.monotonic()
        if self._pending_since is not None and now - self._pending_since > HOLD:
            self._show_pending()
        self._write("".join(warning.new_line() for warning in self._warnings.values()
                            if not warning.shown and now - warning.since > GATHER))

    def finish(self) -> None:
        """Shows all that is left: a last line that was not ended, and what was held back."""
        for output in self.by_rank:
            output.end()
        self._show_pending()
        self._write("".join(warning.new_line() for warning in self._warnings.values()))

    def _show_pending(self):
        self._pending_since = None
        marks = [f"{self.who} {rank} │ " if self.who else "" for rank in range(len(self.by_rank))]
        self._write("".join(f"{mark}{line}\n" for mark, output in
                            zip(marks, self.by_rank, strict=True) for line in output.take()))

    def _write(self, text):
        if text and not self.quiet:
            sys.stdout.write(text)
            sys.stdout.flush()


@dataclass
class RepeatedWarning:
    """A warning, the ranks it came from, and how often it came."""

    title: str
    since: float = field(default_factory=time.monotonic)
    ranks: set[int] = field(default_factory=set)
    count: int = 0
    shown: int = 0  # how often it had come when it was shown

    def add(self, rank: int) -> None:
        """It came once more."""
        self.ranks.add(rank)
        self.count += 1

    def new_line(self) -> str:
        """What has come since it was shown, as a line to print; empty if nothing has."""
        before, self.shown = self.shown, self.count
        if self.count == before:
            return ""
        times = f" ({self.count:,} times)" if self.count > len(self.ranks) else ""
        again = "again: " if before else ""
        return f"{named_ranks(self.ranks)} │ {again}{self.title}{times}\n"


class RankOutput:
    """What one rank printed. pending: the lines of it that wait to be shown."""

    def __init__(self):
        self.pending = []
        self._kept, self._size, self._lost = [], 0, 0
        self._partial = self._ending = b""
        self._lines = 0  # that were to be shown, so far
        self._last = deque(maxlen=LAST)
        self._after_noise = self._after_blob = False

    @property
    def text(self) -> str:
        lost = f"\n… {self._lost} bytes more were printed, and not kept\n" if self._lost else ""
        return b"".join(self._kept).decode("utf-8", "replace") + lost

    @property
    def ending(self) -> str:
        """The last few thousand characters, whether kept or not."""
        return self._ending.decode("utf-8", "replace")

    def feed(self, data: bytes) -> None:
        self.keep(data)
        self._ending = (self._ending + data)[-20_000:]
        *lines, self._partial = (self._partial + data).split(b"\n")
        if b"\0" in data and len(lines) > 2:  # a blob; a line break in it means nothing
            lines[1:-1] = [b"\xff"]
        if len(self._partial) > 50 * WIDEST:
            lines, self._partial = [*lines, self._partial], b""
        self._add(lines)

    def keep(self, data: bytes) -> None:
        if self._size + len(data) > KEPT:
            self._lost += len(data)
            return
        self._kept.append(data)
        self._size += len(data)

    def end(self) -> None:
        """No more will come: what is left of the partial line, and the last lines held back."""
        if self._partial:
            self._add([self._partial])
            self._partial = b""
        unseen = self._lines - SHOWN - len(self._last)
        if unseen > 0:
            self.pending.append(f"… {unseen:,} lines are not shown here; all are in .output "
                                "of the result, or of labs.last_failure()")
        self.pending += map(_readable, self._last)
        self._last.clear()

    def take(self) -> list[str]:
        lines, self.pending = self.pending, []
        return lines

    def _add(self, lines):
        free = max(0, SHOWN - self._lines)
        for line in map(_readable, lines[:free]):
            if line is NO_TEXT and self._after_blob:
                continue  # one line for a whole blob
            self._after_blob = line is NO_TEXT
            if not self._is_noise(line):
                self.pending.append(line)
                self._lines += 1
        self._lines += len(lines[free:])
        self._last.extend(lines[free:])

    def _is_noise(self, line) -> bool:
        noise = bool(NOISE.match(line)) or (self._after_noise and not line)
        self._after_noise = noise
        return noise


def _readable(line: bytes) -> str:
    """A line as a terminal would leave it: what follows the last carriage return, and without
    control characters that would move the cursor."""
    text = line.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]
    if text.count("\N{REPLACEMENT CHARACTER}") > len(text) / 8:
        return NO_TEXT
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", cut(text))


def cut(text: str, most: int = WIDEST) -> str:
    """The text, or its first `most` characters and a remark that says how many more there are."""
    return text[:most] + (f" … ({len(text) - most:,} characters more)" if len(text) > most else "")


def last_lines(text: str, most: int = LAST) -> list[str]:
    """The last lines of what somebody printed, as a notebook may show them: without noise, each of
    them cut, below a line that says how many lines are left out, if any."""
    lines = [line for line in text.splitlines() if line and not NOISE.match(line)]
    hidden = len(lines) - most
    above = [f"… {counted(hidden, 'line')} above this one"] if hidden > 0 else []
    return above + [_readable(line.encode()) for line in lines[-most:]]


class ProgressBars:
    """series[name] is the list of reported values, in order; "step" among them."""

    def __init__(self, quiet: bool = False):
        self.series: dict[str, list[float]] = {}
        self.quiet = quiet
        self.changed = time.monotonic()  # when rank 0 last reported anything
        self._reports = self._arrivals = None  # bars
        self._began = time.time()
        self._warned = set()

    def add(self, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        """Takes one report of rank 0."""
        self.changed = time.monotonic()
        if step is not None:
            self.series.setdefault("step", []).append(step)
        for name, value in metrics.items():
            self.series.setdefault(name, []).append(value)
            self._warn_if_not_finite(name, value, step)
        if not self.quiet:
            self._show(step, total, metrics)

    def show_arrival(self, received: int, total: int) -> None:
        """Shows how much of large results has arrived, in bytes."""
        if self.quiet or total < ARRIVAL_SHOWN:
            return
        if self._arrivals is None:
            self._arrivals = progress_bar(desc="results", unit="B", unit_scale=True)
        self._arrivals.total = total
        self._arrivals.update(received - self._arrivals.n)

    def close(self) -> None:
        for bar in (self._reports, self._arrivals):
            if bar is not None:
                bar.close()

    def _warn_if_not_finite(self, name, value, step):
        if math.isfinite(value) or name in self._warned:
            return
        self._warned.add(name)
        when = f" at step {step}" if step is not None else ""
        why = ": a learning rate that is too high is the usual cause" if name == "loss" else ""
        warnings.warn(f"{name} is {value}{when} on rank 0, and the run continues{why}",
                      stacklevel=source_lines.steps_to_caller())

    def _show(self, step, total, metrics):
        bar = self._reports
        if bar is None:
            bar = self._reports = progress_bar(desc="rank 0", unit="step", total=total)
            bar.start_t = self._began  # the launch, not the first report, began the first step
        bar.set_postfix({name: f"{value:.4g}" for name, value in metrics.items()}, refresh=False)
        bar.update(1 if step is None else step + 1 - bar.n)

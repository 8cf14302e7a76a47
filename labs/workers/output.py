"""What ranks print, shown in the caller: live, whole lines, marked by rank, in rank order, and
never so much that it drowns the notebook."""

import os
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field

HOLD = 0.2  # seconds a line may wait, so that lines of the same moment appear in rank order
SHOWN = 200  # lines of each rank that are shown as they come; of the rest, the last ones
LAST = 20
GATHER = 1.0  # seconds in which the same warning from other ranks may join the first
WIDEST = 2_000  # characters shown of one line
KEPT = 16_000_000  # bytes of each rank that are kept
NO_TEXT = "(bytes that are no text; all are in .output)"

# What torch's C++ prints when a peer has gone (the diagnosis says it better), its profiler at
# every start, and what faulthandler writes for us. Kept in `text`.
NOISE = re.compile(r"(\[rank\d+\]:)?\[[EW]\d{4} [\d:.]+ (ProcessGroup|Utils|socket)\w*\.cpp"
                    r"|USDT:.*ProfilerHandler|Fatal Python error: |(Current t|T)hread 0x"
                    r'|  File ".*", line \d+ in |Extension modules: ')
_CONTROL = re.compile("\x1b(?!\\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


class Screen:
    """Collects the output of `ranks` ranks and prints it. text[r] is all that rank r printed."""

    def __init__(self, ranks: int, quiet: bool = False):
        self.quiet = quiet
        self.reels = [Reel() for _ in range(ranks)]
        self._warnings = {}  # title -> Repeated
        self._since = None
        self.changed = time.monotonic()  # when a rank last printed anything

    @property
    def text(self) -> list:
        return [reel.text for reel in self.reels]

    def read(self, rank: int, descriptor: int) -> bool:
        """Takes what rank `rank` printed; False at the end of its output."""
        data = os.read(descriptor, 1 << 16)
        self.reels[rank].feed(data)
        self.changed = time.monotonic()
        if self.reels[rank].pending:
            self._since = self._since or self.changed
        return bool(data)

    def warn(self, rank: int, text: str, place) -> None:
        """Takes a Python warning; the same one from several ranks is shown once."""
        self.reels[rank].keep(f"{place}: {text}\n".encode())
        title = f"{text}, at {place}"
        self._warnings.setdefault(title, Repeated(title, time.monotonic())).ranks.append(rank)

    def say(self, text: str) -> None:
        """Shows a sentence of the launcher's own."""
        self._print()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def finish(self) -> None:
        """Prints all that is left: a last line that was not ended, and what was held back."""
        for reel in self.reels:
            reel.end()
        self._print()
        self._write("".join(map(Repeated.line, self._warnings.values())))

    def show(self) -> None:
        """Prints the lines that have waited long enough."""
        now = time.monotonic()
        if self._since is not None and now - self._since > HOLD:
            self._print()
        self._write("".join(warning.line() for warning in self._warnings.values()
                            if not warning.shown and now - warning.since > GATHER))

    def _print(self):
        self._since = None
        self._write("".join(f"rank {rank} │ {line}\n" for rank, reel in enumerate(self.reels)
                            for line in reel.take()))

    def _write(self, text):
        if text and not self.quiet:
            sys.stdout.write(text)
            sys.stdout.flush()


@dataclass
class Repeated:
    """A warning, and the ranks it came from, once for each time it came."""

    title: str
    since: float
    ranks: list = field(default_factory=list)
    shown: int = 0  # how often it had come when it was shown

    def line(self) -> str:
        """What is new about it, as a line to print; nothing if nothing is."""
        count, before, self.shown = len(self.ranks), self.shown, len(self.ranks)
        if count == before:
            return ""
        times = f" ({count} times)" if count > len(set(self.ranks)) else ""
        again = "again: " if before else ""
        return f"{_ranks(sorted(set(self.ranks)))} │ {again}{self.title}{times}\n"


class Reel:
    """What one rank printed. pending: the lines of it that wait to be shown."""

    def __init__(self):
        self.pending = []
        self._kept, self._size, self._lost = [], 0, 0
        self._partial = self._ending = b""
        self._lines = 0  # that were to be shown, so far
        self._last = deque(maxlen=LAST)
        self._after_noise = self._shows_no_text = False

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

    def take(self) -> list:
        lines, self.pending = self.pending, []
        return lines

    def _add(self, lines):
        free = max(0, SHOWN - self._lines)
        for line in map(_readable, lines[:free]):
            if line is NO_TEXT and self._shows_no_text:
                continue  # one line for a whole blob
            self._shows_no_text = line is NO_TEXT
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
    """A line as a terminal would leave it standing: after the last carriage return, and without
    what would move the cursor."""
    text = line.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]
    if text.count("\N{REPLACEMENT CHARACTER}") > len(text) / 8:
        return NO_TEXT
    more = f" … ({len(text) - WIDEST:,} characters more)" if len(text) > WIDEST else ""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text[:WIDEST]) + more


def _ranks(ranks) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))

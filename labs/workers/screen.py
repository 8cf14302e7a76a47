"""What ranks print, shown in the caller: live, whole lines, marked by rank, in rank order."""

import os
import re
import sys
import time

HOLD = 0.2  # seconds a line may wait, so that lines of the same moment appear in rank order

# What torch's C++ prints when a peer has gone (the diagnosis says it better), and its profiler
# at every start. Kept in `text`.
_NOISE = re.compile(r"(\[rank\d+\]:)?\[[EW]\d{4} [\d:.]+ (ProcessGroup|Utils|socket)\w*\.cpp"
                    r"|USDT:.*ProfilerHandler")


class Screen:
    """Collects the output of `ranks` ranks and prints it. text[r] is all that rank r printed."""

    def __init__(self, ranks: int, quiet: bool = False):
        self.quiet = quiet
        self.pieces = [[] for _ in range(ranks)]
        self._partial = [b""] * ranks
        self._pending = [[] for _ in range(ranks)]
        self._since = None

    @property
    def text(self) -> list:
        return ["".join(pieces) for pieces in self.pieces]

    def read(self, rank: int, descriptor: int) -> bool:
        """Takes what rank `rank` printed; False at the end of its output."""
        data = os.read(descriptor, 1 << 16)
        *lines, self._partial[rank] = (self._partial[rank] + data).split(b"\n")
        if lines:
            self._take(rank, [line.decode("utf-8", "replace") + "\n" for line in lines])
        return bool(data)

    def _take(self, rank, lines):
        self.pieces[rank] += lines
        self._pending[rank] += [line for line in lines if not _NOISE.match(line)]
        self._since = self._since or time.monotonic()

    def finish(self) -> None:
        """Prints all that is left, also a last line that was not ended."""
        for rank, rest in enumerate(self._partial):
            if rest:
                self._take(rank, [rest.decode("utf-8", "replace")])
        self._print()

    def show(self) -> None:
        """Prints the lines that have waited long enough."""
        if self._since is not None and time.monotonic() - self._since > HOLD:
            self._print()

    def _print(self):
        text = "".join(f"rank {rank} │ {line}" for rank, lines in enumerate(self._pending)
                       for line in _ended(lines))
        self._pending = [[] for _ in self._pending]
        self._since = None
        if text and not self.quiet:
            sys.stdout.write(text)
            sys.stdout.flush()


def _ended(lines):
    return [line if line.endswith("\n") else line + "\n" for line in lines]

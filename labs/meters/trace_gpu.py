"""What a GPU ran in a trace, and when the program launched it.

The CPU launches a kernel and continues; the GPU runs it later. In a trace file both events have the
same correlation number, so that what a label of the program encloses on the CPU can be found on the
GPU. Streams run in order, so the stream with most kernels tells when the GPU came to a label.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict

from labs.meters.trace import Interval

Label = tuple[float, float, str]  # begin, end, name


class GpuWork:
    """The launches of a trace, and what its GPU ran apart from collectives. Times are seconds."""

    def __init__(self):
        self.launches: dict[int, tuple[int, float]] = {}  # correlation -> (thread, moment)
        self.intervals: list[Interval] = []
        # stream -> correlation numbers, begins and ends of its kernels: there may be a million
        self._kernels = defaultdict(lambda: (array("q"), array("d"), array("d")))

    def launch(self, event: dict, name: str, moment: float) -> None:
        """Takes in a call of CUDA, if it launches kernels."""
        correlation = event.get("args", {}).get("correlation")
        if correlation and "Launch" in name:
            self.launches[correlation] = (event["tid"], moment)

    def add(self, event: dict, begin: float, end: float) -> None:
        """Takes in a kernel, a copy or a fill."""
        if self.intervals and self.intervals[-1][0] <= begin <= self.intervals[-1][1]:
            self.intervals[-1] = (self.intervals[-1][0], max(self.intervals[-1][1], end))
        else:
            self.intervals.append((begin, end))
        correlation = event.get("args", {}).get("correlation")
        if correlation and event.get("cat") == "kernel":
            for column, value in zip(self._kernels[event["tid"]], (correlation, begin, end),
                                     strict=True):
                column.append(value)

    def executed(self, labels: list[Label]) -> list[Label]:
        """Returns the labels at the times at which the GPU ran what was launched in them, in order;
        none where the file has no launches. A label that launched nothing is the moment at which
        the GPU had done all that was launched before it."""
        launched = self._in_order()
        if not launched:
            return []
        moments, _, ends = zip(*launched, strict=True)
        found = []
        for begin, end, name in labels:
            first, last = bisect_left(moments, begin), bisect_right(moments, end)
            done = max(begin, ends[first - 1]) if first else begin
            ran = (launched[first][1], ends[last - 1]) if last > first else (done, done)
            found.append((*ran, name))
        return sorted(found, key=lambda label: (label[0], -label[1]))

    def _in_order(self) -> list[tuple[float, float, float]]:
        """(launch, begin, end) of the kernels of the stream that has most of them."""
        if not self._kernels:
            return []
        kernels = max(self._kernels.values(), key=lambda columns: len(columns[0]))
        return sorted((self.launches[correlation][1], begin, end)
                      for correlation, begin, end in zip(*kernels, strict=True)
                      if correlation in self.launches)

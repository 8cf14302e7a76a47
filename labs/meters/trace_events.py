"""Makes a `Trace` of the events of a file that torch.profiler wrote.

How the two backends look in such a file, and how they are read:

- The call of a collective is a CPU operation `c10d::...` on the thread that issued it.
- gloo runs it on a thread of its own: a user annotation `gloo:...` lasts while it is in flight.
- A slow link (`labs.workers.slow_link`) holds it longer than gloo: then the annotation `link:...`
  lasts while it is in flight, and gloo's says nothing more.
- NCCL runs it as a kernel `nccl...`. The annotations `nccl:...` last only while the kernel is
  launched, so they are ignored.
- Computing is what the other threads' `aten::` operations do; on a GPU, what its kernels do.
"""

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict

from labs.meters.trace import KINDS, Collective, Span, Trace, union
from labs.workers import slow_link

GAP = 5e-4  # seconds: a shorter pause between two operations is Python's, and counts as computing
_READS = ("aten::item", "aten::_local_scalar_dense")  # may wait for what they read: no computing
_LABELS = ("labs::", "FSDP::", "enumerate(DataLoader)")
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "longint": 8, "long": 8, "int": 4,
          "short": 2, "char": 1, "signedchar": 1, "unsignedchar": 1, "byte": 1, "bool": 1}


def kind_of(name: str) -> str:
    """Returns the one of KINDS that a name means, in any layer's spelling; "" if it means none."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for kind in KINDS if kind.replace("_", "") in letters), "")


class TraceBuilder:
    """Makes a `Trace` of a file's events and keeps only what it needs of them. Its seconds are
    those of the profiler's clock."""

    def __init__(self):
        self.calls = []  # of collectives: (moment, kind, thread, size)
        self.flights = []  # of collectives: (begin, end, name, kind, size)
        self.labels, self.items = [], []  # (begin, end, name)
        self.busy = defaultdict(list)  # thread, or "gpu" -> intervals
        self.gloo_threads = set()
        self.frames = _Frames()
        self.first, self.last = float("inf"), 0.0

    def add(self, event: dict) -> None:
        """Takes in one complete event."""
        category, name = event.get("cat"), event.get("name", "")
        begin = event["ts"] / 1e6
        end = begin + event.get("dur", 0) / 1e6
        if category == "python_function":
            self.frames.add(name, event["tid"], begin, end)
        elif category == "cpu_op":
            self._operation(event, name, begin, end)
        elif category == "user_annotation" and name.startswith("gloo:"):
            self.gloo_threads.add(event["tid"])
            self._flight(event, name, name, begin, end)
        elif category == "user_annotation" and name.startswith(slow_link.LABEL):
            name, *size = slow_link.read_label(name)
            self.flights.append((begin, end, name, kind_of(name), tuple(size)))
        elif category == "user_annotation" and name.startswith(_LABELS):
            self.labels.append((begin, end, name))
        elif category == "kernel" and name.startswith("nccl"):
            called = event.get("args", {}).get("Collective name", name)
            self._flight(event, name, called, begin, end)
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self._compute("gpu", begin, end)
        elif category != "user_annotation":
            return
        self.first, self.last = min(self.first, begin), max(self.last, end)

    def _operation(self, event, name, begin, end):
        if name.startswith("c10d::"):
            self.calls.append((begin, kind_of(name), event["tid"], _size(event.get("args", {}))))
        elif name.startswith("aten::"):
            if name == "aten::item":
                self.items.append((begin, end, name))
            if name not in _READS:
                self._compute(event["tid"], begin, end)

    def _flight(self, event, name, called, begin, end):
        self.flights.append((begin, end, name, kind_of(called), _size(event.get("args", {}))))

    def _compute(self, where, begin, end):
        """Merges at once, since most operations are nested in others: a list of all would grow with
        the file."""
        intervals = self.busy[where]
        if intervals and intervals[-1][0] <= begin <= intervals[-1][1] + GAP:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], end))
        else:
            intervals.append((begin, end))

    def trace(self, information: dict, path: str) -> Trace:
        """Returns the trace of all events. information: the file's distributedInfo."""
        start = min((begin for begin, _, name in self.labels if name.startswith("labs::")),
                    default=self.first)
        # gloo's threads call aten operations too, to reduce and to copy: that is communication.
        threads = ["gpu"] if "gpu" in self.busy else set(self.busy) - self.gloo_threads
        compute = union((Span("", "", begin - start, end - start) for thread in threads
                         for begin, end in self.busy[thread]), gap=GAP)
        labels, items = ([Span(name, category, begin - start, end - start) for begin, end, name in
                          found] for found, category in ((self.labels, "label"),
                                                         (self.items, "item")))
        return Trace(
            information.get("rank", 0),
            "nccl" if any(name.startswith("nccl") for _, _, name, *_ in self.flights) else "gloo",
            tuple(one for one in self._collectives(start) if one.issued >= 0),
            tuple((begin, end) for begin, end in compute if end > 0),
            tuple(sorted(labels, key=lambda label: (label.begin, -label.end))),
            tuple(item for item in items if item.begin >= 0), start, path, self.last - start)

    def _collectives(self, start) -> list[Collective]:
        """Joins each flight with its call: the earliest of its kind that has no flight yet, since a
        backend runs collectives in the order in which they were issued."""
        waiting, joined = sorted(self.calls, key=lambda call: call[:2]), []
        stacks = self.frames.enclosing({(thread, at) for at, _, thread, _ in waiting})
        for begin, end, name, kind, size in sorted(self._last_on_the_way()):
            # gloo has no reduce-scatter: it runs an all-reduce, and says so in the annotation.
            kinds = (kind, "reduce_scatter") if name == "gloo:all_reduce" else (kind,)
            call = next((one for one in waiting if one[1] in kinds and one[0] <= begin), None)
            issued, stack = begin, ()
            if call:
                waiting.remove(call)
                issued, kind, thread, called = call
                size, stack = max(size, called), stacks[thread, issued]
            joined.append(Collective(name, "communication", begin - start, end - start,
                                     kind or name, issued - start, *size, stack))
        return sorted(joined, key=lambda one: one.issued)

    def _last_on_the_way(self) -> list[tuple]:
        """The flights without those of gloo that a slow link went on with. Sends and receives do
        not pass that link."""
        on_link = any(name.startswith(slow_link.LABEL) for _, _, name, *_ in self.flights)
        return [flight for flight in self.flights if not on_link
                or not flight[2].startswith("gloo:") or flight[2] in ("gloo:send", "gloo:recv")]


class _Frames:
    """The Python functions of a trace in arrays: with stacks there are hundreds of thousands."""

    def __init__(self):
        self.threads = defaultdict(lambda: (array("d"), array("d"), array("L")))
        self.numbers = {}

    def add(self, name, thread, begin, end):
        number = self.numbers.setdefault(name, len(self.numbers))
        for column, value in zip(self.threads[thread], (begin, end, number), strict=True):
            column.append(value)

    def enclosing(self, calls) -> dict[tuple, tuple[str, ...]]:
        """Returns for each call (thread, moment) the functions that ran then, outermost first."""
        names, found = list(self.numbers), defaultdict(list)
        for thread in {thread for thread, _ in calls}:
            moments = sorted(moment for where, moment in calls if where == thread)
            for begin, end, number in zip(*self.threads[thread], strict=True):
                for at in range(bisect_left(moments, begin), bisect_right(moments, end)):
                    found[thread, moments[at]].append((begin, -end, names[number]))
        return {call: tuple(name for _, _, name in sorted(found[call])) for call in calls}


def _size(arguments) -> tuple[int, int]:
    """Returns (elements, bytes) of the whole tensor: the larger of input and output."""
    if "In msg nelems" in arguments:  # NCCL's kernels
        elements = max(arguments["In msg nelems"], arguments.get("Out msg nelems", 0))
        return elements, elements * _width(arguments.get("dtype", ""))
    sizes = [(_elements(dims), _width(dtype)) for dims, dtype in
             zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=False)
             if dims or _width(dtype)]  # a tensor without dimensions has a dtype, other values not
    elements = max((count for count, _ in sizes), default=0)
    return elements, elements * max((width for _, width in sizes), default=0)


def _elements(dims) -> int:
    """Returns the elements of a tensor, or of a list of tensors together."""
    if dims and isinstance(dims[0], list):
        return sum(map(_elements, dims))
    return math.prod(dims)


def _width(dtype) -> int:
    """Returns the bytes of one element; 0 for what is not a tensor's dtype."""
    if isinstance(dtype, list):
        return max(map(_width, dtype), default=0)
    name = str(dtype).lower().removeprefix("c10::").replace(" ", "")
    return 1 if name.startswith("float8") else _BYTES.get(name, 0)

"""Makes a `Trace` of the events of a file that torch.profiler wrote.

How the two backends look in such a file, and how they are read:

- The call of a collective is a CPU operation `c10d::...` on the thread that issued it.
- gloo runs it on a thread of its own: a user annotation `gloo:...` lasts while it is in flight.
- A slow link (`labs.workers.slow_link`) holds it longer than gloo: then the annotation `link:...`
  lasts while it is in flight, and gloo's says nothing more.
- NCCL runs it as a kernel `nccl...`, which waits for the other ranks while it runs. Its kind and
  size stand in its arguments, or in those of `record_param_comms` and `nccl:...`, which last while
  it is launched: torch 1.x writes no arguments, and calls a kernel of many kinds SendRecv.
- Computing is what the other threads' `aten::` operations do, copies among them; on a GPU, what its
  other kernels, copies and fills do (`labs.meters.trace_gpu`). HolisticTraceAnalysis leaves copies
  and fills out, and so finds 0 to 0.8 % less of communication overlapped in seven real traces.
"""

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import NamedTuple

from labs.meters.trace import KINDS, Collective, Interval, Span, Trace, union
from labs.meters.trace_gpu import GpuWork
from labs.workers import slow_link

GAP = 5e-4  # seconds: a shorter pause between two of a CPU's operations is Python's: computing
_DEEPEST = 12  # layers of calls, and calls that have just ended, before a launch on its thread
_READS = ("aten::item", "aten::_local_scalar_dense")  # may wait for what they read: no computing
_LABELS = ("labs::", "FSDP::", "enumerate(DataLoader)")
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "longint": 8, "long": 8, "int": 4,
          "short": 2, "char": 1, "signedchar": 1, "unsignedchar": 1, "byte": 1, "bool": 1}


def kind_of(name: str) -> str:
    """Returns the one of KINDS that a name means, or all_to_all or broadcast, in any layer's
    spelling; "" if it means none."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for kind in (*KINDS, "all_to_all", "broadcast")
                 if kind.replace("_", "") in letters), "")


def kernel_name(name: str) -> str:
    """Returns the name of one of NCCL's kernels without its algorithm and arguments, such as
    ncclDevKernel_SendRecv; another name as it is."""
    return "_".join(name.partition("(")[0].split("_")[:2]) if name.startswith("nccl") else name


class _Call(NamedTuple):
    """A layer of the call of a collective: torch's operation, what describes it to the profiler, or
    NCCL's annotation. size: (elements, bytes)."""

    begin: float
    kind: str
    thread: int
    size: tuple[int, int]
    end: float
    ranks: int
    is_operation: bool


class _Flight(NamedTuple):
    """A collective in flight. correlation: the number of its kernel's launch, 0 without one."""

    begin: float
    end: float
    name: str
    kind: str
    size: tuple[int, int]
    ranks: int = 0
    correlation: int = 0


class TraceBuilder:
    """Makes a `Trace` of a file's events and keeps only what it needs of them. Its seconds are
    those of the profiler's clock, less `origin`: since 1970 they would have no microseconds."""

    def __init__(self):
        self.calls: list[_Call] = []
        self.flights: list[_Flight] = []
        self.labels, self.items = [], []  # (begin, end, name)
        self.busy = defaultdict(list)  # thread -> intervals
        self.gloo_threads = set()
        self.gpu = GpuWork()
        self.frames = _Frames()
        self.origin, self.first, self.last = None, float("inf"), float("-inf")

    def add(self, event: dict) -> None:
        """Takes in one complete event."""
        if self.origin is None:
            self.origin = event["ts"] // 1e6
        begin = (event["ts"] - 1e6 * self.origin) / 1e6
        end = begin + event.get("dur", 0) / 1e6
        if self._takes(event, event.get("cat"), event.get("name", ""), begin, end):
            self.first, self.last = min(self.first, begin), max(self.last, end)

    def _takes(self, event, category, name, begin, end) -> bool:
        """Takes in one event; whether it is one that the program or its device ran."""
        if category == "python_function":
            self.frames.add(name, event["tid"], begin, end)
        elif category == "cpu_op":
            self._operation(event, name, begin, end)
        elif category == "user_annotation":
            self._annotation(event, name, begin, end)
        elif category in ("cuda_runtime", "cuda_driver"):
            self.gpu.launch(event, name, begin)
            return False  # the profiler's own calls come after the program's end
        elif category == "kernel" and name.startswith("nccl"):
            arguments = event.get("args", {})
            self.flights.append(_Flight(
                begin, end, name, kind_of(arguments.get("Collective name", name)),
                _size(arguments), arguments.get("Group size", 0),
                arguments.get("correlation", 0)))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self.gpu.add(event, begin, end)
        else:
            return False
        return True

    def _operation(self, event, name, begin, end):
        if name.startswith(("c10d::", "record_param_comms")):
            self._call(event, name, begin, end)
        elif name.startswith("aten::"):
            if name == "aten::item":
                self.items.append((begin, end, name))
            if name not in _READS:
                self._compute(event["tid"], begin, end)

    def _annotation(self, event, name, begin, end):
        if name.startswith("gloo:"):
            self.gloo_threads.add(event["tid"])
            self.flights.append(_Flight(begin, end, name, kind_of(name),
                                        _size(event.get("args", {}))))
        elif name.startswith("nccl:"):
            self._call(event, name, begin, end)
        elif name.startswith(slow_link.LABEL):
            name, *size = slow_link.read_label(name)
            self.flights.append(_Flight(begin, end, name, kind_of(name), tuple(size)))
        elif name.startswith(_LABELS):
            self.labels.append((begin, end, name))

    def _call(self, event, name, begin, end):
        arguments = event.get("args", {})
        self.calls.append(_Call(
            begin, kind_of(arguments.get("Collective name", name)), event["tid"], _size(arguments),
            end, arguments.get("Group size", 0), name.startswith("c10d::")))

    def _compute(self, thread, begin, end):
        """Merges at once, since most operations are nested in others: a list of all would grow with
        the file."""
        intervals = self.busy[thread]
        # GAP: between two operations the thread runs Python, which computes for the step as well.
        if intervals and intervals[-1][0] <= begin <= intervals[-1][1] + GAP:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], end))
        else:
            intervals.append((begin, end))

    def trace(self, information: dict, path: str) -> Trace:
        """Returns the trace of all events. information: the file's distributedInfo."""
        start = min((begin for begin, _, name in self.labels if name.startswith("labs::")),
                    default=self.first)
        labels, items = (_spans(found, category, start) for found, category in
                         ((self.labels, "label"), (self.items, "item")))
        return Trace(
            information.get("rank", 0),
            "nccl" if any(one.name.startswith("nccl") for one in self.flights) else "gloo",
            tuple(one for one in self._collectives(start) if one.issued >= 0),
            tuple((begin, end) for begin, end in self._computing(start) if end > 0),
            tuple(sorted(labels, key=_by_begin)),
            tuple(item for item in items if item.begin >= 0), self.origin + start, path,
            _spans(self.gpu.executed(self.labels), "label", start), self.last - start)

    def _computing(self, start) -> list[Interval]:
        if self.gpu.intervals:  # without pauses: a GPU computes in its kernels alone
            return union(Span("", "", begin - start, end - start)
                         for begin, end in self.gpu.intervals)
        # gloo's threads call aten operations too, to reduce and to copy: that is communication.
        return union((Span("", "", begin - start, end - start)
                      for thread in set(self.busy) - self.gloo_threads
                      for begin, end in self.busy[thread]), gap=GAP)

    def _collectives(self, start) -> list[Collective]:
        """Joins each flight with its call."""
        waiting = sorted(call for call in self.calls if call.is_operation)
        stacks = self.frames.enclosing({(call.thread, call.begin) for call in self.calls})
        launching, joined = _Launching(self.calls), []
        for flight in sorted(self._last_on_the_way()):
            if flight.correlation and self.gpu.launches:
                layers = launching.layers(self.gpu.launches.get(flight.correlation))
            else:
                layers = _next_call(waiting, flight)
            joined.append(_joined(flight, layers, stacks, start))
        return sorted(joined, key=lambda one: one.issued)

    def _last_on_the_way(self) -> list[_Flight]:
        """The flights without those of gloo that a slow link continued with. Sends and receives do
        not pass that link."""
        on_link = any(one.name.startswith(slow_link.LABEL) for one in self.flights)
        return [one for one in self.flights if not on_link
                or not one.name.startswith("gloo:") or one.name in ("gloo:send", "gloo:recv")]


def _spans(found, category, start) -> tuple[Span, ...]:
    return tuple(Span(name, category, begin - start, end - start) for begin, end, name in found)


def _by_begin(label) -> tuple[float, float]:
    return label.begin, -label.end


class _Launching:
    """The layers of all calls by thread, to find those that were open when a kernel was
    launched."""

    def __init__(self, calls):
        self._calls = defaultdict(list)
        for call in sorted(calls):
            self._calls[call.thread].append(call)

    def layers(self, launch) -> list[_Call]:
        """The layers that enclose a launch (thread, moment), outermost first; none for a kernel
        whose launch was not recorded, as before the recording or from a CUDA graph."""
        if launch is None:
            return []
        thread, moment = launch
        calls = self._calls[thread]
        at = bisect_right(calls, moment, key=lambda call: call.begin)
        return [call for call in calls[max(0, at - _DEEPEST):at] if moment <= call.end]


def _next_call(waiting, flight) -> list[_Call]:
    """The earliest call of the flight's kind that has no flight yet, since a backend runs
    collectives in the order in which they were issued."""
    # gloo has no reduce-scatter: it runs an all-reduce, and says so in the annotation.
    kinds = (flight.kind, *(["reduce_scatter"] if flight.name == "gloo:all_reduce" else []))
    call = next((one for one in waiting if one.kind in kinds and one.begin <= flight.begin), None)
    if call is None:
        return []
    waiting.remove(call)
    return [call]


def _joined(flight, layers, stacks, start) -> Collective:
    outermost = layers[0] if layers else None
    # the call first: a kernel called SendRecv may be anything; and gloo's may be a reduce-scatter
    kind = next((one.kind for one in (*layers, flight) if one.kind), kernel_name(flight.name))
    issued = outermost.begin if outermost else flight.begin
    return Collective(
        flight.name, "communication", flight.begin - start, flight.end - start, kind,
        issued - start, *max(one.size for one in (flight, *layers)),
        stacks[outermost.thread, issued] if outermost else (),
        max(one.ranks for one in (flight, *layers)))


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
    """Returns (elements, bytes) of the full tensor: the larger of input and output."""
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

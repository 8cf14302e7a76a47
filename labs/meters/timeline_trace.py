"""One rank's trace: its collectives, its computing and the labels around them, for gloo and NCCL.

On a CPU the spans of communication are those of gloo's threads, and computing is what the rank's
own thread does; on a GPU both are kernels. The call itself, `c10d::...`, stands on the CPU in both.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from labs.meters.timeline import Span, length, minus, union
from labs.meters.timeline_file import TraceError, read_events

GAP = 5e-4  # seconds between two operations that are Python's, and count as computing
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "longint": 8, "long": 8, "int": 4,
          "short": 2, "char": 1, "signedchar": 1, "unsignedchar": 1, "byte": 1, "bool": 1}
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LABELS = ("labs::", "FSDP::", "enumerate(DataLoader)", "ProfilerStep")


@dataclass(frozen=True)
class Collective(Span):
    """A collective while it was under way. kind: all_gather, reduce_scatter, all_reduce or another.
    issued: when it was called, in seconds. elements, bytes: of the whole tensor, on all ranks
    together (0 where shapes were not recorded). stack: the Python functions that led to the call,
    outermost first, as "file(line of its def): function"; empty without with_stack."""

    kind: str = ""
    issued: float = 0.0
    elements: int = 0
    bytes: int = 0
    stack: tuple = ()


@dataclass(frozen=True)
class Trace:
    """What one rank did. Times are seconds since `started`, when the first recorded step began.

    collectives: in the order in which they were issued. compute: disjoint (begin, end) in which the
    rank computed. labels: named stretches of the program (labs::forward, FSDP::all_gather (unit)).
    items: calls of `.item()`. path: the file.
    """

    rank: int
    backend: str
    collectives: tuple
    compute: tuple
    labels: tuple
    items: tuple = ()
    started: float = 0.0
    path: str = ""
    ends: float = field(default=0.0, repr=False)

    def of(self, *kinds) -> list:
        """The collectives of these kinds."""
        return [one for one in self.collectives if one.kind in kinds]

    def labelled(self, beginning: str) -> list:
        """The labels whose name begins so."""
        return [label for label in self.labels if label.name.startswith(beginning)]

    def around(self, moment: float, beginning: str = "") -> list:
        """The labels that begin so and that `moment` (seconds) lies in, outermost first."""
        return [label for label in self.labels
                if label.begin <= moment <= label.end and label.name.startswith(beginning)]

    @property
    def steps(self) -> list:
        return self.labelled("labs::step")

    @property
    def seconds(self) -> float:
        """What the recorded steps took together."""
        return sum(step.seconds for step in self.steps) or self.ends

    @property
    def exposed(self) -> list:
        """(begin, end) in which a collective was under way and this rank did not compute."""
        return minus(union(self.collectives), self.compute)

    def seconds_of(self, *kinds) -> dict:
        """Seconds in which a collective of these kinds was under way: "total", of which "exposed"
        (the rank only waited) and "overlapped" (it computed meanwhile)."""
        under_way = union(self.of(*kinds) if kinds else self.collectives)
        exposed = length(minus(under_way, self.compute))
        total = length(under_way)
        return {"total": total, "exposed": exposed, "overlapped": total - exposed}

    def __repr__(self):
        counts = ", ".join(f"{len(self.of(kind))} {kind}" for kind in KINDS if self.of(kind))
        count = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        return (f"rank {self.rank} ({self.backend}): {count} of "
                f"{1e3 * self.seconds / max(1, len(self.steps)):.0f} ms; {counts}")


def load(path) -> Trace:
    """The trace in a file that torch.profiler exported (.json or .json.gz); memory stays bounded
    by what is kept, however large the file. Raises TraceError, FileNotFoundError."""
    found, header = _Found(), {}
    for event in read_events(path, header):
        if event.get("ph") == "X" and "ts" in event:
            found.add(event)
    if not found.seen:
        raise TraceError(f"{path} holds no operation that torch.profiler recorded")
    return found.trace(header.get("distributedInfo", {}), str(path))


def kind_of(name: str) -> str:
    """all_gather, reduce_scatter or all_reduce, from the name that any layer gives it; "" for what
    is no collective of data."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for kind in KINDS if kind.replace("_", "") in letters), "")


class _Found:
    """What is kept of a trace while it is read. Seconds are absolute here."""

    def __init__(self):
        self.seen = 0
        self.issues, self.flights, self.labels, self.items = [], [], [], []
        self.busy = defaultdict(list)  # thread, or "gpu" -> stretches, nested ones left out
        self.gloo_threads = set()
        self.frames = _Frames()
        self.first, self.last = float("inf"), 0.0

    def add(self, event):
        """Sorts one complete event in, or forgets it."""
        category, name = event.get("cat"), event.get("name", "")
        begin = event["ts"] / 1e6
        end = begin + event.get("dur", 0) / 1e6
        if category == "python_function":
            self.frames.add(name, event["tid"], begin, end)
        elif category == "cpu_op":
            self._operation(event, name, begin, end)
        elif category in _DEVICE:
            self._device(event, name, begin, end)
        elif category == "user_annotation":
            self._annotation(event, name, begin, end)
        else:
            return
        self.seen += 1
        self.first, self.last = min(self.first, begin), max(self.last, end)

    def _operation(self, event, name, begin, end):
        if name.startswith("c10d::"):
            self.issues.append((begin, kind_of(name), event["tid"], _size(event.get("args", {}))))
        elif name.startswith("aten::"):
            self._busy(event["tid"], begin, end)
            if name == "aten::item":
                self.items.append(Span(name, "item", begin, end))

    def _busy(self, where, begin, end):
        stretches = self.busy[where]
        if stretches and stretches[-1][0] <= begin <= stretches[-1][1] + GAP:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], end))
        else:
            stretches.append((begin, end))

    def _device(self, event, name, begin, end):
        arguments = event.get("args", {})
        if name.startswith("nccl"):
            called = arguments.get("Collective name", name)
            self.flights.append((begin, end, name, kind_of(called), _size(arguments)))
        else:
            self._busy("gpu", begin, end)

    def _annotation(self, event, name, begin, end):
        if name.startswith("gloo:"):
            self.gloo_threads.add(event["tid"])
            self.flights.append((begin, end, name, kind_of(name), _size(event.get("args", {}))))
        elif name.startswith(_LABELS):
            self.labels.append(Span(name, "label", begin, end))

    def trace(self, information, path) -> Trace:
        begins = [label.begin for label in self.labels if label.name.startswith("labs::")]
        start = min(begins, default=self.first)
        threads = ["gpu"] if "gpu" in self.busy else set(self.busy) - self.gloo_threads
        compute = union([Span("", "", *pair) for thread in threads for pair in self.busy[thread]],
                        gap=GAP)
        return Trace(
            information.get("rank", 0), "nccl" if "gpu" in self.busy else "gloo",
            tuple(_moved(one, start) for one in self._collectives() if one.issued >= start),
            tuple((begin - start, end - start) for begin, end in compute if end > start),
            tuple(sorted((_moved(label, start) for label in self.labels),
                         key=lambda label: (label.begin, -label.end))),
            tuple(_moved(item, start) for item in self.items if item.begin >= start),
            start, path, self.last - start)

    def _collectives(self) -> list:
        """Each flight with the call that it belongs to: the earliest of its kind that has none yet.
        gloo does the work of a reduce-scatter by an all-reduce, and says all_reduce."""
        waiting, made = sorted(self.issues, key=lambda issue: issue[:2]), []
        stacks = self.frames.around({(thread, at) for at, _, thread, _ in waiting})
        for begin, end, name, kind, size in sorted(self.flights):
            fits = (kind, "reduce_scatter") if name == "gloo:all_reduce" else (kind,)
            issue = next((one for one in waiting if one[1] in fits and one[0] <= begin), None)
            if issue is None:
                made.append(Collective(name, "communication", begin, end, kind or name, begin,
                                       *size))
                continue
            waiting.remove(issue)
            at, kind, thread, called = issue
            made.append(Collective(name, "communication", begin, end, kind or name, at,
                                   *max(size, called), stacks[thread, at]))
        return sorted(made, key=lambda one: one.issued)


class _Frames:
    """Python functions, in few bytes each: a trace with stacks has hundreds of thousands."""

    def __init__(self):
        self.threads = defaultdict(lambda: (array("d"), array("d"), array("L")))
        self.numbers = {}

    def add(self, name, thread, begin, end):
        number = self.numbers.setdefault(name, len(self.numbers))
        for column, value in zip(self.threads[thread], (begin, end, number), strict=True):
            column.append(value)

    def around(self, calls) -> dict:
        """calls: (thread, moment). For each the functions that were running, outermost first."""
        names, found = list(self.numbers), defaultdict(list)
        for thread in {thread for thread, _ in calls}:
            moments = sorted(moment for where, moment in calls if where == thread)
            for begin, end, number in zip(*self.threads[thread], strict=True):
                for at in range(bisect_left(moments, begin), bisect_right(moments, end)):
                    found[thread, moments[at]].append((begin, -end, names[number]))
        return {call: tuple(name for _, _, name in sorted(found[call])) for call in calls}


def _moved(span, start):
    """The same with its times counted from `start`."""
    changed = {"begin": span.begin - start, "end": span.end - start}
    if isinstance(span, Collective):
        changed["issued"] = span.issued - start
    return type(span)(**{**vars(span), **changed})


def _size(arguments) -> tuple:
    """(elements, bytes) of the whole tensor: the larger of what goes in and what comes out."""
    if "In msg nelems" in arguments:
        elements = max(arguments["In msg nelems"], arguments.get("Out msg nelems", 0))
        return elements, elements * _width(arguments.get("dtype", ""))
    types = arguments.get("Input type", [])
    sizes = [(_product(dims) if dims or not _width(kind) else 1, _width(kind)) for dims, kind in
             zip(arguments.get("Input Dims", []), types, strict=False)]  # no dims: a number
    elements = max((count for count, _ in sizes), default=0)
    return elements, elements * max((width for _, width in sizes), default=0)


def _product(dims) -> int:
    if dims and isinstance(dims[0], list):
        return sum(_product(one) for one in dims)
    count = 1 if dims else 0
    for size in dims:
        count *= size
    return count


def _width(kind) -> int:
    if isinstance(kind, list):
        return max(map(_width, kind), default=0)
    name = str(kind).lower().removeprefix("c10::").replace(" ", "")
    return 1 if name.startswith("float8") else _BYTES.get(name, 0)

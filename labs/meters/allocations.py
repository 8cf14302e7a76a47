"""The allocations of this rank's device in a profile of torch, each followed until it is freed."""

from bisect import bisect_right
from dataclasses import dataclass

from torch.profiler import profile

from labs.workers import devices

_MEMORY = "[memory]"  # torch's name of an allocation, and of its end
COMPARES_SHAPES = "labs::shapes"  # a span: DDP compares the shapes of the ranks' parameters
_IN_BACKEND = ("c10d::", COMPARES_SHAPES)
MARK = "labs::mark "  # a span of this name and a number begins at a mark
Change = tuple[int, int, int, tuple[str, ...]]  # nanoseconds, address, bytes (freed: < 0), spans


@dataclass
class Allocation:
    """One allocation: its address, its bytes, and when it was allocated and freed (nanoseconds).
    spans: names of what was running then, from the outermost."""

    address: int
    nbytes: int
    begin: int
    spans: tuple
    end: int = 2**63
    missed: bool = True  # its end was not reported: it is still held, or another thread freed it
    category: str = ""
    is_workspace: bool = False


def read_profile(recorded: profile) -> tuple[list[Change], list[int]]:
    """Returns what was allocated and freed on this rank's device, from the outermost spans on, and
    the times of the marks. recorded: a profile with profile_memory."""
    device = devices.device()
    # Private: the event tree has the spans around each allocation, which the public averages lack.
    tree = recorded.profiler.kineto_results.experimental_event_tree()
    changes, times, todo = [], {}, [(event, ()) for event in tree]
    while todo:
        event, spans = todo.pop()
        name, children = event.name, event.children  # each asks C++ again
        if name == _MEMORY and "Allocation" in str(event.tag):
            fields = event.extra_fields
            if fields.device == device:  # with a GPU the host's allocations are reported too
                changes.append((event.start_time_ns, fields.ptr, fields.alloc_size, spans))
        elif name.startswith(MARK):
            times[int(name.removeprefix(MARK))] = event.start_time_ns
        if children:
            inside = (*spans, name)
            todo += [(child, inside) for child in children]
    changes.sort(key=lambda change: change[0])
    return changes, [times[number] for number in sorted(times)]


def follow(changes: list[Change]) -> list[Allocation]:
    """Each allocation until it is freed, or until its address is used again."""
    allocations, live = [], {}
    for time, address, nbytes, spans in changes:
        if nbytes > 0:
            # An address is used again only when its memory was freed.
            if address in live:  # the profiler missed its end
                live[address].end = time
            live[address] = Allocation(address, nbytes, time, spans)
            allocations.append(live[address])
        elif address in live:
            live[address].missed = False
            live.pop(address).end = time
    return allocations


def end_temporaries(allocations: list[Allocation], marks: list[int], kept: set[int]) -> None:
    """Ends, at the next of the marks (nanoseconds), temporaries whose end the profiler misses when
    gloo's thread frees them:

    - flat copies in which DDP broadcasts a model's state,
    - what a backend allocates inside a collective, such as gloo's copy of what it reduce-scatters;
      inside `wait_tensor` C++ drops the collective itself, so no pause after the wait helps,
    - the shapes that DDP compares when it is built.

    kept: addresses found at some mark. What DeepSpeed lays flat is among them and stays.
    """
    for allocation in allocations:
        in_backend = allocation.missed and any(s.startswith(_IN_BACKEND) for s in allocation.spans)
        flat = "aten::flatten_dense_tensors" in allocation.spans
        if (flat or in_backend) and allocation.address not in kept:
            after = bisect_right(marks, allocation.begin)
            allocation.end = min([allocation.end, *marks[after:after + 1]])

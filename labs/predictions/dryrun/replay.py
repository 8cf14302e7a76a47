"""From a trace's events to bytes by category: at each mark, and at the peak of each segment."""

from labs.training.memory_categories import Memory

PHASES = ("build", "first", "forward", "backward", "step", "end")
_FIELDS = {"parameters": 0, "gradients": 1, "optimizer state": 2, "activations": 3, "buffers": 4,
           "other": 5}


def segments(events: list[tuple], labels: dict[int, str]) -> list[tuple]:
    """[(phase, mark, bytes by category when it begins, bytes by category at its peak)].

    A segment runs from one mark to the next; a mark is (phase, "start") or ("block", index).
    """
    held, phase, found, best = [0] * 6, "build", [], -1
    for key, value in events:
        if key is None:
            phase = value[0] if value[0] in PHASES else phase
            best = sum(held)
            found.append([phase, value, tuple(held), tuple(held)])
            continue
        held[_FIELDS[labels.get(key) or "activations"]] += value
        total = sum(held)
        if total > best:
            best, found[-1][3] = total, tuple(held)
    return [tuple(segment) for segment in found]


def peak(found: list[tuple], *phases: str) -> Memory:
    """The highest moment of these phases."""
    return Memory(*max((s[3] for s in found if s[0] in phases), key=sum))


def resident(found: list[tuple], phase: str) -> Memory:
    """Bytes when this phase begins, for the last time where it does so several times."""
    return Memory(*[s[2] for s in found if s[1] == (phase, "start")][-1])

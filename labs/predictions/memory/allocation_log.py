"""What one rank has allocated through a training step, by category, and the peak."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from labs.training.memory_categories import Memory


@dataclass(frozen=True)
class Change:
    """What a segment of a step does to a rank's memory, in bytes by category.

    net: allocated at the end of the segment minus at its begin. highest: allocated at its peak
    minus at its begin.
    """

    net: dict[str, float]
    highest: dict[str, float]


def change_of(activations: np.ndarray, gradients: np.ndarray, scratch: np.ndarray,
              keep_gradients: bool = True) -> Change:
    """The change that a series of events makes, each given by the bytes that it allocates or,
    negative, frees. scratch: bytes that an event allocates and frees at once. keep_gradients:
    whether gradients stay allocated, or are freed at once too."""
    if not len(activations):
        return Change({}, {})
    held = {"activations": np.cumsum(activations) + scratch,
            "gradients": np.cumsum(gradients) if keep_gradients else gradients}
    # One moment for all categories: the highest total, not the highest of each.
    most = int(np.argmax(held["activations"] + held["gradients"]))
    net = {"activations": activations.sum(),
           "gradients": gradients.sum() if keep_gradients else 0.0}
    return Change(net, {category: series[most] for category, series in held.items()})


class AllocationLog:
    """What is allocated now, by category, and the peak of the total. All in bytes."""

    def __init__(self):
        self._now = Counter()
        self._named = {}
        self._total = 0
        self._most, self._at_most = 0, {}

    def allocate(self, name, size: float, category: str = "buffers") -> None:
        """Allocates a tensor that is freed by its name later."""
        self._named[name] = (size, category)
        self.add(**{category: size})

    def free(self, *names) -> None:
        """Frees those of these tensors that are allocated."""
        for name in names:
            size, category = self._named.pop(name, (0, "other"))
            self.add(**{category: -size})

    def holds(self, name) -> bool:
        """Whether a tensor of this name is allocated."""
        return name in self._named

    def held(self, category: str) -> float:
        """Bytes of a category that are allocated now."""
        return self._now[category]

    def add(self, **sizes: float) -> None:
        """Adds bytes to categories; negative ones take them away."""
        for category, size in sizes.items():
            self._now[category] += size
            self._total += size
        if self._total > self._most:
            self._most, self._at_most = self._total, dict(self._now)

    def temporary(self, size: float, category: str = "buffers") -> None:
        """Allocates and frees at once, so that only the peak sees it."""
        self.add(**{category: size})
        self.add(**{category: -size})

    def apply(self, change: Change) -> None:
        """Adds what a segment allocates and frees, with its peak."""
        highest = self._total + sum(change.highest.values())
        if highest > self._most:
            self._most, self._at_most = highest, _sum(self._now, change.highest)
        self.add(**change.net)

    def snapshot(self) -> Memory:
        """What is allocated now."""
        return _memory(self._now)

    def start_peak(self) -> None:
        """Forgets the peak so far."""
        self._most, self._at_most = self._total, dict(self._now)

    @property
    def peak(self) -> Memory:
        """What was allocated at the peak."""
        return _memory(self._at_most)


def _sum(held, more) -> dict:
    return {category: held.get(category, 0) + more.get(category, 0) for category in {*held, *more}}


def _memory(held) -> Memory:
    return Memory(**{category: round(size) for category, size in held.items()})

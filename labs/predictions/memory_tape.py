"""A tape of what comes and goes in a training step: names, bytes and category, no tensors."""

from collections import Counter

from labs.training.memory_categories import Memory


class Tape:
    """What is held now, by category, and the most that was ever held at once.

    `make` and `free` take tensors of the moment, `keep` and `release` what a unit's forward saves
    for its backward. `gradient` is called with the elements of each parameter's gradient when
    autograd makes it; the strategy decides what becomes of it.
    """

    def __init__(self):
        self.now = Counter()
        self.live = {}
        self.total = 0
        self.most, self._at_most = 0, {}
        self.gradient = None

    def make(self, category="activations", **tensors):
        """Allocates tensors: name=bytes."""
        for name, size in tensors.items():
            self._start(name, size, category)

    def free(self, *names):
        """Frees tensors by name; one that is not there is a mistake in a formula: KeyError."""
        for name in names:
            size, category = self.live.pop(name)
            self.now[category] -= size
            self.total -= size

    def drop(self, *names):
        """Frees those of these tensors that are there."""
        self.free(*(name for name in names if name in self.live))

    def keep(self, unit, **tensors):
        """Allocates what `unit` saves for backward: name=bytes."""
        for name, size in tensors.items():
            self._start((unit, name), size, "activations")

    def release(self, unit, *names):
        """Frees what `unit` saved."""
        self.free(*((unit, name) for name in names))

    def rename(self, old, new):
        """The same tensor under another name; as (unit, name) it is saved for backward."""
        self.live[new] = self.live.pop(old)

    def add(self, **sizes):
        """Adds bytes that stay to categories; negative ones take them away."""
        for category, size in sizes.items():
            self.now[category] += size
            self.total += size
        self._look()

    def temporary(self, size: float, category="activations"):
        """Allocates and frees at once, so that only the peak sees it."""
        self.make(category, _temporary=size)
        self.free("_temporary")

    def snapshot(self) -> Memory:
        """What is held now."""
        return Memory(**self.now)

    def start_peak(self):
        """Forgets the peak so far: from here on a new one is sought."""
        self.most, self._at_most = self.total, dict(self.now)

    @property
    def peak(self) -> Memory:
        """What was held when it was most."""
        return Memory(**self._at_most)

    def _start(self, name, size, category):
        if name in self.live:
            raise KeyError(f"{name} is already held")
        self.live[name] = (size, category)
        self.now[category] += size
        self.total += size
        self._look()

    def _look(self):
        if self.total > self.most:
            self.most, self._at_most = self.total, dict(self.now)

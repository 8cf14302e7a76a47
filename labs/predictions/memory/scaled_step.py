"""A recorded step at the sizes of one model and one batch."""

import functools

import numpy as np

from labs.predictions.dryrun.kernels import Scratch
from labs.predictions.memory import model_sizes
from labs.predictions.memory.allocation_log import Change, change_of
from labs.predictions.memory.recorder import HEAD, LAYERS, OUTSIDE, Mode
from labs.predictions.memory.recording import Events, recording_of


class Step:
    """A step of one rank with `batch` sequences of `sequence` tokens.

    layers: of the model. tensors: [(block or None, shape)] of its parameters, in the model's order.
    buffers: bytes of the model's own. All from its recording; nothing runs unless that is missing.
    """

    def __init__(self, config, batch: int, sequence: int, mode: Mode, threads: int = 1):
        if batch < 1 or sequence < 1:
            raise ValueError(f"batch={batch}, sequence={sequence}: both must be at least 1")
        self._recording = recording_of(config, batch, sequence, mode)
        self._compute = mode.compute
        numbers = self._recording.products.at(model_sizes.sizes_of(config, batch, sequence))
        # (numbers,): bytes and dimensions of the recording at this model's sizes
        self._numbers = numbers
        scratch = [Scratch(rule, tuple(numbers[list(sizes)]), element).nbytes(threads)
                   for rule, sizes, element in self._recording.scratch]
        # The last entry is for events without scratch space, whose index is -1.
        self._scratch = np.array([*scratch, 0.0])
        self.layers = config.num_hidden_layers
        self.tensors = self._tensors()
        self.buffers = int(numbers[self._recording.buffers].sum())
        positions = min(self._positions(), self._own_positions(config))
        if positions < sequence:
            raise ValueError(f"sequence={sequence}: this model has learned positions for only "
                             f"{positions} tokens")

    def _own_positions(self, config) -> float:
        """The same for a model that was recorded at its own widths: a matrix outside of the blocks
        with as many rows as the configuration has positions (OPT has two more)."""
        count = getattr(config, "max_position_embeddings", None) or float("inf")
        rows = {shape[0] for block, shape in self.tensors if block is None and len(shape) == 2}
        known = count != config.vocab_size and rows & {count, count + 2}
        return count if known else float("inf")

    def _positions(self) -> float:
        """How many positions have a parameter of their own; infinity where none has."""
        grows = self._recording.products.powers[:, model_sizes.SYMBOLS.index("positions")] > 0
        index = self._recording.products.index
        return min((int(self._numbers[shape[0]]) for _, shape in self._recording.parameters
                    if grows[index[shape[0]]]), default=float("inf"))

    def _tensors(self) -> list[tuple[int | None, tuple[int, ...]]]:
        found = [(block, tuple(int(n) for n in self._numbers[list(shape)]))
                 for block, shape in self._recording.parameters]
        inside = [index for index, (block, _) in enumerate(found) if block is not None]
        of_block = {}
        for block, shape in found:
            of_block.setdefault(block, []).append(shape)
        repeated = [(block, shape) for block in range(self.layers)
                    for shape in of_block[self._recorded(block)]]
        return found[:inside[0]] + repeated + found[inside[-1] + 1:]

    def _recorded(self, block: int) -> int:
        """The recorded block that stands for this one."""
        if self.layers == self._recording.layers or block == 0:
            return block
        return self._recording.layers - 1 if block == self.layers - 1 else 1

    def changes(self, gradient_bytes: float, keep_gradients: bool):
        """A function (phase, place) -> Change that this segment makes. place: a block, "outside" or
        "head". gradient_bytes: of an element of a parameter's gradient. keep_gradients: whether
        gradients stay in memory, or are freed at once.
        """
        @functools.cache
        def evaluated(phase, place) -> Change:
            events, sizes = self._events(phase, place)
            gradients = np.where(events.gradient, sizes * (gradient_bytes / self._compute), 0)
            return change_of(np.where(events.gradient, 0, sizes), gradients,
                             self._scratch[events.scratch], keep_gradients)

        return lambda phase, place: evaluated(
            phase, self._recorded(place) if isinstance(place, int) else place)

    def saved(self) -> dict[str, float]:
        """Where it was allocated ("outside", "blocks", "head") -> bytes held when forward ends."""
        found = dict.fromkeys(("outside", "blocks", "head"), 0.0)
        for place in ("outside", *map(self._recorded, range(self.layers)), "head"):
            events, sizes = self._events("forward", place)
            for name, here in zip(found, (events.origin == OUTSIDE, events.origin >= 0,
                                          events.origin == HEAD), strict=True):
                found[name] += sizes[here].sum()
        return found

    def _events(self, phase, place) -> tuple[Events, np.ndarray]:
        """A recorded segment and the bytes of its events. What the first of the repeated blocks
        allocated, and what is freed outside of blocks, such as a cache of keys and values when the
        model's output is dropped, is freed there as often as the block is repeated."""
        events = self._recording.segments[phase, place]
        repeated = isinstance(place, str) and self._recording.layers == LAYERS
        times = np.where(repeated & (events.origin == 1), self.layers - LAYERS + 1, 1)
        return events, self._numbers[events.numbers] * events.signs * times

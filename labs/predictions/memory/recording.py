"""One training step of a decoder, recorded as data: what is allocated and freed, in which order.

A step of one plain rank runs with fake tensors, at sizes that are primes (model_sizes). What is
kept are the bytes of each allocation as a product of sizes, in segments: forward and backward of
each block, and what lies before and after them. A model with more layers repeats a middle block's.
"""

import json
from dataclasses import dataclass

import numpy as np

from labs.predictions.memory import model_sizes
from labs.predictions.memory.recorder import LAYERS, Mode, Recorder
from labs.workers.progress import progress_bar

PHASES = ("forward", "backward")
# A thread that looks at this one's stack, as a rank's heartbeat does, holds its frames for a
# moment. If this one goes on meanwhile, what a function held is freed later, and the runs differ.
TRIES = 2
_DESCRIBED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class Events:
    """Allocations and frees of one segment, in their order; arrays of one length.

    numbers: which size, as an index into a recording's products. signs: 1 allocated, -1 freed, 0
    where the event is an operator's scratch space. gradient: whether a parameter's gradient begins
    to live. scratch: an index into the recording's `scratch`, -1 where there is none. origin: where
    the tensor was allocated: a block's index, recorder.OUTSIDE or recorder.HEAD.
    """

    numbers: np.ndarray
    signs: np.ndarray
    gradient: np.ndarray
    scratch: np.ndarray
    origin: np.ndarray


@dataclass(frozen=True)
class Recording:
    """One step of a model with so many layers, at any sizes.

    segments: (phase, place) -> Events; place is a block's index, "outside" (before the blocks in
    forward, after them in backward) or "head". scratch: (rule, dimensions, bytes of an element) of
    what operators allocate inside. parameters: (block or None, dimensions). buffers: bytes of the
    model's own. Each dimension and size is an index into `products`.
    """

    layers: int
    segments: dict[tuple, Events]
    scratch: list[tuple]
    parameters: list[tuple]
    buffers: list[int]
    products: model_sizes.Products


def recording_of(config, batch: int, sequence: int, mode: Mode) -> Recording:
    """The recording for this model and batch, made once per process for all that run the same
    operations. Raises ValueError in one sentence for a model that cannot be recorded."""
    if not all(getattr(config, name, None) for name in _DESCRIBED):
        raise ValueError(f"{type(config).__name__} is no configuration of a Hugging Face decoder")
    whole, few = config.num_hidden_layers, _layers(config)
    # Few layers and widths of primes first, because such a recording serves all models of a family;
    # at last the model with its own widths and all layers.
    attempts = dict.fromkeys([(few, True), (few, False), (whole, False)])
    for number, (layers, widths) in enumerate(attempts, 1):
        points = model_sizes.points(config, batch, sequence, layers, widths)
        key = (json.dumps(points[0].config.to_dict(), sort_keys=True, default=str), mode,
               *points[0].values.values())
        if key not in _RECORDINGS:
            _RECORDINGS[key] = _compared(points, mode, last=number == len(attempts))
        if _RECORDINGS[key]:
            return _RECORDINGS[key]
    raise AssertionError("unreachable: the last attempt returns a recording or raises")


_RECORDINGS = {}


def _layers(config) -> int:
    """How many layers to record: all, where a list in the configuration says that they differ."""
    whole = config.num_hidden_layers
    listed = [value for value in vars(config).values()
              if isinstance(value, list) and len(value) == whole]
    differ = any(len(set(map(str, value))) > 1 for value in listed)
    return whole if differ else min(whole, LAYERS)


def _compared(points, mode, last) -> Recording | None:
    """A recording whose numbers are products of sizes; None where they are not, unless that was the
    last attempt, which raises."""
    name = points[0].config.model_type
    try:
        for _ in range(TRIES):
            first, second = (Recorder(mode, point).record() for point in progress_bar(
                points, desc=f"recording a step of {name}", unit="run", delay=2))
            # Both points must run the same operations in the same order: only then numbers can be
            # compared.
            if first[0] == second[0]:
                return _merged(first, second, points)
        raise model_sizes.NotScalable("other operations run at other sizes")
    except (RuntimeError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        if not last:
            return None
        raise ValueError(f"A step of a {name} model cannot be recorded ({type(error).__name__}: "
                         f"{_first_line(error)}): measure it on real ranks instead") from error


def _first_line(error) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _merged(first, second, points) -> Recording:
    (shape, numbers), (_, again) = first, second
    layers, segments, scratch, parameters, buffers = shape
    found = model_sizes.products(numbers, again, points)
    if layers == LAYERS and not all(
            _content(segments[phase, 1], scratch, found.index)
            == _content(segments[phase, 2], scratch, found.index) for phase in PHASES):
        raise ValueError("its middle layers are not alike")
    return Recording(layers, {name: _events(rows) for name, rows in segments.items()}, scratch,
                     parameters, buffers, found)


def _content(segment, scratch, index) -> list:
    """A segment's events, equal for blocks that do the same."""
    return [(index[number], sign, gradient, scratch[inside][0] if inside >= 0 else "")
            for number, sign, gradient, inside, _ in segment]


def _events(rows) -> Events:
    return Events(*np.array(rows, dtype=int).reshape(-1, 5).T)

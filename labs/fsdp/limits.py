"""Training under a real limit of memory: what dies, what fits, and the largest model that does.

The limit is RLIMIT_DATA: all private writable memory that a rank takes after it has started. That
is its tensors and, beside them, Python's objects, thread stacks and what the allocator has not
given back; `Beside` measures that on two models. It runs on CPU ranks.
"""

import ctypes
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from tqdm.auto import tqdm

from labs.exercises.verdicts import shows
from labs.fsdp.measuring import batches, model
from labs.predictions.memory import predict
from labs.training import models, presets, strategies
from labs.training.loop import train
from labs.training.memory_categories import Memory
from labs.training.presets import Preset
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch

# The predictions room's words for each rung: strategy, checkpointing.
FORMULAS = {"DDP": ("ddp", "none"), "FSDP": ("fsdp2", "none"),
            "FSDP + checkpointing": ("fsdp2", "full")}
RANKS = 4
STEPS = 2  # the first makes the optimizer's state, the second has everything
_BIG = 24 * 1024  # bytes: a tensor from here on gets pages of its own

ddp = strategies.ddp


def size(layers: int = 12, ranks: int = RANKS) -> Preset:
    """What is trained under the limit: a GPT-2 of width 160, 64 tokens per rank."""
    return replace(presets.preset("laptop"), ranks=ranks, layers=layers, hidden=160, heads=4,
                   context=64, batch=1)


def parameters(layers: int) -> int:
    with torch.device("meta"):
        return models.count_trainable(model(size(layers)))


def predicted(name: str, layers: int, ranks: int = RANKS) -> Memory:
    """Bytes of tensors of one rank at the peak of a step."""
    if name not in FORMULAS:
        raise ValueError(f"no formula for {name!r}: choose {', '.join(FORMULAS)}")
    chosen, (strategy, checkpointing) = size(layers, ranks), FORMULAS[name]
    with torch.device("meta"):
        config = model(chosen).config
    return predict(config, batch=chosen.batch, sequence=chosen.context, ranks=ranks,
                   strategy=strategy, checkpointing=checkpointing, inputs=True)["peak"]


def needed(name: str, layers: int, ranks: int = RANKS) -> float:
    """Bytes of tensors at the highest moment: of a step, or of building, when every rank has the
    whole model before it is sharded."""
    return max(predicted(name, layers, ranks).total, 4 * parameters(layers))


@dataclass(frozen=True)
class Beside:
    """What a rank takes beside its tensors, in bytes: fixed, and for each layer."""

    fixed: float
    layer: float

    def at(self, layers: int) -> float:
        return self.fixed + self.layer * layers


def beside(name: str, strategy, layers=(6, 18)) -> Beside:
    """Measured on two models: growth of the process at its highest, less its tensors. Python takes
    memory for its objects a MiB at a time, so each is off by up to half of that; the two are far
    apart, lest the line through them doubles the error."""
    few, many = (max(launch(_growth, strategy, size(n), ranks=RANKS, **_OPTIONS))
                 - needed(name, n) for n in layers)
    each = max(0.0, (many - few) / (layers[1] - layers[0]))
    return Beside(few - each * layers[0], each)


_OPTIONS = {"quiet": True, "verify": False, "device": "cpu", "hang_after": 60}


def run(strategy, chosen: Preset) -> list:
    """On a rank: trains a few steps; the losses."""
    _own_pages()
    torch.set_num_threads(1)
    module, optimizer = strategy(model(chosen), torch.optim.AdamW, lr=1e-3)
    return train(module, optimizer, batches(chosen, STEPS))


def _own_pages():
    """Freed tensors go back to the system at once, so that what the limit counts is what lives;
    by default glibc keeps them for later, a third more at the peak."""
    with suppress(AttributeError):  # another C library has no such function
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, _BIG)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, _BIG)  # M_TRIM_THRESHOLD


def _growth(strategy, chosen) -> int:
    """On a rank: bytes that the process had at most beyond those at its start."""
    from labs.workers.memory import data_size

    seen, stop = [], threading.Event()

    def watch():
        while not stop.wait(0.0005):
            seen.append(data_size())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = data_size()
    run(strategy, chosen)
    stop.set()
    watcher.join()
    return max(seen) - start


def fits(strategy, layers: int, limit: float) -> bool:
    """Whether a real training on real ranks, each under the limit, comes to its end."""
    return shortage(strategy, layers, limit) is None


def shortage(strategy, layers: int, limit: float):
    """The Shortage that ended a real training under the limit, or None where it came to its end.
    What one rank lacks the others lack too, and C++ code may die of it with any last words: one
    that ran out speaks for all."""
    try:
        launch(run, strategy, size(layers), ranks=RANKS, memory_limit=limit, **_OPTIONS)
    except RankFailed as error:
        short = [outcome.shortage for outcome in error.outcomes if outcome.shortage]
        if not short:
            raise
        return short[0]
    return None


def search(holds, start: int) -> tuple:
    """(largest n with holds(n), number of questions), where holds is true up to some n and false
    beyond. Asks `start`, goes on in growing steps until the answer turns, then halves."""
    asked = {0: True}

    def ask(n):
        if n not in asked:
            asked[n] = holds(n)
        return asked[n]

    low, step = max(1, start), 1
    while not ask(low):
        low, step = max(0, low - step), 2 * step
    high, step = low + 1, 1
    while ask(high):
        low, high, step = high, high + 2 * step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    return low, len(asked) - 1


@dataclass(frozen=True)
class Largest:
    """The largest model of a rung, in layers: predicted, and found by real runs (None where the
    system limits no process)."""

    name: str
    limit: float
    predicted: int
    found: int
    runs: int
    beside: Beside

    @property
    def off(self) -> float:
        """How far the prediction is from what was found, in parameters."""
        return parameters(self.predicted) / parameters(self.found) - 1

    def __repr__(self):
        words = f"{self.name}: predicted {_model(self.predicted)}"
        if self.found is None:
            return f"{words}; this system limits no process, so nothing could be tried"
        return (f"{words}; found {_model(self.found)} by {self.runs} trainings under "
                f"{self.limit / 1e6:g} MB a rank: {abs(self.off):.0%} apart")


def _model(layers) -> str:
    return f"{layers} layers ({parameters(layers) / 1e6:.1f} M parameters)"


@shows("4.4")
def largest(name: str, strategy, limit: float) -> Largest:
    """The largest model that trains under `limit` bytes a rank: predicted from the closed form and
    `Beside`, then found by trainings that really end or really run out of memory."""
    if not can_limit():
        only, _ = search(lambda n: needed(name, n) <= limit, 8)
        return Largest(name, limit, only, None, 0, Beside(0, 0))
    with tqdm(desc=name, unit="training", delay=2, leave=False) as bar:
        def tried(layers):
            bar.update()
            return fits(strategy, layers, limit)

        extra = beside(name, strategy)
        guess, _ = search(lambda n: needed(name, n) + extra.at(n) <= limit, 8)
        found, runs = search(tried, guess)
    return Largest(name, limit, guess, found, runs, extra)


def can_limit() -> bool:
    """Whether this system can limit a process's memory."""
    return sys.platform == "linux"

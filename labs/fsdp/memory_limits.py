"""Training under a real memory limit: what runs out of memory, what fits, and the largest model.

On CPU ranks the limit is RLIMIT_DATA: all private writable memory that a rank takes after it has
started. That counts its tensors and, in addition, Python's objects, thread stacks and what the
allocator has not returned to the system. On GPUs it is the most that torch's caching allocator may
reserve: tensors, rounded up, and cuBLAS's workspace; CUDA's context and NCCL's buffers are not in
it. `ProcessOverhead` is measured for what is no tensor.
"""

import ctypes
import gc
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from labs.checks.comparison import batches, build, config_of
from labs.checks.verdicts import shows
from labs.meters import memory
from labs.meters.metrics import Metric
from labs.predictions.memory.predict import predict
from labs.training import presets, strategies
from labs.training.loop import train
from labs.training.memory_categories import GB, Memory
from labs.training.presets import Preset
from labs.words import counted
from labs.workers import cuda, devices
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch
from labs.workers.memory import OOMInfo, lift
from labs.workers.progress import progress_bar

# name -> what labs.predictions calls it: (strategy, checkpointing)
FORMULAS = {"DDP": ("ddp", "none"), "FSDP": ("fsdp2", "none"),
            "FSDP + checkpointing": ("fsdp2", "full")}
STEPS = 2  # the first makes the optimizer's state, the second has everything
OPTIONS = {"quiet": True, "verify": False, "hang_after": 60}
CPU_LIMIT = 47_000_000  # bytes: the laptop preset fits with FSDP, and with DDP it does not
_OWN_PAGES = 24 * 1024  # bytes: a tensor from here on gets pages of its own


def preset(layers: int | None = None, ranks: int | None = None) -> Preset:
    """Returns what this machine trains under the limit: the GPT-2 of its preset, with so many
    layers and ranks instead of the preset's."""
    changes = {"layers": layers, "ranks": ranks}
    return presets.preset(lab="limit", **{name: n for name, n in changes.items() if n is not None})


def memory_limit() -> int:
    """Returns a limit in bytes for each rank under which this machine's preset trains with FSDP,
    and not with DDP: on GPUs half-way between what the two need by formula, to two digits."""
    if not devices.gpus():
        return CPU_LIMIT
    middle = sum(needed(name, preset().layers) for name in ("DDP", "FSDP")) / 2
    return round(middle, 1 - math.floor(math.log10(middle)))


def parameters(layers: int) -> int:
    """Returns Ψ of the model with this many layers."""
    return preset(layers).parameters


def predicted_peak(name: str, layers: int, ranks: int | None = None) -> Memory:
    """Returns the bytes of one rank's tensors at the peak of a step, by category, on this machine's
    devices. ranks: None means the preset's."""
    if name not in FORMULAS:
        raise ValueError(f"no formula for {name!r}: choose {', '.join(FORMULAS)}")
    strategy, checkpointing = FORMULAS[name]
    size = preset(layers, ranks)
    plan = devices.plan(size.ranks)
    return predicted_peak_of(size, strategy=strategy, checkpointing=checkpointing,
                             device=plan.device, backend=plan.library)


def predicted_peak_of(size: Preset, **options) -> Memory:
    """Returns the bytes of one rank's tensors at the peak of a step of the preset's GPT-2. options:
    as for labs.predictions.memory.predict.predict."""
    return predict(config_of(size), batch=size.batch, sequence=size.context, ranks=size.ranks,
                   inputs=True, **options)["peak"]


def needed(name: str, layers: int, ranks: int | None = None) -> float:
    """Returns the peak bytes of tensors: of a step, or of building, when every rank has the full
    model before it is sharded."""
    return max(predicted_peak(name, layers, ranks).total, 4 * parameters(layers))


@dataclass(frozen=True)
class ProcessOverhead:
    """What a rank takes in addition to its tensors, in bytes: fixed, and for each layer."""

    fixed: float
    layer: float

    def at(self, layers: int) -> float:
        return self.fixed + self.layer * layers


def measure_overhead(name: str, strategy: Callable, layers=(6, 18)) -> ProcessOverhead:
    """Measures the overhead of a strategy on two models: what a rank took, less its tensors.

    Python takes memory for its objects a MiB at a time, so each measurement is off by up to half of
    that. The two models are far apart, because the error of the slope shrinks with the distance.
    """
    # A straight line through two sizes; `needed` is all that tensors explain.
    few, many = (max(_launch(_growth, strategy, preset(n))) - needed(name, n) for n in layers)
    each = max(0.0, (many - few) / (layers[1] - layers[0]))
    return ProcessOverhead(few - each * layers[0], each)


def _launch(function, strategy, size, **limited) -> list:
    return launch(function, strategy, size, ranks=size.ranks, **limited, **OPTIONS)


def _train(strategy, size):
    """On a rank: trains a few steps."""
    return_freed_memory()
    if devices.device().type == "cpu":
        torch.set_num_threads(1)  # CPU kernels hold a buffer for each thread
    train(*build(strategy, size), batches(size, STEPS))


def return_freed_memory():
    """Makes glibc return freed tensors to the system at once, so that the limit counts what is
    allocated. By default glibc keeps them for later, a third more at the peak. The allocator of a
    GPU does that by itself before it fails."""
    with suppress(AttributeError):  # another C library has no such function
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, _OWN_PAGES)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, _OWN_PAGES)  # M_TRIM_THRESHOLD


def _growth(strategy, size) -> int:
    """On a rank: returns by how many bytes that count under the limit it grew at most."""
    if devices.device().type == "cpu":
        return _process_growth(strategy, size)
    _train(strategy, size)
    return cuda.memory().reserved  # without pressure the allocator gives nothing back


def _process_growth(strategy, size) -> int:
    """On a rank: returns by how many bytes the process grew at most, sampled every 0.5 ms."""
    samples, trained = [], threading.Event()

    def sample():
        while not trained.is_set():
            samples.append(_data_pages(statm))
            time.sleep(0.0005)

    with open("/proc/self/statm", "rb") as statm:
        sampler = threading.Thread(target=sample)
        sampler.start()
        start = _data_pages(statm)  # the sampler's own stack is no growth
        _train(strategy, size)
        trained.set()
        sampler.join()
    return (max(samples) - start) * mmap.PAGESIZE


def _data_pages(statm) -> int:
    """Returns the pages of what RLIMIT_DATA counts and of the main thread's stack, which hardly
    grows. The exact number, `labs.workers.memory.data_size`, takes 15 times as long to read."""
    return int(os.pread(statm.fileno(), 200, 0).split()[5])


def train_recorded(strategy: Callable, layers: int, limit: float
                   ) -> tuple[Memory | None, OOMInfo | None]:
    """Trains under the limit, and records memory right after it on the same ranks, because the
    recording itself takes more than the limit leaves. Returns (memory at the peak of a step, of the
    rank that allocated most, None), or (None, the OOMInfo of a rank that ran out of memory)."""
    limited = {"memory_limit": limit} if can_limit() else {}
    try:
        peaks = _launch(_train_then_record, strategy, preset(layers), **limited)
    except RankFailed as error:
        return None, _oom_info(error)
    return max(peaks, key=lambda held: held.total), None


def _train_then_record(strategy, size) -> Memory:
    _train(strategy, size)
    gc.collect()  # modules hold themselves in cycles
    # The trained models are gone: without the limit, the recording may take more than it left.
    lift()
    return memory.record(lambda: build(strategy, size), batches(size, STEPS),
                         held=strategies.resident_tensors).step_peak


def _oom_info(error: RankFailed) -> OOMInfo:
    short = [outcome.oom for outcome in error.outcomes if outcome.oom]
    if not short:
        raise error
    return short[0]


def fits(strategy: Callable, layers: int, limit: float) -> bool:
    """Whether a real training on real ranks, each under the limit, comes to its end."""
    return oom_under_limit(strategy, layers, limit) is None


def oom_under_limit(strategy: Callable, layers: int, limit: float) -> OOMInfo | None:
    """Trains under the limit; returns the OOMInfo of the rank that ran out of memory, or None
    where training came to its end.

    One rank that ran out explains all failures: the others lack the same memory, and C++ code may
    exit on std::bad_alloc with any message or exit code.
    """
    try:
        _launch(_train, strategy, preset(layers), memory_limit=limit)
    except RankFailed as error:
        return _oom_info(error)
    return None


def search(holds: Callable[[int], bool], start: int) -> tuple[int, int]:
    """Returns (the largest n for which holds(n), number of calls), where holds is true up to some n
    and false beyond. Calls `start` first, continues in growing steps until the answer turns, then
    halves the interval; no n is tried twice."""
    known = {0: True}

    def ask(n):
        if n not in known:
            known[n] = holds(n)
        return known[n]

    low, step = max(1, start), 1
    # Down from the start, in steps that double, until one holds.
    while not ask(low):
        low, step = max(0, low - step), 2 * step
    high, step = low + 1, 1
    # Up in steps that double, until one does not hold.
    while ask(high):
        low, high, step = high, high + 2 * step, 2 * step
    # low holds, high does not: halve what lies between.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    return low, len(known) - 1


@dataclass(frozen=True)
class LargestModel:
    """The largest model of a strategy under `limit` bytes a rank, in layers: predicted, and found
    by `runs` real trainings (None where the system limits no process)."""

    name: str
    limit: float
    predicted: int
    found: int | None
    runs: int
    overhead: ProcessOverhead

    @property
    def off(self) -> float | None:
        """The prediction's relative error, in parameters; None where one of the two is no model."""
        if not self.predicted or not self.found:
            return None
        return parameters(self.predicted) / parameters(self.found) - 1

    def metrics(self) -> list[Metric]:
        """The largest model, where trainings were tried."""
        return [] if self.found is None else [
            Metric(f"{self.name}: largest model", self.found, "layers", self.predicted)]

    def __repr__(self):
        words = f"{self.name}: predicted {_described(self.predicted)}"
        if self.found is None:
            return f"{words}; this system limits no process, so nothing could be tried"
        return (f"{words}; found {_described(self.found)} by {self.runs} trainings under "
                f"{size_text(self.limit)} a rank"
                + ("" if self.off is None else f": {abs(self.off):.0%} apart"))


def _described(layers) -> str:
    return (f"{counted(layers, 'layer')} ({parameters(layers) / 1e6:.1f} M parameters)" if layers
            else "that not even one layer fits")


@shows("4.4")
def largest_model(name: str, strategy: Callable, limit: float) -> LargestModel:
    """Returns the largest model that trains under `limit` bytes a rank: predicted from the closed
    form and the measured overhead, then found by trainings that come to their end or run out of
    memory."""
    if not can_limit():
        layers, _ = search(lambda n: needed(name, n) <= limit, 8)
        return LargestModel(name, limit, layers, None, 0, ProcessOverhead(0, 0))
    with progress_bar(desc=name, unit="training", delay=2) as bar:
        def tried(layers):
            bar.update()
            return fits(strategy, layers, limit)

        overhead = measure_overhead(name, strategy)
        guess, _ = search(lambda n: needed(name, n) + overhead.at(n) <= limit, 8)
        found, runs = search(tried, guess)
    return LargestModel(name, limit, guess, found, runs, overhead)


def can_limit() -> bool:
    """Whether this system can limit a rank's memory."""
    return sys.platform == "linux" or devices.gpus() > 0


def size_text(nbytes: float) -> str:
    """Returns bytes in the unit that a reader of this machine's charts sees: "47 MB", "6.5 GB"."""
    return f"{nbytes / GB:g} GB" if nbytes >= GB else f"{nbytes / 1e6:g} MB"

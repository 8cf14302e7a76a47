"""One process that dry-runs any training job on any number of ranks: exact bytes and traffic of one
rank, without a number being computed and without a second process."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from labs.predictions.dryrun import fake, jobs, layers, replay
from labs.predictions.dryrun.result import Collective, DryRun
from labs.predictions.dryrun.trace import trace
from labs.predictions.dryrun.tracker import Tracker
from labs.workers import cuda, devices
from labs.workers.progress import progress_bar


def dry_run(model: Any, *, ranks: int = 1, strategy: str | Callable = "plain", batch: int = 1,
            sequence: int = 128, precision: str = "fp32", checkpointing: str = "none",
            optimizer: Callable = torch.optim.AdamW, inputs: Callable | None = None,
            threads: int | None = None, backend: str = "gloo", device: str = "cpu",
            shortcut: bool = True, loop: Callable | None = None, **options) -> DryRun:
    """What one rank of a job holds and sends, from a run with fake tensors on fake ranks.

    model: a Hugging Face configuration of a decoder, or a function that makes an nn.Module whose
    forward takes the batch by name and whose result has a `loss`. strategy: "plain", "ddp", "fsdp2"
    (each block, then the root), or a strategy of your own: function(model, optimizer_class,
    **options) -> (module, optimizer). options go to DistributedDataParallel or fully_shard, e.g.
    gradient_as_bucket_view=True, reshard_after_forward=False. loop: a function (module, optimizer,
    batch) that trains one step in another way than the plain one. batch: sequences per rank;
    sequence: tokens. inputs: a function that makes another batch. precision: "fp32", "bf16"
    (weights too) or "mixed" (fp32 weights; FSDP2's policy with fp32 reduction, autocast elsewhere).
    checkpointing: "none" or "full" (each block). threads: of a rank, for the buffers of CPU
    kernels; None: this machine's cores shared out, as `launch` does. shortcut: trace few layers
    where all are alike.

    backend: "gloo", whose collectives hold copies, or "nccl", whose do not. With "gloo" an operator
    that may take scratch space runs once with real tensors of its sizes; what is too large for that
    is in the result's `untried`. With "nccl" none does, since a GPU's take other scratch space.
    device: "cpu", or "cuda" on a machine with a GPU: its operators keep other tensors for backward,
    but what they and cuBLAS take for themselves is not counted.

    Raises RuntimeError when a real process group is up, for a compiled model, and when the job
    looks at numbers that depend on parameters or on chance: a fake tensor has none.
    """
    began = time.monotonic()
    job = jobs.DryRunJob(model, ranks, strategy, batch, sequence, precision, checkpointing,
                         optimizer, inputs, None, options, device, loop)
    if device == "cuda" and not cuda.count():
        raise RuntimeError("device='cuda': a dry run of a GPU's operators needs a machine with a "
                           "GPU; leave device out for the CPU's")
    with contextlib.ExitStack() as stack:
        # DeviceMesh and DDP ask for a process group; a plain job needs none.
        if strategy != "plain":
            stack.enter_context(fake.ranks(ranks))
        with fake.refusals_explained():
            run = _Run(job, threads or max(1, devices.cores() // ranks), backend)
            found = run.short() if shortcut else run.whole("Every layer was traced")
    return _result(job, *found, run.untried, time.monotonic() - began)


class _Run:
    """Traces of one job with different numbers of layers."""

    def __init__(self, job, threads, backend):
        self._job, self._threads, self._backend = job, threads, backend
        self._layers, self._alike = _layers_of(job)
        self.untried = {}

    def short(self) -> tuple:
        """(segments, calls, layers, layers traced, note) by the short cut if it holds."""
        if self._layers <= layers.SIZES[-1]:
            return self.whole("Every layer was traced: there are few")
        if not self._alike:
            return self.whole("Every layer was traced: they are not alike")
        few = {size: self._trace(size) for size in _with_progress(layers.SIZES, self._job.ranks)}
        segments = layers.extended({n: t.segments for n, t in few.items()}, self._layers)
        calls = self._calls(few)
        if segments is None or calls is None:
            return self.whole("Every layer was traced: layers do not add up")
        note = f"{layers.SIZES[-1]} of {self._layers} layers traced, since all are alike"
        return segments, calls, self._layers, layers.SIZES[-1], note

    def whole(self, why) -> tuple:
        """The same from a trace of all layers."""
        (only,) = (self._trace(None) for _ in _with_progress([0], self._job.ranks))
        calls = Counter((c.kind, c.bytes) for c in only.calls)
        return only.segments, calls, self._layers, self._layers, why

    def _trace(self, size):
        found = trace(replace(self._job, layers=size), self._threads, self._backend)
        for operator, nbytes in found.untried.items():
            self.untried[operator] = max(nbytes, self.untried.get(operator, 0))
        return _Traced(found)

    def _calls(self, few):
        calls = {n: t.calls for n, t in few.items()}
        if self._job.strategy != "ddp" or self._job.options.get("find_unused_parameters"):
            return layers.collectives(calls, self._layers)
        # DDP's buckets do not grow by a fixed number per layer: a bucket may hold parts of two
        # layers.
        others = {n: [c for c in found if c.kind != "all_reduce"] for n, found in calls.items()}
        buckets = layers.bucket_calls(few[layers.SIZES[-1]].gradients, self._layers,
                                      int(self._job.options.get("bucket_cap_mb", 25) * 2**20))
        found = layers.collectives(others, self._layers)
        return None if found is None else found + buckets


class _Traced:
    def __init__(self, traced):
        self.segments = replay.segments(traced.events, traced.labels)
        self.calls, self.gradients = traced.calls, traced.gradients


def _layers_of(job) -> tuple[int, bool]:
    """(layers, whether all are alike). A configuration's are computed once, whatever the ranks:
    building all layers, even of fake tensors, takes a second."""
    is_config = hasattr(job.model, "to_json_string")
    key = is_config and (job.model.to_json_string(), job.precision, job.checkpointing)
    if key not in _LAYERS:
        with fake.tensors(Tracker()):
            blocks = jobs.blocks(jobs.build(job))
            found = len(blocks), layers.alike(blocks)
        if not is_config:
            return found
        _LAYERS[key] = found
    return _LAYERS[key]


_LAYERS = {}


def _with_progress(items, ranks):
    """The items, with a progress bar if they take more than two seconds."""
    words = f"dry run on {ranks} rank{'s' * (ranks > 1)}"
    return progress_bar(items, desc=words, unit="trace", delay=2)


def _result(job, segments, calls, total, traced, note, untried, seconds) -> DryRun:
    peaks = {phase: replay.peak(segments, phase)
             for phase in ("build", "forward", "backward", "step", "end")}
    ends = {"build": "first", "forward": "backward", "backward": "step", "step": "end"}
    at = {phase: replay.resident(segments, end) for phase, end in ends.items()}
    end = peaks.pop("end")  # what a loop of one's own does after the optimizer's step
    at["peak"] = max((peaks["forward"], peaks["backward"], peaks["step"], end),
                     key=lambda held: held.total)
    return DryRun(job, at, peaks, _collectives(calls), total, traced, note, seconds, untried)


def _collectives(calls) -> list[Collective]:
    kinds = dict.fromkeys(kind for kind, _ in calls)
    return [Collective(kind, sum(n for (k, _), n in calls.items() if k == kind),
                       sum(n * size for (k, size), n in calls.items() if k == kind))
            for kind in sorted(kinds)]

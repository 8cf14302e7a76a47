"""Exercise 5.12: one training step under torch.profiler, on every rank."""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from labs.checks import comparison
from labs.checks.numbers import require_signature
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check
from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.student_recorder import record_by, require_common_begin
from labs.training.loop import labelled_step
from labs.workers.slow_link import Link, slow_link

RANKS = 2
LATENCY = 1e-3  # seconds of each collective on the slow link
# (what a message calls the recording, whether on the slow link, with stacks): in the second one
# `options` has all that it ever has.
RECORDINGS = (("without options", False, False), ("with options", True, True))
HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "object has no attribute 'export_chrome_trace'": "profile(...) records from __enter__ to "
                                                     "__exit__, or from start() to stop().",
    # torch's words for an export before the end of the recording, and for a recording of nothing
    "object has no attribute 'save'": "Call profiler.stop() before profiler.export_chrome_trace.",
    "No activities specified": "ProfilerActivity.CPU belongs to the activities on every machine.",
    "Profiler is already enabled": "Another profiler still records: each start() needs its stop()."}


@check("5.12", device=None, hints=HINTS)
def check_record_step(record_step):
    """record_step(train_one_step, path, **options): each of 2 ranks records one step of FSDP2,
    which all begin together, with label, shapes and options, and writes it to its own path."""
    require_signature(record_step, ("train_one_step", "path"))
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(_record_and_judge, record_step, folder, world_sizes=(RANKS,), hang_after=20.0,
                 timeout=90.0)
    return (f"each of {RANKS} ranks recorded one step, which all began together, with label, "
            "shapes and options, and wrote it to its own path")


def _record_and_judge(record_step: Callable, folder: str):
    """On a rank: judges what the student's function leaves of each recording."""
    sizes = recorded_runs.preset(layers=2, hidden=32, heads=2, context=16, batch=1)
    model, optimizer = comparison.build(recorded_runs.configured_fsdp2, sizes)
    batches = iter(comparison.batches(sizes, 8))  # more than needed: some answers train too often
    labelled_step(model, optimizer, next(batches))  # FSDP2 allocates in its first step
    for name, on_link, stacks in RECORDINGS:
        path = Path(folder, f"{name.replace(' ', '_')}_rank{dist.get_rank()}.json")
        with slow_link(Link(latency=LATENCY)) if on_link else contextlib.nullcontext():
            raise_on_all_ranks(_judge, record_step, lambda: labelled_step(
                model, optimizer, next(batches)), path, stacks, name)


def _judge(record_step, step, path, stacks, name):
    try:
        record_by(record_step, step, path, stacks)
        require_common_begin(path)
    except Wrong as error:
        raise error.said_of(f"rank {dist.get_rank()}, {name}") from None

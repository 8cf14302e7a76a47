"""Exercise 8.2: a job that is saved on one number of ranks resumes on another."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from labs.checks.generator import new_generator
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.traffic import Traffic
from labs.pictures.tables import Table
from labs.surviving_failure.forgotten_chart import distance
from labs.surviving_failure.full_tensors import (
    Tensors,
    common,
    difference,
    full_tensors,
    unlike_shards,
)
from labs.surviving_failure.job_state import ON_CPU, losses_of
from labs.surviving_failure.resumable_job import KINDS, ZERO3, ResumableJob, new_job
from labs.words import counted
from labs.workers import processes

COMPARED_STEPS = 4  # steps after loading
ROUNDING = 1e-5  # of a loss; measured: 8e-7. What is not loaded changes the second digit
# Of the parameters' bytes, what saving or loading shards may gather. DCP's plans are almost as many
# for so small a model; parameters and moments are 3 times as many.
GATHERED = 1.5
LARGEST = 0.6  # of all bytes: one rank's file of ZeRO-3 on 4 ranks has 0.33
_HINTS = {
    "frozen": "These are replicated on every rank, outside of the shards: job.tensors() has them.",
    "buffers": "These are replicated on every rank, outside of the shards: job.tensors() has them.",
    "the optimizer's step": "AdamW corrects the moments by it: it is the same on all ranks.",
    "learning rate": "job.load_progress_state(...) puts it into the optimizer's groups.",
}
_PROGRESS_HINT = "job.progress_state() and job.load_progress_state(...)"
_SHARD_HINTS = {"parameters": "A new shard is a slice of the old shards, concatenated and without "
                              "padding.",
                "exp_avg": "The moments are sharded as the parameters are."}
_DCP_HINT = ("get_state_dict makes room for parameters, and for moments if there are no gradients; "
             "dcp.load fills it; set_state_dict puts it in place, on every rank.")
_WHOLE_HINT = {ZERO3: "Each rank writes its own shards.",
               "FSDP2": "get_state_dict(module, optimizer) without full_state_dict."}


class Functions(NamedTuple):
    """The student's: save and load through DCP, and of ZeRO-3's shards; and a ZeRO-3."""

    save_dcp: Callable
    load_dcp: Callable
    save_shards: Callable
    load_shards: Callable
    zero3: Callable

    def save(self, kind: str) -> Callable:
        """The function that saves a job of this kind."""
        return self.save_shards if kind == ZERO3 else self.save_dcp

    def load(self, kind: str) -> Callable:
        """The function that loads a job of this kind."""
        return self.load_shards if kind == ZERO3 else self.load_dcp


class Saved(NamedTuple):
    """What was saved, by the job itself: full tensors, the common parts, and the losses of the
    steps that followed."""

    tensors: Tensors
    common: dict[str, str]
    losses: list[float]


@check("8.2")
def check_other_ranks(save_dcp: Callable, load_dcp: Callable, save_shards: Callable,
                      load_shards: Callable, zero3: Callable):
    """save_dcp(job, folder), load_dcp(job, folder): DDP and FSDP2 through DCP. save_shards(job,
    folder), load_shards(job, folder): ZeRO-3's shards. zero3: the student's strategy."""
    functions = Functions(save_dcp, load_dcp, save_shards, load_shards, zero3)
    worst = max(map(max, verify(functions, saved_on=4, loaded_on=(2, 3, 6), again=True).values()))
    return ("DDP, FSDP2 and ZeRO-3, saved on 4 ranks and loaded on 2, 3 and 6, and again from 2 on "
            f"4: parameters and moments are equal to the last bit, losses to {worst:.0e}")


def verify(functions: Functions, saved_on: int, loaded_on: tuple[int, ...], again: bool = False,
           kinds: tuple[str, ...] = KINDS) -> dict[int, list[float]]:
    """Saves on so many ranks and loads on each of others, and, if `again`, saves on the first of
    them to load on `saved_on`. Ranks -> the difference of each loss after loading, of the kind that
    differs most. Raises Wrong."""
    early = new_generator().randint(2, 4)
    with processes.temporary_folder() as temporary:
        first, second = Path(temporary, "first"), Path(temporary, "second")
        saved = _on(saved_on, _save_all, functions, kinds, first, early)[0]
        apart, resaved = {}, None
        for ranks in loaded_on:
            folder = second if again and resaved is None else None
            results = _on(ranks, _load_all, functions, saved, first, saved_on, folder)
            apart[ranks] = results[0][0]
            resaved = resaved or results[0][1]
        if again:
            results = _on(saved_on, _load_all, functions, resaved, second, loaded_on[0], None)
            apart[saved_on] = results[0][0]
    return apart


def _on(ranks, fn, *args) -> list:
    return on_ranks(fn, *args, world_sizes=(ranks,), timeout=60.0)


def _save_all(functions, kinds, folder, early) -> dict[str, Saved]:
    """On a rank: jobs of all kinds that save after `early` steps."""
    found = {}
    for kind in kinds:
        # Without dropout and replaced tokens: these are drawn on each rank, so no other number of
        # ranks could repeat them. Batches are the same rows of all ranks together.
        job = new_job(kind, zero3=functions.zero3, noisy=False)
        job.train(early)
        found[kind] = _saved(functions, job, folder / kind)
    return found


def _saved(functions, job: ResumableJob, folder: Path, losses: list[float] | None = None) -> Saved:
    """Saves the job, judges how, and trains it on. losses: what follows, where that is known."""
    before, state = full_tensors(job), common(job)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()  # the folder is there on all ranks (NFS may show it later)
    with Traffic() as traffic:
        functions.save(job.kind)(job, folder)
    raise_on_all_ranks(_judge_gathered, job, traffic, "saving")
    raise_on_all_ranks(_judge_files, job, folder)
    after = full_tensors(job)
    raise_on_all_ranks(_judge_unchanged, job, before, after)
    return Saved(before, state, losses or _losses(job, COMPARED_STEPS))


def _load_all(functions, saved, folder, saved_on,
              new_folder) -> tuple[list[float], dict[str, Saved]]:
    """On a rank: new jobs that load what was saved and continue; the largest difference of each
    loss, and what was saved again, after one step, if there is a folder for it."""
    apart, resaved = [], {}
    for kind, want in saved.items():
        # Another seed than that of the saved job: what is not loaded differs.
        job = new_job(kind, seed=1, zero3=functions.zero3, noisy=False)
        where = f"{kind}, saved on {saved_on} ranks, loaded on {dist.get_world_size()}"
        _load(functions, job, folder / kind, want, where)
        losses = []
        if new_folder is not None:
            losses += _losses(job, 1)
            resaved[kind] = _saved(functions, job, new_folder / kind, want.losses[1:])
        losses += _losses(job, len(want.losses) - len(losses))
        apart.append(raise_on_all_ranks(_judge_losses, losses, want.losses, where))
    return [max(each) for each in zip(*apart, strict=True)], resaved


def _load(functions, job, folder, want: Saved, where):
    new = full_tensors(job)
    with Traffic() as traffic:
        functions.load(job.kind)(job, folder)
    raise_on_all_ranks(_judge_gathered, job, traffic, "loading")
    raise_on_all_ranks(_judge_sizes, job, where)
    raise_on_all_ranks(_judge_names, job, want.tensors, where)
    raise_on_all_ranks(_judge_tensors, job.kind, full_tensors(job), want.tensors, new, where)
    raise_on_all_ranks(_judge_common, common(job), want.common, where)


def _losses(job: ResumableJob, steps: int) -> list[float]:
    """The losses of all ranks together, of so many steps."""
    losses = torch.tensor(job.train(steps), dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def _judge_gathered(job, traffic, what):
    # Invariant: no rank gathers the full parameters and moments. They do not fit into the memory of
    # one rank where a model needs sharding.
    gathered = sum(call.bytes for call in traffic.of("all_gather", "gather", "all_to_all"))  # bytes
    parameters = 4 * sum(p.numel() for p in job.model.parameters())  # bytes of float32
    if job.kind != "DDP" and gathered > GATHERED * parameters:
        raise Wrong(f"{job.kind}, rank {dist.get_rank()}: {what} gathers {gathered:,} bytes; the "
                    f"model's parameters are {parameters:,}: shards were gathered to full "
                    "tensors", _WHOLE_HINT[job.kind], code="full_tensor_gathered")


def _judge_files(job, folder):
    dist.barrier()
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    if not sizes:
        raise Wrong(f"{job.kind}: saving wrote nothing into the folder", code="nothing_saved")
    # Parameters and both moments in float32: 12 bytes per parameter.
    ranks, whole = dist.get_world_size(), 12 * sum(p.numel() for p in job.model.parameters())
    # Invariant: each rank writes its own part. Catches a rank 0 that writes all, after a gather.
    if job.kind == ZERO3 and len(sizes) < ranks:
        raise Wrong(f"{job.kind}: {ranks} ranks have saved, and the folder has "
                    f"{counted(len(sizes), 'file')}", _WHOLE_HINT[ZERO3], code="shards_missing")
    if job.kind == ZERO3 and max(sizes) > max(LARGEST, 1.4 / ranks) * whole:
        raise Wrong(f"{job.kind}: one file has {max(sizes):,} bytes; parameters and moments of all "
                    f"ranks are {whole:,}", _WHOLE_HINT[ZERO3], code="saves_others_shards")


def _judge_unchanged(job, before, after):
    for name, value in before.items():
        if difference(after.get(name, value), value, None):
            raise Wrong(f"{job.kind}, rank {dist.get_rank()}: saving has changed {name}",
                        "Training continues after the save.", code="state_changed")


def _judge_sizes(job, where):
    if found := unlike_shards(job):
        code, wrong, hint = found
        raise Wrong(f"{where}, rank {dist.get_rank()}: {wrong}",
                    hint, code=code)


def _judge_names(job, want, where):
    """Before anything is gathered: a moment may be missing on one rank only."""
    units = getattr(job.module, "units", ())
    trained = [unit.shard for unit in units] or [p for p in job.model.parameters()
                                                 if p.requires_grad]
    for parameter in trained:
        missing = {"exp_avg", "exp_avg_sq", "step"} - job.optimizer.state.get(parameter, {}).keys()
        if missing:
            raise Wrong(f"{where}, rank {dist.get_rank()}: the optimizer has no {min(missing)}",
                        _DCP_HINT if job.kind != ZERO3 else "With the parameters alone the next "
                        "loss is right, and those after it are not.",
                        code="optimizer_state_missing")


def _judge_tensors(kind, found, want, new, where):
    hints = {**_HINTS, **_SHARD_HINTS} if kind == ZERO3 else {"": _DCP_HINT}
    # Invariant: each full tensor is equal to the last bit to the one that was saved. Catches
    # padding that is joined with the shards, shards in the wrong order, and moments that were not
    # loaded.
    for name, value in want.items():
        if wrong := difference(found[name], value, new.get(name)):
            hint = next(hint for part, hint in hints.items() if name.startswith(part))
            raise Wrong(f"{where}, rank {dist.get_rank()}: {name}: {wrong}", hint,
                        code="state_not_restored")


def _judge_common(found, want, where):
    # Invariant: so are the parts that every rank has. They decide about the steps after the next.
    for part, value in want.items():
        if found[part] != value:
            raise Wrong(f"{where}, rank {dist.get_rank()}: {part} is {found[part]} instead of "
                        f"{value}", _HINTS.get(part, _PROGRESS_HINT), code="settings_not_restored")


def _judge_losses(losses, want, where) -> list[float]:
    """The differences. The same rows, in other shares: only the order of sums differs."""
    for number, (loss, right) in enumerate(zip(losses, want, strict=True), 1):
        if not abs(loss - right) <= ROUNDING:
            raise Wrong(f"{where}: loss {number} after loading is {loss:.9g}, and {right:.9g} "
                        "without interruption", "What was compared right after loading is equal. "
                        "What else does a step need?", code="wrong_loss")
    return [abs(loss - right) for loss, right in zip(losses, want, strict=True)]


SAVED_ON, LOADED_ON = 4, (4, 2, 3, 6)


@shows("8.2")
@ON_CPU
def show_other_ranks(save_shards: Callable, load_shards: Callable, zero3: Callable) -> Table:
    """How far each loss is from that of the job that continued on 4 ranks, after its ZeRO-3 shards
    were loaded on other numbers of ranks."""
    functions = Functions(..., ..., save_shards, load_shards, zero3)
    apart = verify(functions, SAVED_ON, LOADED_ON, kinds=(ZERO3,))
    rows = [(ranks, *(distance(difference) for difference in differences))
            for ranks, differences in apart.items()]
    return Table(f"ZeRO-3, saved on {SAVED_ON} ranks: how far each loss is from that of the job "
                 "that continued", ("loaded on ranks", *losses_of(len(rows[0]) - 1)), rows)

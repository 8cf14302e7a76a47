"""Exercise 4.7: a sharded checkpoint that another number of ranks can load."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_executor
from torch.distributed.checkpoint.api import CheckpointException

from labs.checks.on_ranks import largest_difference, raise_on_all_ranks
from labs.checks.reference import Step
from labs.checks.student_code import own_place
from labs.checks.tolerances import TRAINED
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp import scaffold, strategy_checks
from labs.meters.traffic import Traffic
from labs.pictures.tables import Table
from labs.training import models, strategies
from labs.words import counted
from labs.workers import devices
from labs.workers.launcher import launch

SAVED_ON, LOADED_ON = 4, 2
LAYERS, HIDDEN, HEADS = 2, 99, 3  # so wide that a file is more numbers than names
# of the run that is saved, as after some steps of a schedule
RATE = strategy_checks.SETTINGS["lr"] / 2
_OWN_SHARDS = "Each rank writes its own shards; no rank needs the full state."
# A part of what torch raises inside save or load -> the hint to give with it.
_HINTS = {"Missing key": "Save and load the same names: the same dictionary on both sides.",
          "pickle": "torch.distributed.checkpoint.save takes DTensors, which know their place in "
                    "the full tensor.",
          "different meshes": "torch.save writes a shard as this rank has it; dcp.save and dcp.load"
                              " reshard for other ranks.",
          "'tuple' object": "get_state_dict gives two dictionaries: put them into one, "
                            "{\"model\": ..., \"optimizer\": ...}.",
          ".metadata": "dcp.load reads what dcp.save wrote: both on the same folder."}
_SHOWN = 160  # characters of what torch raises: it repeats itself for each parameter, or each rank


@check("4.7", hints=_HINTS)
def check_checkpoint(save: Callable, load: Callable) -> str:
    """save(module, optimizer, folder) on 4 ranks, load(module, optimizer, folder) on 2: parameters,
    moments and learning rate are as if training had continued, and no rank gathers the full
    state."""
    with tempfile.TemporaryDirectory(prefix="labs-checkpoint-") as folder:
        saved, later = launch(_train_and_save, save, folder, ranks=SAVED_ON, quiet=True)[0]
        _judge_files(Path(folder))
        launch(_load_and_train, load, folder, saved, later, ranks=LOADED_ON, quiet=True)
    return (f"written by {SAVED_ON} ranks, each its share, and read by {LOADED_ON}, nothing "
            "gathered: parameters, moments and learning rate are the same, and training continues")


def _make_model(seed=0):
    return models.move_to_rank(models.gpt2(LAYERS, HIDDEN, HEADS, strategy_checks.CONTEXT, seed))


def _build(seed):
    return strategies.fsdp2(_make_model(seed), torch.optim.AdamW, **strategy_checks.SETTINGS)


def _train(module, optimizer, seeds):
    """Trains one step for each seed; a batch depends on its seed, not on the number of ranks."""
    for seed in seeds:
        [batch] = strategy_checks.batches(1, 8, strategy_checks.CONTEXT, seed=seed)
        module(**Step(batch).inputs()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _set_rate(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = RATE


def _train_and_save(save, folder) -> tuple[dict, dict]:
    """Returns the parameters when they are saved, and after two more steps."""
    module, optimizer = _build(seed=0)
    _train(module, optimizer, (1, 2))
    _set_rate(optimizer)
    saved, before = strategy_checks.whole_parameters(module), _state(optimizer)
    with Traffic() as traffic, _futures() as futures:
        with _briefly("save"):
            save(module, optimizer, folder)
        running = not all(future.done() for future in futures)
        for future in futures:  # the thread that saves calls collectives of its own
            wait([getattr(future, "upload_completion", future)])
    raise_on_all_ranks(_judge_finished, running)
    raise_on_all_ranks(_judge_unchanged, before, _state(optimizer))
    raise_on_all_ranks(_judge_gathered, traffic, "save")
    dist.barrier()
    _train(module, optimizer, (3, 4))
    return saved, strategy_checks.whole_parameters(module)


@contextlib.contextmanager
def _briefly(what) -> Iterator[None]:
    """Shortens what torch raises inside the block to its beginning and the student's line: a
    hint would stand below 4 kB of it, which torch's loaders also log."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    except (CheckpointException, RuntimeError) as error:  # the first is no Exception
        cause = error
        if isinstance(error, CheckpointException):  # its message has the tracebacks of all ranks
            cause = next(iter(error.failures.values()))[0]
        text = " ".join(str(cause).split())
        if isinstance(error, NotImplementedError) or len(text) <= _SHOWN and cause is error:
            raise
        known = next((part for part in _HINTS if part in text), "")
        start = text.rfind(" ", 0, max(0, text.find(known) - _SHOWN // 2)) + 1  # of a word
        raise Wrong(f"rank {dist.get_rank()}: {what} raised {type(cause).__name__}: "
                    f"{'… ' * (start > 0)}{text[start:start + _SHOWN]}"
                    + " … (all of it: labs.last_failure().traceback)" * (len(text) > _SHOWN),
                    _HINTS.get(known, ""), own_place(error),
                    code=f"raised_{type(cause).__name__}") from error
    finally:
        logging.disable(before)


def _state(optimizer) -> list[torch.Tensor]:
    """Returns copies of this rank's shards of the moments, and of the step counters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [getattr(v, "_local_tensor", v).clone() for v in values if torch.is_tensor(v)]


def _judge_unchanged(before, after):
    # Training continues after a save as it would have without it.
    if len(before) != len(after) or not all(map(torch.equal, before, after)):
        raise Wrong(f"rank {dist.get_rank()}: save changes the optimizer's state",
                    "Write what is there; get_state_dict gives it without changing it.",
                    code="optimizer_changed")


@contextlib.contextmanager
def _futures() -> Iterator[list]:
    """Yields a list that collects the future of every asynchronous save."""
    found = []

    def remembered(original):
        def execute_save(self, *args, **kwargs):
            found.append(original(self, *args, **kwargs))
            return found[-1]
        return execute_save

    with contextlib.ExitStack() as stack:
        # Private, because the future that async_save returns stays in the student's function.
        for kind in _async_executor._AsyncCheckpointExecutor.__subclasses__():
            stack.enter_context(mock.patch.object(kind, "execute_save",
                                                  remembered(kind.execute_save)))
        yield found


def _judge_finished(running):
    # async_save returns while a thread writes: a job that loads, or ends, now finds half a file.
    if running:
        raise Wrong(f"rank {dist.get_rank()}: save returned while the checkpoint is still being "
                    "written", "dcp.async_save returns a future: call its result() before the "
                    "checkpoint is needed, here at the end of save.", code="never_waited")


def _judge_gathered(traffic, what):
    # A full model is gathered from its shards: who saves that needs the memory of all on one rank.
    # Names and offsets are communicated too; they are few bytes.
    gathered = sum(call.bytes for call in traffic.of("all_gather", "gather", "all_to_all"))
    parameters = 4 * models.count_trainable(_make_model())
    if gathered > 0.5 * parameters:
        raise Wrong(f"rank {dist.get_rank()}: {what} gathers {gathered:,} bytes; the model's "
                    f"parameters are {parameters:,}: shards were gathered to full tensors",
                    "get_state_dict(module, optimizer) without full_state_dict; dcp writes and "
                    "reads shards as they are.", code="full_tensor_gathered")


def _judge_files(folder):
    sizes = sorted(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    whole = 12 * models.count_trainable(_make_model())  # bytes of 3 fp32 numbers each
    if not sizes:
        raise Wrong("save wrote nothing into the folder",
                    "torch.distributed.checkpoint.save(state, checkpoint_id=folder)",
                    code="nothing_saved")
    # Every rank writes: in one file are the shards of one rank, whatever rank wrote into it before.
    if sum(size > 0 for size in sizes) < SAVED_ON:
        raise Wrong(f"{SAVED_ON} ranks saved, and the folder holds "
                    f"{counted(sum(size > 0 for size in sizes), 'file')}: the shards of the others "
                    "are not there", "Each rank writes its own shards, into a file of its own.",
                    code="shards_missing")
    # And each writes its share: as many files may also be as many full copies.
    if sizes[-1] > 0.6 * whole:
        raise Wrong(f"one file has {sizes[-1]:,} bytes; parameters and moments are {whole:,}: a "
                    "rank wrote more than its share", _OWN_SHARDS, code="saves_others_shards")
    # All shares together are the state once: more are copies, less leaves something out.
    if sum(sizes) > 1.6 * whole:
        raise Wrong(f"all files together have {sum(sizes):,} bytes; parameters and moments are "
                    f"{whole:,}: some of it is written twice", _OWN_SHARDS, code="saved_twice")
    if sum(sizes) < whole:
        raise Wrong(f"all files together have {sum(sizes):,} bytes; parameters and moments are "
                    f"{whole:,}: something is not saved",
                    "A checkpoint has the model's parameters and the optimizer's two moments.",
                    code="saved_too_little")


def _load_and_train(load, folder, saved, later):
    module, optimizer = _build(seed=1)
    with Traffic() as traffic:
        with _briefly("load"):
            load(module, optimizer, folder)
    raise_on_all_ranks(_judge_gathered, traffic, "load")
    # The parameters are those of the saved run: an empty load leaves those of another seed.
    loaded = strategy_checks.whole_parameters(module)
    raise_on_all_ranks(_judge_parameters, loaded, saved, "after load",
                       "Load into the state of this module, then put it in place: set_state_dict.")
    raise_on_all_ranks(_judge_state, optimizer)
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    _set_rate(optimizer)  # so that the next steps depend on the moments alone
    # Two more steps equal the saved run's: parameters without moments take other steps.
    _train(module, optimizer, (3, 4))
    raise_on_all_ranks(_judge_parameters, strategy_checks.whole_parameters(module), later,
                       "two steps after load", "Are the optimizer's moments those of the saved "
                       "run, and its step counters?")
    raise_on_all_ranks(_judge_rate, rates)


def _judge_state(optimizer):
    # An optimizer that has made no step has no state: its state_dict() has nothing to be filled.
    if not optimizer.state:
        raise Wrong(f"rank {dist.get_rank()} of {LOADED_ON}, after load: the optimizer has no "
                    "moments", "A fresh optimizer's own state_dict() is empty, so dcp.load fills "
                    "nothing; get_state_dict(module, optimizer) makes room for the moments first.",
                    code="optimizer_state_missing")


def _judge_rate(rates):
    # dcp.load fills tensors in place, so without set_state_dict only what is no tensor is lost.
    if rates != {RATE}:
        raise Wrong(f"rank {dist.get_rank()} of {LOADED_ON}, after load: the optimizer's learning "
                    f"rate is {rates.pop():g}; {RATE:g} was saved",
                    "dcp.load fills tensors in place, so parameters and moments came by "
                    "themselves; set_state_dict puts everything in place, also what is no tensor.",
                    code="settings_not_restored")


def _judge_parameters(got, want, when, hint):
    for name, value in want.items():
        apart = largest_difference(got[name], value)
        if apart > TRAINED:
            raise Wrong(f"rank {dist.get_rank()} of {LOADED_ON}, parameter {name!r} {when}: it "
                        f"differs from the saved run's by {apart:.2g}", hint,
                        code="state_not_restored")


@shows("State dicts")
def show_state_dicts(strategy: Callable, ranks: int = 4) -> Table:
    """Returns a table of what each rank holds of a sharded and of a full state dict."""
    # gloo gathers a DTensor by a call that it has for the CPU's tensors only (pytorch issue
    # 132471), so ranks that share a GPU stay off it; bytes are the same.
    alone = devices.plan(ranks).library == "nccl"
    by_rank = launch(scaffold.state_dict_bytes, strategy, ranks=ranks, quiet=True,
                     device=None if alone else "cpu")
    rows = [(f"rank {rank}", *(f"{nbytes / 1e3:,.0f}" for nbytes in found.values()))
            for rank, found in enumerate(by_rank)]
    return Table("kB of parameters in a state dict", ("", *by_rank[0]), rows,
                 note="A full one is gathered tensor by tensor, and kept on rank 0's host; any "
                      "program can read it. A sharded one is never gathered.")

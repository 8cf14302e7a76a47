"""Exercise 4.7: a sharded checkpoint that another number of ranks can load."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import TOLERANCE, largest_difference, raise_on_all_ranks
from labs.exercises.reference import Step
from labs.exercises.verdicts import Wrong, check
from labs.fsdp.checks import common
from labs.training import data, models, strategies
from labs.words import counted
from labs.workers.launcher import launch

SAVED_ON, LOADED_ON = 4, 2
RATE = common.SETTINGS["lr"] / 2  # of the run that is saved, as after some steps of a schedule
_OPTIONS = {"quiet": True, "device": "cpu"}
_OWN_SHARDS = "Each rank writes its own shards; nobody needs the whole."


@check("4.7", hints={"Missing key": "Save and load the same names: the same dictionary on both "
                                    "sides.",
                     "pickle": "torch.distributed.checkpoint.save takes tensors that know their "
                               "place in the whole.",
                     "different meshes": "torch.save writes a shard as this rank has it; dcp.save "
                                         "and dcp.load cut shards anew for other ranks.",
                     "'tuple' object": "get_state_dict gives two dictionaries: put them into one, "
                                       "{\"model\": ..., \"optimizer\": ...}."})
def check_checkpoint(save: Callable, load: Callable) -> str:
    """save(module, optimizer, folder) on 4 ranks, load(module, optimizer, folder) on 2: parameters,
    moments and learning rate are as if training had gone on."""
    with tempfile.TemporaryDirectory(prefix="labs-checkpoint-") as folder:
        saved, later = launch(_train_and_save, save, folder, ranks=SAVED_ON, **_OPTIONS)[0]
        _check_files(Path(folder))
        launch(_load_and_train, load, folder, saved, later, ranks=LOADED_ON, **_OPTIONS)
    return (f"written by {SAVED_ON} ranks, each its share, and read by {LOADED_ON}: parameters, "
            "moments and learning rate are the same, and training goes on")


def _build(seed):
    return strategies.fsdp2(common.make_model(seed), torch.optim.AdamW, **common.SETTINGS)


def _train(module, optimizer, seeds):
    """Trains one step for each seed; a batch depends on its seed, not on the number of ranks."""
    for seed in seeds:
        [batch] = data.lm_batches(1, 8, common.CONTEXT, seed=seed)
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
    saved = common.whole_parameters(module)
    save(module, optimizer, folder)
    dist.barrier()
    _train(module, optimizer, (3, 4))
    return saved, common.whole_parameters(module)


def _check_files(folder):
    sizes = sorted(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    whole = 12 * models.count_trainable(common.make_model())  # bytes of 3 fp32 numbers each
    if not sizes:
        raise Wrong("save wrote nothing into the folder",
                    "torch.distributed.checkpoint.save(state, checkpoint_id=folder)")
    # Every rank writes: one file is a full state dict that rank 0 gathered.
    if len(sizes) < SAVED_ON:
        raise Wrong(f"save wrote {counted(len(sizes), 'file')} on {SAVED_ON} ranks: one rank wrote "
                    "for all", _OWN_SHARDS)
    # And each writes its share: as many files may also be as many full copies.
    if sizes[-1] > 0.9 * whole:
        raise Wrong(f"one file has {sizes[-1]:,} bytes; parameters and moments are {whole:,}: a "
                    "rank wrote more than its share", _OWN_SHARDS)


def _load_and_train(load, folder, saved, later):
    module, optimizer = _build(seed=1)
    load(module, optimizer, folder)
    # The parameters are those of the saved run: an empty load leaves those of another seed.
    raise_on_all_ranks(_check_parameters, common.whole_parameters(module), saved, "after load",
                       "Load into the state of this module, then put it in place: set_state_dict.")
    rates = {group["lr"] for group in optimizer.param_groups}
    _set_rate(optimizer)  # so that the next steps depend on the moments alone
    # Two more steps equal the saved run's: parameters without moments take other steps.
    _train(module, optimizer, (3, 4))
    raise_on_all_ranks(_check_parameters, common.whole_parameters(module), later,
                       "two steps after load", "Are the optimizer's moments saved and loaded too?")
    raise_on_all_ranks(_check_rate, rates)


def _check_rate(rates):
    # dcp.load fills tensors in place, so without set_state_dict only what is no tensor is lost.
    if rates != {RATE}:
        raise Wrong(f"rank {dist.get_rank()} of {LOADED_ON}, after load: the optimizer's learning "
                    f"rate is {rates.pop():g}; {RATE:g} was saved",
                    "dcp.load fills tensors in place, so parameters and moments came by "
                    "themselves; set_state_dict puts everything in place, also what is no tensor.")


def _check_parameters(got, want, when, hint):
    for name, value in want.items():
        apart = largest_difference(got[name], value)
        if apart > 50 * TOLERANCE:
            raise Wrong(f"rank {dist.get_rank()} of {LOADED_ON}, parameter {name!r} {when}: it "
                        f"differs from the saved run's by {apart:.2g}", hint)

"""Check of exercise 4.7: a checkpoint in shards that another number of ranks can load; and what a
full state dict costs beside it."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from labs.exercises.on_ranks import TOLERANCE, raise_on_all_ranks, worst
from labs.exercises.verdicts import Wrong, check, shows
from labs.fsdp import trained
from labs.pictures.tables import Table
from labs.training import data, strategies
from labs.workers.launcher import launch

SAVED_ON, LOADED_ON = 4, 2
RATE = trained.SETTINGS["lr"] / 2  # of the run that is saved, as after some steps of a schedule
_OPTIONS = {"quiet": True, "device": "cpu"}


@check("4.7", hints={"Missing key": "Save and load the same names: the same dictionary on both "
                                    "sides.",
                     "pickle": "torch.distributed.checkpoint.save takes tensors that know their "
                               "place in the whole.",
                     "different meshes": "torch.save writes a shard as it lies; dcp.save and "
                                         "dcp.load cut shards anew for other ranks.",
                     "'tuple' object": "get_state_dict gives two dictionaries: put them into one, "
                                       "{\"model\": ..., \"optimizer\": ...}."})
def check_checkpoint(save, load):
    """save(module, optimizer, folder) on 4 ranks, load(module, optimizer, folder) on 2: parameters,
    moments and learning rate are as if training had gone on."""
    with tempfile.TemporaryDirectory(prefix="labs-checkpoint-") as folder:
        want = launch(_save, save, folder, ranks=SAVED_ON, **_OPTIONS)[0]
        _judge_files(Path(folder))
        launch(_load, load, folder, want, ranks=LOADED_ON, **_OPTIONS)
    return (f"written by {SAVED_ON} ranks, each its share, and read by {LOADED_ON}: parameters, "
            "moments and learning rate are the same, and training goes on")


def _build(seed):
    torch.manual_seed(seed)
    made = trained.models.gpt2(trained.LAYERS, trained.HIDDEN, trained.HEADS, trained.CONTEXT,
                               seed=seed)
    return strategies.fsdp2(made, torch.optim.AdamW, **trained.SETTINGS)


def _train(module, optimizer, numbers):
    """Steps with batches that do not depend on the number of ranks."""
    for number in numbers:
        [batch] = data.lm_batches(1, 8, trained.CONTEXT, seed=number)
        module(**trained.share(batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _set_rate(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = RATE


def _wholes(module) -> dict:
    return {name: trained.whole(p).clone() for name, p in module.named_parameters()}


def _save(save, folder) -> tuple:
    """Parameters when they are saved, and after two steps more."""
    module, optimizer = _build(seed=0)
    _train(module, optimizer, (1, 2))
    _set_rate(optimizer)
    saved = _wholes(module)
    save(module, optimizer, folder)
    dist.barrier()
    _train(module, optimizer, (3, 4))
    return saved, _wholes(module)


def _judge_files(folder):
    sizes = sorted(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    whole = 12 * trained.models.count_trainable(trained.model())  # parameters and two moments, fp32
    if not sizes:
        raise Wrong("save wrote nothing into the folder",
                    "torch.distributed.checkpoint.save(state, checkpoint_id=folder)")
    if len(sizes) < SAVED_ON:
        raise Wrong(f"save wrote {len(sizes)} file{'s' * (len(sizes) > 1)} on {SAVED_ON} ranks: "
                    "one rank wrote for all", "Each rank writes its own shards; nobody needs the "
                    "whole.")
    if sizes[-1] > 0.9 * whole:
        raise Wrong(f"one file has {sizes[-1]:,} bytes; parameters and moments are {whole:,}: a "
                    "rank wrote more than its share", "Each rank writes its own shards; nobody "
                    "needs the whole.")


def _load(load, folder, want):
    module, optimizer = _build(seed=1)
    load(module, optimizer, folder)
    saved, later = want
    raise_on_all_ranks(_judge, _wholes(module), saved, "after load",
                       "Load into the state of this module, "
             "then put it in place: set_state_dict.")
    rates = {group["lr"] for group in optimizer.param_groups}
    _set_rate(optimizer)  # so that the moments are judged by themselves
    _train(module, optimizer, (3, 4))
    raise_on_all_ranks(_judge, _wholes(module), later, "two steps after load",
             "Are the optimizer's moments saved and loaded too?")
    raise_on_all_ranks(_judge_rate, rates)


def _judge_rate(rates):
    if rates != {RATE}:
        raise Wrong(f"rank {dist.get_rank()} of {LOADED_ON}, after load: the optimizer's learning "
                    f"rate is {rates.pop():g}; {RATE:g} was saved",
                    "dcp.load fills tensors where they are, so parameters and moments came by "
                    "themselves; set_state_dict puts everything in place, also what is no tensor.")


def _judge(got, want, when, hint):
    for name, value in want.items():
        apart = worst(got[name], value)
        if apart > 50 * TOLERANCE:
            raise Wrong(f"rank {dist.get_rank()} of {LOADED_ON}, parameter {name!r} {when}: it "
                        f"differs from the saved run's by {apart:.2g}", hint)


@shows("4.1")
def state_dicts(strategy) -> Table:
    """What each rank holds of a sharded and of a full state dict."""
    results = launch(_held, strategy, ranks=SAVED_ON, **_OPTIONS)
    rows = [(f"rank {rank}", *(f"{found[kind] / 1e3:,.0f}" for kind in found))
            for rank, found in enumerate(results)]
    return Table("kB of parameters in a state dict", ("", *results[0]), rows,
                 note="A full one is gathered tensor by tensor, and kept on rank 0's host; any "
                      "program can read it. A sharded one is never gathered.")


def _held(strategy) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    module, _ = trained.built(strategy, trained.model())
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"sharded": _bytes(get_model_state_dict(module)),
            "full": _bytes(get_model_state_dict(module, options=full))}


def _bytes(state) -> int:
    """Bytes of the tensors' own memory; tied ones once."""
    found = {}
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        found[local.untyped_storage().data_ptr()] = local.numel() * local.element_size()
    return sum(found.values())

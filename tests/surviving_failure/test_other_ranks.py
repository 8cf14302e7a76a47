"""What the check of exercise 8.2 must reject, and accept: jobs that are saved on one number of
ranks and loaded on another."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _build.definitions import definitions
from answers import assert_rejected
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from labs.checks.verdicts import check
from labs.surviving_failure.other_ranks import Functions, check_other_ranks, verify
from labs.surviving_failure.resumable_job import ResumableJob

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("08_surviving_failure")
zero3 = definitions("03_zero_stages").zero3
MOMENTS = ("exp_avg", "exp_avg_sq")
SAVED_ON, LOADED_ON = 3, 2
FULL = StateDictOptions(full_state_dict=True)


@check("8.2")
def few_ranks(kind, save, load):
    """The check for one kind of job, from SAVED_ON ranks to LOADED_ON only."""
    mine = (right.save_dcp, right.load_dcp, save, load) if kind == "ZeRO-3" else (
        save, load, right.save_shards, right.load_shards)
    return f"{verify(Functions(*mine, zero3), SAVED_ON, (LOADED_ON,), kinds=(kind,))}"


def nothing(job, folder):
    pass


# ZeRO-3


def saved_by_old_ranks(folder):
    return [torch.load(folder / f"rank_{old}.pt") for old in range(SAVED_ON)]


def load_with(cut, names=("shard", *MOMENTS), replicated=lambda name: True, step=lambda step: step,
              progress=ResumableJob.load_progress_state):
    """load_shards with cut(unit, old shards, name) for this rank's shard."""
    def load(job, folder):
        saved = saved_by_old_ranks(folder)
        for number, unit in enumerate(job.module.units):
            parts = [each["units"][number] for each in saved]
            own = {name: cut(unit, [part[name] for part in parts], name) for name in names}
            if "shard" in own:
                unit.shard.data.copy_(own.pop("shard"))
            if own:
                job.optimizer.state[unit.shard] = {"step": step(parts[0]["step"]), **own}
        for name, tensor in saved[0]["replicated"].items():
            if replicated(name):
                job.tensors()[name].copy_(tensor)
        progress(job, saved[0]["progress"])

    return load


def cut_right(unit, old, name="shard"):
    return right.reshard(unit, old)


def as_it_is(unit, old, name):
    return old[dist.get_rank()]


def beginning_of_own(unit, old, name):
    new = torch.zeros(unit.shard_elements)
    new[:len(old[0])] = old[dist.get_rank()]
    return new


def moments_as_they_are(unit, old, name):
    return cut_right(unit, old) if name == "shard" else old[dist.get_rank()]


def moments_not_cut(unit, old, name):
    return (cut_right if name == "shard" else beginning_of_own)(unit, old, name)


def padding_after_each(unit, old, name):
    """Takes the padding to be at the end of each old shard."""
    kept = [each[:unit.elements // len(old)] for each in old]
    return cut_right(unit, [*kept, torch.zeros(len(old))])


def a_view(unit, old, name):
    whole = torch.cat(old)[:unit.elements]
    padding = torch.zeros(dist.get_world_size() * unit.shard_elements - unit.elements)
    return torch.cat([whole, padding]).view(-1, unit.shard_elements)[dist.get_rank()]


def replaced_as_it_is(job, folder):
    saved = saved_by_old_ranks(folder)[dist.get_rank()]
    for unit, part in zip(job.module.units, saved["units"], strict=True):
        unit.shard.data = part["shard"]
        job.optimizer.state[unit.shard] = {name: part[name] for name in ("step", *MOMENTS)}
    job.load_progress_state(saved["progress"])


def rank_0_loads(job, folder):
    if dist.get_rank() == 0:
        right.load_shards(job, folder)
    else:
        job.load_progress_state(torch.load(folder / "rank_0.pt")["progress"])


def gathered(job):
    """All shards, on every rank."""
    units = []
    for unit in job.module.units:
        state = {"shard": unit.shard.detach(), **job.optimizer.state[unit.shard]}
        for name in ("shard", *MOMENTS):
            pieces = [torch.empty_like(state[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, state[name])
            state[name] = torch.cat(pieces)
        units.append(state)
    return {"units": units, "replicated": {}, "progress": job.progress_state()}


def rank_0_gathers(job, folder):
    state = gathered(job)
    if dist.get_rank() == 0:
        torch.save(state, folder / "rank_0.pt")


def rank_0_alone_saves(job, folder):
    if dist.get_rank() == 0:
        right.save_shards(job, folder)


def everything_in_each_file(job, folder):
    right.save_shards(job, folder)
    state = torch.load(folder / f"rank_{dist.get_rank()}.pt")
    state["more"] = torch.zeros(12_000)
    torch.save(state, folder / f"rank_{dist.get_rank()}.pt")


def decays(job, folder):
    right.save_shards(job, folder)
    for unit in job.module.units:
        unit.shard.data.mul_(0.9)


def progress_without_rate(job, progress):
    job.scheduler.load_state_dict(progress["scheduler"])
    job.data.epoch, job.data.position = progress["epoch"], progress["position"]
    job.step = progress["step"]


def position_in_rows(job, progress):
    job.load_progress_state(progress)
    job.data.position = progress["position"] * SAVED_ON // dist.get_world_size()


def not_a_buffer(name):
    return name != "center"


SHARDS = [
    (nothing, nothing, "nothing_saved ZeRO-3"),
    (right.save_shards, nothing, "optimizer_state_missing"),
    (right.save_shards, load_with(as_it_is), "raised_RuntimeError size"),
    (right.save_shards, replaced_as_it_is,
     "wrong_size parameters"),
    (right.save_shards, load_with(beginning_of_own),
     "state_not_restored"),
    (right.save_shards, load_with(cut_right, names=["shard"]), "optimizer_state_missing"),
    (right.save_shards, load_with(moments_as_they_are), "wrong_size exp_avg"),
    (right.save_shards, load_with(moments_not_cut), "state_not_restored exp_avg"),
    (right.save_shards, load_with(padding_after_each), "state_not_restored"),
    (right.save_shards, load_with(lambda unit, old, name: cut_right(unit, old[::-1])),
     "state_not_restored"),
    (right.save_shards, load_with(a_view), "memory_kept"),
    (right.save_shards, rank_0_loads, "optimizer_state_missing"),
    (rank_0_gathers, nothing, "full_tensor_gathered"),
    (rank_0_alone_saves, nothing, "shards_missing"),
    (everything_in_each_file, right.load_shards, "saves_others_shards"),
    (decays, right.load_shards, "state_changed"),
    (right.save_shards, load_with(cut_right, replicated=lambda name: False),
     "state_not_restored frozen"),
    (right.save_shards, load_with(cut_right, replicated=not_a_buffer),
     "state_not_restored buffers"),
    (right.save_shards, load_with(cut_right, step=lambda step: step * 0),
     "settings_not_restored tensors"),
    (right.save_shards, load_with(cut_right, progress=lambda job, progress: None),
     "settings_not_restored"),
    (right.save_shards, load_with(cut_right, progress=progress_without_rate),
     "settings_not_restored"),
    (right.save_shards, load_with(cut_right, progress=position_in_rows),
     "settings_not_restored position"),
]


# DDP and FSDP2


def save_parameters(job, folder):
    dcp.save({"model": get_model_state_dict(job.module), "progress": job.progress_state()},
             checkpoint_id=folder)


def load_parameters(job, folder):
    state = {"model": get_model_state_dict(job.module), "progress": job.progress_state()}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(job.module, state["model"])
    job.load_progress_state(state["progress"])


def load_and_drop(job, folder):
    model, optimizer = get_state_dict(job.module, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "progress": job.progress_state()}
    dcp.load(state, checkpoint_id=folder)
    job.optimizer.state.clear()
    set_model_state_dict(job.module, state["model"])
    job.load_progress_state(state["progress"])


def save_full(job, folder):
    model, optimizer = get_state_dict(job.module, job.optimizer, options=FULL)
    dcp.save({"model": model, "optimizer": optimizer, "progress": job.progress_state()},
             checkpoint_id=folder)


def save_own_file(job, folder):
    model, optimizer = get_state_dict(job.module, job.optimizer)
    torch.save({"model": model, "optimizer": optimizer, "progress": job.progress_state()},
               folder / f"rank_{dist.get_rank()}.pt")


def load_own_file(job, folder):
    state = torch.load(folder / f"rank_{dist.get_rank()}.pt", weights_only=False)
    set_state_dict(job.module, job.optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
    job.load_progress_state(state["progress"])


def load_without_progress(job, folder):
    progress = job.progress_state()
    right.load_dcp(job, folder)
    job.load_progress_state(progress)


def load_after_a_try(job, folder):
    """Leaves gradients, so that DCP takes the optimizer for one that has made steps."""
    for parameter in job.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    right.load_dcp(job, folder)
    job.optimizer.zero_grad()


def load_beside_old_gradients(job, folder):
    """A new job whose first backward adds to what a try has left."""
    right.load_dcp(job, folder)
    for parameter in job.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def load_on_rank_0(job, folder):
    before = {name: tensor.clone() for name, tensor in job.tensors().items()}
    right.load_dcp(job, folder)
    if dist.get_rank() > 0:
        for name, tensor in job.tensors().items():
            tensor.copy_(before[name])


DCP = [
    ("DDP", nothing, nothing, "nothing_saved DDP"),
    ("DDP", right.save_dcp, nothing, "optimizer_state_missing"),
    ("DDP", save_parameters, load_parameters, "optimizer_state_missing"),
    ("FSDP2", save_parameters, load_parameters, "optimizer_state_missing"),
    ("FSDP2", right.save_dcp, load_and_drop, "optimizer_state_missing"),
    ("FSDP2", right.save_dcp, load_after_a_try, "optimizer_state_missing"),
    ("FSDP2", save_full, right.load_dcp, "full_tensor_gathered FSDP2"),
    ("FSDP2", save_own_file, load_own_file, "raised_RuntimeError"),
    ("FSDP2", right.save_dcp, load_without_progress, "settings_not_restored"),
    ("FSDP2", right.save_dcp, load_beside_old_gradients, "wrong_loss"),
    ("DDP", right.save_dcp, load_on_rank_0, "state_not_restored embedding.weight"),
]


@pytest.mark.parametrize(("kind", "save", "load", "words"),
                         [*(("ZeRO-3", *answer) for answer in SHARDS), *DCP])
def test_wrong_answers(kind, save, load, words):
    assert_rejected(few_ranks(kind, save, load), words)


# Right answers


def save_flat(job, folder):
    """Plain names, no dictionary of the lab's."""
    torch.save([[unit.shard.data, job.optimizer.state[unit.shard]] for unit in job.module.units]
               + [dict(job.model.named_buffers()), job.model.scale.data, job.scheduler.state_dict(),
                  (job.data.epoch, job.data.position, job.step)],
               folder / f"{dist.get_rank()}-of-{dist.get_world_size()}")


def load_flat(job, folder):
    files = sorted(folder.glob("*-of-*"), key=lambda path: int(path.name.split("-")[0]))
    saved = [torch.load(path, mmap=True) for path in files]
    for number, unit in enumerate(job.module.units):
        def own(tensors, unit=unit):
            pad = dist.get_world_size() * unit.shard_elements
            joined = torch.nn.functional.pad(torch.cat(tensors), (0, pad))
            begin = dist.get_rank() * unit.shard_elements
            return joined[begin:begin + unit.shard_elements].clone()

        unit.shard.data = own([each[number][0] for each in saved])
        job.optimizer.state[unit.shard] = {
            name: own([each[number][1][name] for each in saved]) if value.dim() else value.clone()
            for name, value in saved[0][number][1].items()}
    *_, buffers, scale, schedule, (job.data.epoch, job.data.position, job.step) = saved[0]
    job.model.scale.data.copy_(scale)
    job.model.center.copy_(buffers["center"])
    job.scheduler.load_state_dict(schedule)
    job.optimizer.param_groups[0]["lr"] = job.scheduler.get_last_lr()[0]


def test_right_answers(nothing_left):
    verdict = check_other_ranks(right.save_dcp, right.load_dcp, right.save_shards,
                                right.load_shards, zero3)
    assert verdict.passed, str(verdict)


def test_shards_written_differently():
    verdict = few_ranks("ZeRO-3", save_flat, load_flat)
    assert verdict.passed, str(verdict)

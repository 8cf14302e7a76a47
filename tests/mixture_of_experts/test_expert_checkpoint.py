"""Checkpoints of experts that exercise 9.12 must reject, and right ones written differently."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _build.definitions import definitions
from answers import assert_rejected, assert_waits
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from labs.mixture_of_experts.expert_checkpoint import check_expert_checkpoint

pytestmark = pytest.mark.usefixtures("warm_launcher")


def as_dtensors(model, mesh, placements=None, skip="no such name"):
    placements = placements or (Replicate(), Shard(0))
    return {name: DTensor.from_local(p.detach(), mesh, placements) if ".experts." in name
            else p.detach() for name, p in model.named_parameters() if skip not in name}


def save(model, folder, mesh):
    dcp.save(as_dtensors(model, mesh), checkpoint_id=folder)


def load(model, folder, mesh):
    dcp.load(as_dtensors(model, mesh), checkpoint_id=folder)


def save_files(model, folder, mesh, twice=False):
    """A file for each expert of each parameter, from replica 0; all else from rank 0."""
    first = mesh["expert"].get_local_rank()
    for name, p in model.named_parameters():
        if ".experts." in name:
            if twice or mesh["replicate"].get_local_rank() == 0:
                for index, expert in enumerate(p.detach()):
                    suffix = f".{dist.get_rank()}" if twice else ""
                    torch.save(expert.clone(), folder / f"{name}.{first * len(p) + index}{suffix}")
        elif dist.get_rank() == 0:
            torch.save(p.detach().clone(), folder / name)
    dist.barrier()


def load_files(model, folder, mesh, as_text=False, first=None, skip="no such name"):
    first = mesh["expert"].get_local_rank() if first is None else first
    with torch.no_grad():
        for name, p in model.named_parameters():
            if skip in name:
                continue
            if ".experts." not in name:
                p.copy_(torch.load(folder / name))
                continue
            files = sorted(folder.glob(f"{name}.*"),
                           key=(lambda path: path.name) if as_text else
                           lambda path: int(path.name.rsplit(".", 1)[1]))
            for index in range(len(p)):
                p[index].copy_(torch.load(files[first * len(p) + index]))


def nothing(model, folder, mesh):
    pass


def rank_0_saves(model, folder, mesh):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    dist.barrier()


def load_state(model, folder, mesh):
    model.load_state_dict(torch.load(folder / "model.pt"))


def file_of_each_rank(model, folder, mesh):
    torch.save(model.state_dict(), folder / f"{dist.get_rank()}.pt")
    dist.barrier()


def load_own_file(model, folder, mesh):
    model.load_state_dict(torch.load(folder / f"{dist.get_rank()}.pt"))


def gathers(model, folder, mesh):
    state = {}
    for name, p in model.named_parameters():
        if ".experts." in name:
            parts = [torch.empty_like(p) for _ in range(mesh["expert"].size())]
            dist.all_gather(parts, p.detach(), group=mesh["expert"].get_group())
            p = torch.cat(parts)
        state[name] = p.detach()
    if dist.get_rank() == 0:
        torch.save(state, folder / "model.pt")
    dist.barrier()


def load_part(model, folder, mesh):
    whole = torch.load(folder / "model.pt")
    ranks, rank = mesh["expert"].size(), mesh["expert"].get_local_rank()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(whole[name].chunk(ranks)[rank] if ".experts." in name else whole[name])


def new_parameters(model, folder, mesh):
    load(model, folder, mesh)
    for block in model.layers:
        block.mlp.experts.down = nn.Parameter(block.mlp.experts.down.detach().clone())


def rank_0_loads(model, folder, mesh):
    if dist.get_rank() == 0:
        load_files(model, folder, mesh)
    dist.barrier()


def doubles(model, folder, mesh):
    save(model, folder, mesh)
    with torch.no_grad():
        model.head.weight.mul_(2)


def with_(function, **changes):
    return lambda model, folder, mesh: function(model, folder, mesh, **changes)


def skipping(name):
    def skipped(model, folder, mesh):
        dcp.load(as_dtensors(model, mesh, skip=name), checkpoint_id=folder)

    return skipped


def placed(*placements):
    return (lambda model, folder, mesh: dcp.save(as_dtensors(model, mesh, placements),
                                                 checkpoint_id=folder),
            lambda model, folder, mesh: dcp.load(as_dtensors(model, mesh, placements),
                                                 checkpoint_id=folder))


WRONG = {
    "nothing": ((nothing, nothing), "nothing_written"),
    "saves and does not load": ((save, nothing), "not_loaded"),
    "rank 0's part alone": ((rank_0_saves, load_state), "other_experts|raised_RuntimeError"),
    "a file of each rank": ((file_of_each_rank, load_own_file), "written_twice"),
    "gathered on all ranks": ((gathers, load_part), "gathered saving"),
    "replicas write too": ((with_(save_files, twice=True), load_files), "written_twice"),
    "names sorted as text": ((save_files, with_(load_files, as_text=True)), "other_experts 10"),
    "the first part on all ranks": ((save_files, with_(load_files, first=0)), "other_experts"),
    "the router is left out": ((save, skipping("router")), "not_loaded router"),
    "the frozen norm is left out": ((save, skipping("norm.weight")), "not_loaded norm"),
    "rank 0 alone loads": ((save_files, rank_0_loads), "not_loaded rank 1"),
    "new parameters": ((save, new_parameters), "parameter_replaced"),
    "changes the model": ((doubles, load), "model_changed"),
    "as if replicated": (placed(Replicate(), Replicate()),
                         "checkpoint_failed Size mismatch"),
    "sharded along another dimension": (placed(Replicate(), Shard(1)),
                                        "checkpoint_failed Size mismatch"),
}
RIGHT = {"DCP": (save, load), "a file for each expert": (save_files, load_files)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected(name):
    answer, expected = WRONG[name]
    assert_rejected(check_expert_checkpoint(*answer), expected)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(name):
    verdict = check_expert_checkpoint(*RIGHT[name])
    assert verdict.passed, str(verdict)


def test_the_solution_passes():
    of = definitions("09_mixture_of_experts")
    verdict = check_expert_checkpoint(of.save_experts, of.load_experts)
    assert verdict.passed, str(verdict)


def test_it_waits_for_an_untouched_gap():
    assert_waits(check_expert_checkpoint, "9.12", 2)

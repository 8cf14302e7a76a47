"""What the check of exercise 4.12 must reject, with the words that must say why, and what it must
accept. Most wrong answers are the solution with one line changed."""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from _build.definitions import ROOT
from fsdp_answers import accepted, rejected, right
from torch.distributed.tensor import DTensor, Shard

import labs.fsdp as lab
from labs.checks import previous_work

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
IMPORTS = "# %%\nimport torch\nimport torch.distributed as dist\nimport labs.fsdp as lab\n\n# %%\n"
SOURCE = (ROOT / "solutions/04_fsdp.py").read_text(encoding="utf-8")
CELLS = IMPORTS + SOURCE[SOURCE.index("class Shard("):SOURCE.index("lab.check_from_scratch(")]


def changed(folder, old, new):
    """Returns the solution's strategy with one piece of its source replaced."""
    assert CELLS.count(old) == 1, old
    path = folder / "changed.py"
    path.write_text(CELLS.replace(old, new), encoding="utf-8")
    return previous_work.definitions(path).my_fsdp


def nothing(model, optimizer_class, **settings):
    return model, optimizer_class(model.parameters(), **settings)


def optimizer_first(model, optimizer_class, **settings):
    optimizer = optimizer_class(model.parameters(), **settings)
    return right.my_fsdp(model, optimizer_class)[0], optimizer


@pytest.mark.parametrize("answer, words", [
    (nothing, "wrong_shape"),
    (right.mixed, "ready_made"),
    (optimizer_first, "optimizer_of_old_parameters")])
def test_a_strategy_of_another_kind_is_rejected(answer, words, capsys):
    rejected(lab.check_from_scratch, answer, words)


# name -> (a piece of the solution, what it is replaced by, words of the verdict)
CHANGES = {
    "the root forgotten": ("[*lab.blocks(model), model]", "lab.blocks(model)",
                           "wrong_shape"),
    "rows cut as evenly as possible": (
        "p.detach()[rank * k : (rank + 1) * k].clone()",
        "p.detach().tensor_split(ranks)[rank].clone()", "wrong_shape 172"),
    "the first rows on every rank": (
        "p.detach()[rank * k : (rank + 1) * k]", "p.detach()[:len(p.detach()[rank * k :][:k])]",
        "wrong_shard"),
    "shards in bf16": ("(rank + 1) * k].clone()", "(rank + 1) * k].bfloat16()",
                       "wrong_dtype"),
    "a view of the whole parameter": ("(rank + 1) * k].clone()", "(rank + 1) * k]",
                                      "parameter_memory_too_high"),
    "one place of a tied weight": (
        "found.setdefault(parameter, []).append((owner, name))",
        "found[parameter] = found.get(parameter) or [(owner, name)]",
        "tie_lost"),
    "gathered in fp32": (
        "unit.lengths)]).bfloat16()", "unit.lengths)])", "wrong_traffic_dtype all_gather"),
    "summed in bf16": (
        "    dist.reduce_scatter_single(total, flat)\n", "    half = total.bfloat16()\n"
        "    dist.reduce_scatter_single(half, flat.bfloat16())\n    total = half.float()\n",
        "wrong_traffic_dtype reduce_scatter"),
    "one all-gather for each parameter": (
        "        unit.in_flight = full, dist.all_gather_single(full.view(-1), mine, async_op=True)",
        "        for columns, own in zip(full.split(unit.lengths, 1), mine.split(unit.lengths)):\n"
        "            got = torch.empty_like(columns).contiguous()\n"
        "            handle = dist.all_gather_single(got.view(-1), own, async_op=True)\n"
        "            unit.in_flight = full, handle\n"
        "            unit.in_flight[1].wait()\n"
        "            columns.copy_(got)",
        "wrong_units"),
    "nothing freed after forward": (
        "if unit is not order[0]:", "if False:", "wrong_traffic"),
    "nothing fetched ahead": (
        "    start(order[max(order.index(unit) - 1, 0)])\n", "",
        "not_prefetched"),
    "fetched when the first gradient is there": (
        "    start(order[max(order.index(unit) - 1, 0)])\n",
        "    earlier = order[max(order.index(unit) - 1, 0)]\n"
        "    unit.unsharded[0].register_hook(lambda _: start(earlier))\n",
        "not_prefetched"),
    "waited for at once": (
        "mine, async_op=True)", "mine, async_op=True)\n        unit.in_flight[1].wait()",
        "waits_too_early"),
    "all fetched ahead": (
        "    start(order[max(order.index(unit) - 1, 0)])",
        "    list(map(start, order[:order.index(unit)]))",
        "gathered_at_once"),
    "a sum for a mean": ("(total / ranks)", "total", "sum_not_mean"),
    "the last micro-batch alone": (
        "piece.clone() if shard.grad is None else shard.grad + piece", "piece.clone()",
        "not_accumulated"),
    "whole between the steps": ("    free(unit)\n    flat", "    flat",
                                "wrong_traffic gathered"),
    "written where autograd looks": (
        "w.data.copy_(", "torch.no_grad()(w.copy_)(", "raised_RuntimeError through"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_solution_is_rejected_and_told_why(name, tmp_path, capsys):
    old, new, words = CHANGES[name]
    rejected(lab.check_from_scratch, changed(tmp_path, old, new), words)


# right answers, written otherwise


class Packed:
    """A unit: shards are DTensors, and each rank's rows are packed without padding in between."""

    def __init__(self, module, units):
        self.units, self.done, self.coming, ranks = units, 0, None, dist.get_world_size()
        slots = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not isinstance(parameter, DTensor):
                owner, _, leaf = name.rpartition(".")
                slots.setdefault(parameter, []).append((module.get_submodule(owner), leaf))
        mesh = lab.mesh()
        self.full = [torch.nn.Parameter(p.detach().to(torch.bfloat16)) for p in slots]
        self.rows = [[len(piece) for piece in p.chunk(ranks)] + [0] * ranks for p in slots]
        self.shards = [torch.nn.Parameter(DTensor.from_local(
            p.detach()[sum(rows[:dist.get_rank()]):][:rows[dist.get_rank()]].clone(), mesh,
            [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()))
            for p, rows in zip(slots, self.rows, strict=True)]
        self.slots = list(slots.values())
        for parameter in self.full:
            parameter.register_post_accumulate_grad_hook(self.reduce)
        self.length = sum(rows[0] * p[0].numel() for p, rows in zip(self.full, self.rows,
                                                                   strict=True))
        self.release()

    def show(self, parameters):
        for slots, parameter in zip(self.slots, parameters, strict=True):
            for owner, leaf in slots:
                owner.register_parameter(leaf, parameter)

    def release(self, *_):
        for parameter in self.full:
            parameter.untyped_storage().resize_(0)
        self.show(self.shards)

    def is_whole(self):
        return not self.full or self.full[0].untyped_storage().nbytes() > 0

    def pad(self, flat):
        return torch.cat([flat, flat.new_zeros(self.length - len(flat))])

    def begin(self):
        if self.coming is None and not self.is_whole():
            own = torch.cat([s.to_local().detach().flatten() for s in self.shards])
            own = self.pad(own.bfloat16())
            got = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            self.coming = got, dist.all_gather(got, own, async_op=True), own

    def arrive(self, *_):
        self.begin()
        if self.coming is None:
            return
        got, work, _ = self.coming
        work.wait()
        self.coming, places = None, [0] * len(got)
        for parameter, rows in zip(self.full, self.rows, strict=True):
            parameter.untyped_storage().resize_(parameter.numel() * 2)
            pieces = []
            for rank, piece in enumerate(got):
                count = rows[rank] * parameter[0].numel()
                pieces.append(piece[places[rank]:places[rank] + count])
                places[rank] += count
            parameter.data.copy_(torch.cat(pieces).view_as(parameter))
        self.show(self.full)

    def reduce(self, _):
        self.done = (self.done + 1) % len(self.full)
        if self.done:
            return
        gradients = [p.grad.float().split(rows[:dist.get_world_size()])
                     for p, rows in zip(self.full, self.rows, strict=True)]
        for parameter in self.full:
            parameter.grad = None
        self.release()
        flat = torch.cat([self.pad(torch.cat([g[rank].flatten() for g in gradients]))
                          for rank in range(dist.get_world_size())])
        own = funcol.reduce_scatter_tensor(flat, "avg" if "nccl" in dist.get_backend() else "sum",
                                           0, dist.group.WORLD)
        own = funcol.wait_tensor(own) / dist.get_world_size()
        for shard in self.shards:
            local = shard.to_local()
            piece, own = own[:local.numel()].view_as(local), own[local.numel():]
            new = DTensor.from_local(piece.clone(), shard.device_mesh, shard.placements,
                                     run_check=False, shape=shard.shape, stride=shard.stride())
            shard.grad = new if shard.grad is None else shard.grad + new


def packed(model, optimizer_class, root_stays=False, **settings):
    """With hooks on the outputs; the next block is fetched in forward too, in the fixed order."""
    units = []
    for module in [*lab.blocks(model), model]:
        units.append(Packed(module, units))
    for number, (module, unit) in enumerate(zip([*lab.blocks(model), model], units, strict=True)):
        following = units[number + 1:number + 2] if number + 2 < len(units) else []
        earlier = units[max(number - 1, 0):number] if number + 1 < len(units) else []

        def reach(gradient, unit=unit, earlier=earlier):
            unit.arrive()
            for one in earlier:
                one.begin()

        def before(module, _, unit=unit, following=following):
            unit.arrive()
            for one in following:
                one.begin()

        def after(module, _, output, unit=unit, reach=reach):
            if module is model and root_stays:
                return
            unit.release()
            for tensor in torch.utils._pytree.tree_leaves(getattr(output, "loss", output)):
                tensor.register_hook(reach)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    return model, optimizer_class(model.parameters(), **settings)


@pytest.mark.parametrize("answer", [right.my_fsdp, packed, partial(packed, root_stays=True)],
                         ids=["solution", "packed", "the root stays"])
def test_another_right_answer_is_accepted(answer, capsys):
    accepted(lab.check_from_scratch, answer)

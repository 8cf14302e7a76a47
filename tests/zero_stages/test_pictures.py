"""Notebook 03's scaffold, the invariants of its checks, its pictures and tables. What the checks
reject and accept is tested in tests/wrong_answers."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions

import labs
import labs.zero_stages as lab
from labs.meters import memory
from labs.predictions.communication.traffic import passes, stage_passes
from labs.training import data, models
from labs.training.presets import preset
from labs.workers.launcher import launch
from labs.zero_stages.architectures import make
from labs.zero_stages.collectives import all_gather
from labs.zero_stages.stage_limits import StageLimits

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
SMALL = preset("laptop", layers=3, hidden=32, heads=2, context=16, batch=2)
right = definitions("03_zero_stages", PRESET=SMALL)


def on(ranks, fn, *args):
    return launch(fn, *args, ranks=ranks, quiet=True, device="cpu")


def same_storage(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# flat parameters


def flat_facts():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (1, 2, 3))]
    before = torch.cat([p.detach().clone().flatten() for p in parameters])
    identities = list(map(id, parameters))
    flat = lab.FlatParameter(parameters, "three")
    facts = {"length": flat.shard_elements, "shared": same_storage(flat.shard, flat.full),
             "views": all(same_storage(p, flat.full) for p in parameters),
             "kept": list(map(id, flat.parameters)) == identities,
             "equal": flat.full[:flat.elements].equal(before),
             "padding": flat.full[flat.elements:].tolist(), "repr": repr(flat)}
    parameters[1].grad = torch.ones(5)
    facts["gradients"] = flat.flatten_gradients().tolist()
    flat.free()
    facts |= {"freed": not flat.is_gathered, "own": not same_storage(flat.shard, flat.full),
              "repr when freed": repr(flat)}
    all_gather(flat.allocate(), flat.shard)
    return {**facts, "gathered": flat.full[:flat.elements].equal(before),
            "parameter": parameters[2].flatten().equal(before[17:])}


@pytest.mark.parametrize("ranks, length, zeros", [(2, 12, 1), (3, 8, 1), (4, 6, 1), (1, 23, 0)])
def test_a_flat_tensor_and_its_shard(ranks, length, zeros):
    for facts in on(ranks, flat_facts):
        assert facts["length"] == length and facts["padding"] == [0.0] * zeros
        assert facts["gradients"] == [0.0] * 12 + [1.0] * 5 + [0.0] * (6 + zeros)
        assert all(facts[name] for name in ("shared", "views", "kept", "equal", "freed", "own",
                                            "gathered", "parameter"))
        assert facts["repr"] == "three: 23 elements, gathered"
        assert facts["repr when freed"] == "three: 23 elements, shard only"


def test_a_flat_tensor_of_two_types_is_refused():
    def work():
        parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype))
                      for dtype in (torch.float32, torch.float64)]
        with pytest.raises(ValueError, match="one flat parameter cannot hold float32 on cpu and"):
            lab.FlatParameter(parameters)
        with pytest.raises(ValueError, match="there is no parameter to flatten"):
            lab.FlatParameter([])
        return True

    assert on(1, work) == [True]


def a_parameter_in_two():
    layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    layers[1].weight = layers[0].weight
    kept = lab.FlatParameter(layers[0].parameters(), "first")
    with pytest.raises(ValueError, match="of shape .3, 3. is in the flat parameter 'first' alre"):
        lab.FlatParameter(layers[1].parameters())
    with pytest.raises(ValueError, match="a parameter is given twice"):
        lab.FlatParameter([layers[1].bias, layers[1].bias])
    del kept  # the model of a strategy that is gone may be used again
    return lab.FlatParameter(layers[1].parameters()).elements


def test_a_parameter_is_in_one_flat_parameter():
    assert on(1, a_parameter_in_two) == [12]


@pytest.mark.parametrize("name, groups", [
    ("two layers with one weight", ["root", "layers.0", "layers.1", "layers.2"]),
    ("one layer listed three times", ["root", "layers.0"]), ("an nn.Sequential", ["0", "2", "4"]),
    ("a list of layers, no root", ["layers.0", "layers.1", "layers.2"])])
def test_what_layers_share_is_in_the_root(name, groups):
    model = make(name)
    found = lab.layer_groups(model)
    assert [group for group, _, _ in found] == groups
    ids = [id(p) for _, _, parameters in found for p in parameters]
    assert len(ids) == len(set(ids)) and set(ids) == set(map(id, model.parameters()))


# collectives


def both_reduce_scatters():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flat = torch.arange(5.0 * ranks) * (rank + 1)
    want = torch.empty(5)
    dist.reduce_scatter_tensor(want, flat.clone())
    handed_over = flat.clone()
    got = lab.reduce_scatter(handed_over).wait()
    with pytest.raises(ValueError, match="do not divide by"):
        lab.reduce_scatter(torch.zeros(5 * ranks + 1))
    return got.equal(want), handed_over.untyped_storage().nbytes()


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter_is_torchs_and_gives_the_memory_back(ranks):
    assert on(ranks, both_reduce_scatters) == [(True, 0)] * ranks


# sharded modules


class HookLog(lab.ShardedModule):
    """Records the calls of its hooks."""

    def __init__(self, model):
        super().__init__(model)
        self.calls = []

    def before_forward(self, unit):
        self.calls.append(("before forward", unit.name))

    def after_forward(self, unit):
        self.calls.append(("after forward", unit.name))

    def before_backward(self, unit):
        self.calls.append(("before backward", unit.name))

    def after_backward(self, unit):
        self.calls.append(("after backward", unit.name))
        self.calls.append(("next", getattr(self.next_unit(unit), "name", None)))

    def backward_done(self):
        self.calls.append(("done", ""))


def hook_calls(use_all):
    module = HookLog(models.EdgeCaseModel(seed=0))
    [batch] = data.xy_batches(1, 4)
    for _ in range(2):
        module.calls.clear()
        module(**batch, use_all=use_all or dist.get_rank() == 0).loss.backward()
    return module.calls


def test_hooks_of_every_unit_are_called_in_order():
    calls = on(1, hook_calls, True)[0]
    hooks = [(what, name) for what, name in calls if what != "next"]
    assert hooks[:2] == [("before forward", "root"), ("before forward", "first")]
    assert hooks[7] == ("after forward", "root")
    assert hooks[8:] == [("before backward", "root"),
                        ("before backward", "second"), ("after backward", "second"),
                        ("before backward", "sometimes_unused"),
                        ("after backward", "sometimes_unused"),
                        ("before backward", "first"), ("after backward", "first"),
                        ("after backward", "root"), ("done", "")]
    assert [name for what, name in calls if what == "next"] == [
        "sometimes_unused", "first", None, "second"]


def test_ranks_that_use_other_layers_end_them_in_the_same_order():
    first, second = ([name for what, name in calls if what == "after backward"]
                     for calls in on(2, hook_calls, False))
    assert first == second == ["second", "sometimes_unused", "first", "root"]


def full_and_frozen():
    model = models.EdgeCaseModel(seed=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    module, optimizer = right.zero3(model, torch.optim.AdamW, lr=0.1)
    found = module.full_parameters()
    freed = [unit.is_gathered for unit in module.units]
    trained = [id(p) for unit in module.units for p in unit.parameters]
    return (all(found[name].equal(before[name]) for name in before), any(freed),
            id(model.scale) in trained, model.scale.grad)


def test_full_parameters_are_gathered_and_frozen_ones_stay():
    assert on(2, full_and_frozen) == [(True, False, False, None)] * 2


def nothing_for_a_layer():
    """A ZeRO-3 that forgets to gather gets an error before memory is read that is not there."""
    module, _ = right.zero3(models.DeepMLP(2), torch.optim.AdamW, kind=HookLog)
    with pytest.raises(Exception, match="forward of 'root' begins, and its parameters are not"):
        module(**data.xy_batches(1, 2)[0])
    return True


def test_a_layer_that_is_not_there_is_named():
    assert on(1, nothing_for_a_layer) == [True]


def saved_and_moved():
    """A full state dict, loaded into another model; a wrapped model cannot be moved."""
    model = models.EdgeCaseModel(seed=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module, _ = right.zero3(model, torch.optim.AdamW, lr=0.1)
    other, _ = right.zero3(models.EdgeCaseModel(seed=4), torch.optim.AdamW, lr=0.1)
    saved = module.state_dict()
    other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="move the model, or change its dtype, before you wrap"):
        module.half()
    again = other.state_dict()
    return (all(saved[f"module.{name}"].equal(value) for name, value in before.items())
            and all(again[name].equal(value) for name, value in saved.items()),
            any(unit.is_gathered for unit in other.units))


def test_a_state_dict_is_full_and_a_rank_keeps_its_shards_of_it():
    assert on(2, saved_and_moved) == [(True, False)] * 2


# optimizer


def optimizer_facts():
    module, optimizer = right.zero2(models.EdgeCaseModel(seed=0), torch.optim.AdamW, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    [batch] = data.xy_batches(1, 4)
    module(**batch).loss.backward()
    loss = optimizer.step(lambda: 7)
    schedule.step()
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    forgotten = all(p.grad is None for unit in module.units for p in [unit.shard, *unit.parameters])
    _, other = right.zero2(models.EdgeCaseModel(seed=0), torch.optim.AdamW, lr=0.1)
    other.load_state_dict(saved)
    shards = zip(optimizer.flats, other.flats, strict=True)
    alike = all(optimizer.state[a.shard]["exp_avg"].equal(other.state[b.shard]["exp_avg"])
                for a, b in shards)
    return (loss, optimizer.inner.param_groups[0]["lr"], forgotten, alike,
            other.inner.param_groups[0]["lr"], other.state is other.inner.state)


def test_a_sharded_optimizer_is_one_of_torchs():
    assert on(2, optimizer_facts) == [(7, 0.05, True, True, 0.05, True)] * 2


# invariants


@pytest.mark.parametrize("stage, parameters, gradients", [(1, 4, 4), (2, 4, 1), (3, 1, 1)])
def test_limits_are_the_papers_formula_and_padding(stage, parameters, gradients):
    limits = StageLimits(stage, ranks=4, elements=40_000, tensors=10, layer=1000)
    allowed = limits.bytes("backward")
    padding = 4 * 10 * 4
    assert 0 <= allowed["parameters"] - parameters * 40_000 <= padding
    assert 0 <= allowed["gradients"] - gradients * 40_000 <= padding
    assert 0 <= allowed["optimizer_state"] - 2 * 40_000 <= 2 * padding
    assert limits.formula("optimizer_state") == "8Ψ/N"
    assert limits.bytes("forward")["parameters"] - allowed["parameters"] == 4000 * (stage == 3)


def peak_of_backward(strategy):
    report = memory.record(lambda: strategy(models.DeepMLP(), torch.optim.AdamW, lr=0.1),
                           data.xy_batches(2, 4))
    return report.peaks["backward"].total


def test_zero_2_peaks_lower_than_zero_1_where_activations_are_few():
    first, second, third = (min(on(2, peak_of_backward, strategy))
                            for strategy in (right.zero1, right.zero2, right.zero3))
    assert third < second < 0.95 * first


@pytest.mark.parametrize("stage, times", [(1, 2), (2, 2), (3, 3)])
def test_a_stage_sends_as_many_psi_as_the_paper_says(stage, times):
    assert sum(passes(kind) * often for kind, often in stage_passes(stage).items()) == times


# pictures and tables


def test_the_owners_own_everything_once():
    picture = lab.show_owners(right.cut, SMALL, ranks=3)
    model = models.gpt2(SMALL.layers, SMALL.hidden, SMALL.heads, SMALL.context)
    for flats in picture.data.values():
        assert sum(size for flat in flats for size, _ in flat) == models.count_trainable(model)
    assert [len(flats) for flats in picture.data.values()] == [1, SMALL.layers + 1]
    assert picture.png().startswith(b"\x89PNG") and "a flat tensor for each layer" in repr(picture)


@pytest.mark.parametrize("strategy, most", [(right.zero3, 2), (right.zero3_prefetch, 3)])
def test_the_lifecycle_of_layers_is_drawn(strategy, most):
    picture = lab.show_gathered_layers(strategy, SMALL)
    lifecycle = picture.data
    assert lifecycle.most_gathered() == most and f"at most {most} of 4 units" in repr(picture)
    assert all(len(intervals) == 2 for intervals in lifecycle.gathered.values())  # both directions
    assert picture.png().startswith(b"\x89PNG")


def test_a_strategy_without_layers_is_not_drawn():
    verdict = lab.show_gathered_layers(right.zero1, SMALL)
    assert verdict.passed is False and "has no units" in str(verdict)


def test_the_size_that_the_notebook_names():
    size = preset("laptop")
    model = models.gpt2(size.layers, size.hidden, size.heads, size.context)
    assert models.count_trainable(model) == 1_230_848 and size.ranks == 2


def test_70_billion_on_8_ranks():
    labs.guess("3.8b", "GB per rank, 70B under ZeRO-2 on 8 ranks", 210)
    table = lab.show_state_bytes(70e9, ranks=8)
    assert [row[-1] for row in table.rows] == ["840", "350", "227.5", "105"]
    assert table.rows[2][1:3] == ("2Ψ", "10Ψ/8")
    assert "You guessed 210, and it is 227.5 GB under ZeRO-2: 8% too low." in repr(table)
    labs.guess("3.8b", "GB per rank, 70B under ZeRO-2 on 8 ranks", ...)


def test_choices_in_a_table():
    table = lab.show_choices(right.lowest_stage)
    rows = {row[0]: row[1:] for row in table.rows}
    assert set(rows["1.3B"]) == {"DDP"} and rows["70B"][0] == "-" and rows["70B"][-1] == "ZeRO-3"
    assert "-: no stage fits" in repr(table)
    assert "A100-80, on which CUDA reports 85.1 GB" in repr(table)
    with pytest.raises(ValueError, match="no GPU 'A99' in the table"):
        lab.show_choices(right.lowest_stage, "A99")


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_labs_reduce_scatter_sends_half_as_much(ranks):
    picture = lab.show_reduce_scatter(preset("laptop", ranks=ranks))
    rows = {row.name: row for row in picture.data}
    assert f"leave each of {ranks} ranks" in repr(picture)
    assert all(row.measured == pytest.approx(row.predicted, rel=0.01) for row in picture.data)
    ours, torchs = rows["lab.reduce_scatter"], rows["torch's reduce_scatter"]
    assert ours.measured == pytest.approx(torchs.measured / 2, rel=0.01)


def test_a_freed_layer_comes_back():
    picture = lab.show_storage()
    assert [(moment["full"], moment["own"], moment["parameters"], moment["saved"])
            for moment in picture.data] == [(40, False, True, True), (0, True, False, False),
                                            (40, True, True, True)]
    assert "full has 0 bytes, shard is a tensor of its own" in picture.text


@pytest.mark.slow
def test_prefetching_leaves_less_to_wait_for():
    """What the notebook says of its two pictures; a busy machine may disturb one of them."""
    size = preset("laptop", layers=4)
    for _ in range(3):
        plain, ahead = (lab.show_gathered_layers(strategy, size).data
                        for strategy in (right.zero3, right.zero3_prefetch))
        assert len(plain.waiting) == len(ahead.waiting) == 10  # each unit, in both directions
        if ahead.waited < 0.7 * plain.waited:
            return
    raise AssertionError((ahead.waited, plain.waited))


def test_an_unfilled_exercise_makes_everything_wait():
    def unfilled(*_, **__):
        raise NotImplementedError("Exercise 3.2")

    verdicts = [lab.check_zero1(unfilled), lab.check_zero2(unfilled), lab.check_zero3(unfilled),
                lab.check_prefetch(unfilled), lab.check_cut(unfilled),
                lab.check_lowest_stage(unfilled), lab.check_clip_grad_norm(unfilled),
                lab.check_reshard(unfilled, unfilled),
                lab.show_owners(unfilled, SMALL), lab.show_gathered_layers(unfilled, SMALL),
                lab.show_choices(unfilled), lab.check_from_scratch(unfilled)]
    assert all(verdict.passed is None and "3.2" in str(verdict) for verdict in verdicts)

"""What the check of exercise 9.3 must reject, and what it must accept; its picture."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_waits, judge_all
from torch import nn

import labs
import labs.mixture_of_experts as lab
from labs.mixture_of_experts.all_to_all_trial import equal_totals, some_nothing
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("09_mixture_of_experts")
AllToAll, Layer, Experts = right.AllToAll, right.ExpertParallelLayer, right.Experts


# AllToAll


def exchanged(rows, receive, send, group):
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived


def function(forward=None, backward=None):
    """The solution's AllToAll, with another forward or backward."""
    changes = {name: staticmethod(each) for name, each in
               (("forward", forward), ("backward", backward)) if each}
    return type("AllToAll", (AllToAll,), changes)


def returns_its_rows(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    return rows.view_as(rows)


def returns_zeros(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    return rows.new_zeros(sum(receive), *rows.shape[1:])


def swaps(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    return exchanged(rows, send, receive, group)


def swaps_on_2_ranks(ctx, rows, receive, send, group):
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    ctx.splits = receive, send, group
    dist.all_to_all_single(arrived, rows.contiguous(), send, receive, group=group)
    return arrived


def gathers_all(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (rows.detach().contiguous(), send), group=group)
    rank = dist.get_rank(group)
    return torch.cat([part.split(splits)[rank] for part, splits in every])


def padded(ctx, rows, receive, send, group):
    """Equal parts, as long as the longest of all ranks."""
    ctx.splits = receive, send, group
    longest = torch.tensor(max(*send, *receive))
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    parts = rows.new_zeros(len(send), int(longest), *rows.shape[1:])
    for part, mine in zip(parts, rows.split(send), strict=True):
        part[:len(mine)] = mine
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return torch.cat([part[:count] for part, count in zip(arrived, receive, strict=True)])


def strided(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, receive, send, group=group)
    return arrived


def in_place(ctx, rows, receive, send, group):
    """Right where each rank sends as many rows as it gets, but for the rows themselves."""
    arrived = exchanged(rows, receive, send, group)
    if arrived.shape == rows.shape:
        rows.copy_(arrived)
    return AllToAll.forward(ctx, arrived, receive, send, group)


def flattens(ctx, rows, receive, send, group):
    return AllToAll.forward(ctx, rows.flatten(1), receive, send, group)


def in_float32(ctx, rows, receive, send, group):
    return AllToAll.forward(ctx, rows.float(), receive, send, group)


def never_waits(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group, async_op=True)
    return arrived


def unsent(ctx, gradient):
    return gradient, None, None, None


def by_forwards_splits(ctx, gradient):
    receive, send, group = ctx.splits
    back = gradient.new_empty(sum(send), *gradient.shape[1:])
    dist.all_to_all_single(back, gradient.contiguous(), receive, send, group=group)
    return back, None, None, None


def zero_gradient(ctx, gradient):
    return gradient.new_zeros(sum(ctx.splits[1]), *gradient.shape[1:]), None, None, None


def no_gradient(ctx, gradient):
    return None, None, None, None


def strided_gradient(ctx, gradient):
    receive, send, group = ctx.splits
    back = gradient.new_empty(sum(send), *gradient.shape[1:])
    dist.all_to_all_single(back, gradient, send, receive, group=group)
    return back, None, None, None


def too_few(ctx, gradient):
    return AllToAll.backward(ctx, gradient)[:3]


def mean_gradient(ctx, gradient):
    back, *rest = AllToAll.backward(ctx, gradient)
    return back / dist.get_world_size(ctx.splits[2]), *rest


class OnTheClass(AllToAll):
    """Keeps the splits of the last call, for all."""

    @staticmethod
    def forward(ctx, rows, receive, send, group):
        OnTheClass.splits = receive, send, group
        return exchanged(rows, receive, send, group)

    @staticmethod
    def backward(ctx, gradient):
        receive, send, group = OnTheClass.splits
        return exchanged(gradient, send, receive, group), None, None, None


class NoFunction:
    """Without autograd."""

    apply = staticmethod(exchanged)


WRONG_FUNCTIONS = [
    (function(returns_its_rows), "not_sent"), (function(returns_zeros), "zeros"),
    (function(swaps), "splits_swapped"), (function(swaps_on_2_ranks), "splits_swapped"),
    (function(gathers_all), "wrong_traffic"), (function(padded), "wrong_traffic"),
    (function(flattens), "wrong_shape"), (function(in_place), "rows_overwritten"),
    (function(in_float32), "wrong_dtype"), (function(never_waits), "never_waited"),
    (NoFunction, "no_gradient_function"), (exchanged, "wrong_type"),
    (function(backward=unsent), "gradient_not_sent"),
    (function(backward=by_forwards_splits), "splits_not_swapped"),
    (function(backward=zero_gradient), "zeros"),
    (function(backward=no_gradient), "gradient_missing"),
    (function(backward=mean_gradient), "wrong_scale 1/3")]


# the layer


def layer(made=None, compute=None, **methods):
    """The solution's layer, with another constructor or compute."""
    changes = {name: each for name, each in (("__init__", made), ("compute", compute)) if each}
    return type("ExpertParallelLayer", (Layer,), changes | methods)


def parts(layer, group):
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    return [t.detach().chunk(ranks)[rank] for t in (layer.experts.gate_up, layer.experts.down)]


def with_experts(experts_of):
    def __init__(self, layer, group):
        nn.Module.__init__(self)
        self.k, self.router, self.group = layer.k, layer.router, group
        self.shared_experts = layer.shared_experts
        self.experts = experts_of(layer, group)
    return __init__


def all_kept(layer, group):
    return Experts(layer.experts.gate_up.detach().clone(), layer.experts.down.detach().clone())


def views(layer, group):
    return Experts(*parts(layer, group))


def first_part(layer, group):
    n = dist.get_world_size(group)
    return Experts(layer.experts.gate_up.detach().chunk(n)[0].clone(),
                   layer.experts.down.detach().chunk(n)[0].clone())


def dealt_out(layer, group):
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    return Experts(layer.experts.gate_up.detach()[rank::ranks].clone(),
                   layer.experts.down.detach()[rank::ranks].clone())


def frozen(layer, group):
    return Experts(*(part.clone() for part in parts(layer, group))).requires_grad_(False)


def keeps_layer(self, layer, group):
    Layer.__init__(self, layer, group)
    self.original = [layer]


def keeps_copy(self, layer, group):
    Layer.__init__(self, layer, group)
    self.original = {"gate_up": layer.experts.gate_up.detach().clone()}


def in_the_solutions_way(put, exchange=AllToAll.apply):
    """compute, with put(arrived, order, experts) for what is done with the rows that arrive."""
    def compute(self, copies, counts):
        ranks = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        counts, theirs = counts.view(ranks, -1), theirs.view(ranks, -1)
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = exchange(copies, receive, send, self.group)
        expert = torch.arange(theirs.numel()) % theirs.shape[1]
        order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
        outputs = put(arrived, order, lambda rows: self.experts(rows, theirs.sum(0).tolist()))
        return exchange(outputs, send, receive, self.group)
    return layer(compute=compute)


def keeps_all(self, layer, group):
    """What the notebook's line before the gap leaves: the complete layer."""
    right.ExpertLayer.__init__(self, layer)
    self.group = group


def computes_alone(self, copies, counts):
    """Only its own experts, as if all copies were theirs."""
    local = len(self.experts.gate_up)
    theirs = counts.view(-1, local).sum(1)
    return torch.cat([self.experts(part, row.tolist()) for part, row in
                      zip(copies.split(theirs.tolist()), counts.view(-1, local), strict=True)])


def gathers_tokens(self, copies, counts):
    """All copies of all ranks on every rank, and all outputs back: right, and N times the bytes."""
    ranks, rank, local = (dist.get_world_size(self.group), dist.get_rank(self.group),
                          len(self.experts.gate_up))
    every = [torch.empty_like(counts) for _ in range(ranks)]
    dist.all_gather(every, counts, group=self.group)
    most = max(int(each.sum()) for each in every)
    from torch.distributed.nn.functional import all_gather
    all_copies = all_gather(torch.cat([copies, copies.new_zeros(most - len(copies),
                                                                copies.shape[1])]),
                            group=self.group)
    outputs = []
    for each, theirs in zip(all_copies, every, strict=True):
        mine = theirs.view(ranks, -1)
        start, length = int(mine[:rank].sum()), int(mine[rank].sum())
        computed = self.experts(each[start:start + length], mine[rank].tolist())
        outputs.append(torch.cat([each.new_zeros(start, copies.shape[1]), computed,
                                  each.new_zeros(most - start - length, copies.shape[1])]))
    by_rank = all_gather(torch.stack(outputs), group=self.group)
    assert local * ranks == len(counts)
    return sum(each[rank] for each in by_rank)[:len(copies)]


def sends_again(self, copies, counts):
    dist.all_to_all_single(torch.empty_like(counts), counts, group=self.group)
    return Layer.compute(self, copies, counts)


def router_detached(self, x):
    return Layer.forward(self, x.detach())


def without_shared(self, x):
    shared, self.shared_experts = self.shared_experts, None
    try:
        return Layer.forward(self, x)
    finally:
        self.shared_experts = shared


WRONG_LAYERS = [
    (layer(with_experts(all_kept)), "wrong_shape"), (layer(keeps_all), "wrong_shape"),
    (layer(with_experts(views)), "memory_kept"),
    (layer(with_experts(first_part)), "wrong_part"), (layer(with_experts(dealt_out)), "wrong_part"),
    (layer(with_experts(frozen)), "wrong_dtype"), (layer(keeps_layer), "memory_kept memory"),
    (layer(keeps_copy), "memory_kept holds"),
    (layer(with_experts(lambda layer, group: None)), "missing_parameter"),
    (lambda given, group: None, "wrong_type"),
    (in_the_solutions_way(lambda rows, order, experts: experts(rows)), "not_sorted arrival"),
    (in_the_solutions_way(lambda rows, order, experts: experts(rows[order])), "not_restored"),
    (in_the_solutions_way(lambda rows, order, experts: experts(rows[order])[order]),
     "wrong_order outputs"),
    (in_the_solutions_way(lambda rows, order, experts: experts(rows[order.argsort()])[order]),
     "wrong_order inverse"),
    (in_the_solutions_way(lambda rows, order, experts: experts(rows)[order.argsort()]),
     "not_sorted put"),
    (in_the_solutions_way(lambda rows, order, experts: experts(rows[order])[order.argsort()],
                          exchanged), "gradient_missing|zero_gradient|wrong_gradient"),
    (layer(compute=computes_alone), "wrong_output"),
    (layer(compute=lambda self, copies, counts: copies), "wrong_output"),
    (layer(compute=lambda self, copies, counts: torch.zeros_like(copies)), "wrong_output"),
    (layer(compute=gathers_tokens), "wrong_traffic"),
    (layer(compute=sends_again), "wrong_traffic|extra_collective"),
    (layer(forward=router_detached), "gradient_missing"),
    (layer(forward=without_shared), "shared_missing"),
    (layer(forward=lambda self, x: None), "wrong_type"),
    (layer(forward=lambda self, x: Layer.forward(self, x).flatten(0, 1)), "wrong_shape")]


# right answers in other styles


class ByMessages(AllToAll):
    """An all-to-all of sends and receives."""

    @staticmethod
    def _exchange(rows, receive, send, group):
        rank = dist.get_rank(group)
        given = [part.contiguous() for part in rows.split(send)]
        got = [rows.new_empty(count, *rows.shape[1:]) for count in receive]
        got[rank] = given[rank]
        calls = [dist.P2POp(kind, parts[peer], group=group, group_peer=peer)
                 for peer in range(len(send)) if peer != rank
                 for kind, parts in ((dist.isend, given), (dist.irecv, got)) if len(parts[peer])]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return torch.cat(got)

    @staticmethod
    def forward(ctx, rows, receive, send, group):
        ctx.splits = receive, send, group
        return ByMessages._exchange(rows, receive, send, group)

    @staticmethod
    def backward(ctx, gradient):
        receive, send, group = ctx.splits
        return ByMessages._exchange(gradient, send, receive, group), None, None, None


class Torchs:
    """torch's own."""

    @staticmethod
    def apply(rows, receive, send, group):
        from torch.distributed._functional_collectives import all_to_all_single_autograd
        return all_to_all_single_autograd(rows.contiguous(), receive, send, group)


def block_by_block(rows, theirs, experts):
    """Cuts the rows into a block for each rank and expert, and joins the blocks of each expert."""
    ranks, local = theirs.shape
    blocks = rows.split(theirs.flatten().tolist())
    joined = [torch.cat([blocks[rank * local + number] for rank in range(ranks)])
              for number in range(local)]
    outputs = experts(torch.cat(joined), [len(each) for each in joined]).split(
        theirs.t().flatten().tolist())
    return torch.cat([outputs[number * ranks + rank] for rank in range(ranks)
                      for number in range(local)])


def by_blocks(self, copies, counts):
    ranks = dist.get_world_size(self.group)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=self.group)
    send = counts.view(ranks, -1).sum(1).tolist()
    receive = theirs.view(ranks, -1).sum(1).tolist()
    arrived = ByMessages.apply(copies, receive, send, self.group)
    return ByMessages.apply(block_by_block(arrived, theirs.view(ranks, -1), self.experts), send,
                            receive, self.group)


class Contiguous(Layer):
    """Its experts are slices, copied; what is unsent is not sorted."""

    def __init__(self, layer, group):
        nn.Module.__init__(self)
        self.k, self.router, self.group = layer.k, layer.router, group
        self.shared_experts = layer.shared_experts
        local = layer.router.out_features // dist.get_world_size(group)
        mine = slice(dist.get_rank(group) * local, (dist.get_rank(group) + 1) * local)
        self.experts = Experts(*(torch.tensor(t[mine].detach().numpy())
                                 for t in (layer.experts.gate_up, layer.experts.down)))


RIGHT = [(AllToAll, Layer), (ByMessages, layer(compute=by_blocks)), (Torchs, Contiguous)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_right_answers_are_accepted(ranks):
    judge_all(lab.check_expert_parallel, [], RIGHT, ranks=ranks)


def test_wrong_functions_are_rejected_for_their_reason():
    judge_all(lab.check_expert_parallel, [((answer, Layer), code)
                                          for answer, code in WRONG_FUNCTIONS], RIGHT, ranks=3)


def test_wrong_layers_are_rejected_for_their_reason():
    judge_all(lab.check_expert_parallel, [((AllToAll, answer), code)
                                          for answer, code in WRONG_LAYERS], [], ranks=3)


# answers that end the launch: the launcher names what happened, and the check adds a hint


def leaves_out_senders(ctx, rows, receive, send, group):
    """A rank without rows does not take part."""
    ctx.splits = receive, send, group
    if not sum(send):
        return rows.new_empty(sum(receive), *rows.shape[1:])
    return exchanged(rows, receive, send, group)


def assumes_equal_counts(self, copies, counts):
    """Every rank is taken to send as much as this one."""
    ranks = dist.get_world_size(self.group)
    send = counts.view(ranks, -1).sum(1).tolist()
    receive = [sum(send) // ranks] * ranks
    arrived = AllToAll.apply(copies, receive, send, self.group)
    return AllToAll.apply(arrived, send, receive, self.group)


def ignores_group(ctx, rows, receive, send, group):
    return AllToAll.forward(ctx, rows, receive, send, None)


def leaves_out_empty(self, x):
    """A rank without tokens does not take part."""
    return Layer.forward(self, x) if x.numel() else x


def splits_are_tensors(self, copies, counts):
    counts, theirs = right.exchange_counts(counts, self.group)
    return AllToAll.apply(copies, theirs.sum(1), counts.sum(1), self.group)


def saves_lists(ctx, rows, receive, send, group):
    ctx.save_for_backward(receive, send)


def with_lists_of_tensors(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    arrived = [rows.new_empty(count, *rows.shape[1:]) for count in receive]
    dist.all_to_all(arrived, list(rows.split(send)), group=group)
    return torch.cat(arrived)


def receives_fp32(ctx, rows, receive, send, group):
    ctx.splits = receive, send, group
    arrived = torch.empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived


def counts_of_each_rank(self, copies, counts):
    """Not added up over the ranks that sent them."""
    counts, theirs = right.exchange_counts(counts, self.group)
    send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
    arrived = AllToAll.apply(copies, receive, send, self.group)
    return AllToAll.apply(self.experts(arrived, theirs.flatten().tolist()), send, receive,
                          self.group)


def not_sent_back(self, copies, counts):
    counts, theirs = right.exchange_counts(counts, self.group)
    send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
    arrived = AllToAll.apply(copies, receive, send, self.group)
    return self.experts(arrived, theirs.sum(0).tolist())


def with_its_own_counts(self, copies, counts):
    counts, theirs = right.exchange_counts(counts, self.group)
    send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
    arrived = AllToAll.apply(copies, receive, send, self.group)
    return self.experts(arrived, counts.sum(0).tolist())


def sums_over_ranks(self, copies, counts):
    counts, theirs = right.exchange_counts(counts, self.group)
    return AllToAll.apply(copies, theirs.sum(0).tolist(), counts.sum(0).tolist(), self.group)


def returns_nothing(self, copies, counts):
    Layer.compute(self, copies, counts)


ENDS = [((function(leaves_out_senders), Layer), "all_to_all", "takes part all the same"),
        ((AllToAll, layer(forward=leaves_out_empty)), "all_to_all", "takes part all the same"),
        ((function(strided), Layer), "not contiguous", ".contiguous()"),
        ((function(backward=strided_gradient), Layer), "not contiguous", ".contiguous()"),
        ((AllToAll, layer(compute=assumes_equal_counts)), "which expects", "learns from"),
        ((function(ignores_group), Layer), "", "Pass `group`"),
        ((function(backward=too_few), Layer), "incorrect number of gradients", "one for the rows"),
        ((AllToAll, layer(compute=splits_are_tensors)), "Boolean value", "lists of ints"),
        ((function(saves_lists), Layer), "save_for_backward", "becomes an attribute"),
        ((function(with_lists_of_tensors), Layer), "invalid tensor size", "equal parts only"),
        ((function(receives_fp32), Layer), "different dtypes", "has the dtype of what is sent"),
        ((AllToAll, layer(compute=counts_of_each_rank)), "shorter", "one count for each expert"),
        ((AllToAll, layer(compute=not_sent_back)), "out of bounds", "sent back"),
        ((AllToAll, layer(compute=with_its_own_counts)), "split_with_sizes", "theirs.sum(0)"),
        ((AllToAll, layer(compute=sums_over_ranks)), "tensor splits", "counts.sum(1)"),
        ((AllToAll, layer(compute=returns_nothing)), "not subscriptable", "return its outputs")]


@pytest.mark.parametrize("answers, words, hint", ENDS)
def test_what_ends_the_launch_is_named(answers, words, hint):
    verdict = lab.check_expert_parallel(*answers)
    assert verdict.passed is False and words in verdict.sentence and hint in verdict.hint, verdict
    assert "Traceback" not in str(verdict)


def test_answers_that_are_not_filled_in_are_waited_for():
    def unfilled(*_):
        raise NotImplementedError("Exercise 9.3")

    assert_waits(lambda made: lab.check_expert_parallel(AllToAll, made), "9.3")
    verdict = lab.check_expert_parallel(function(unfilled), Layer)
    assert verdict.passed is None and "9.3" in str(verdict)
    assert lab.show_bytes(layer(unfilled)).passed is None


def test_the_picture_has_the_bytes_of_the_formula():
    labs.guess("9.3", "times", 6)
    picture = lab.show_bytes(Layer)
    counts, *rows = [row.measured for row in picture.data]
    # 8 experts: 6 counts of 8 bytes go to other ranks.
    assert counts == 0.048 and len(rows) == 4
    # What is sent to the experts comes back, so over all ranks the four are the same.
    assert len({round(each, 6) for each in rows}) == 1
    assert rows[0] == pytest.approx(picture.data[1].predicted, rel=0.05)
    # k·b·s·h·(N - 1)/N elements
    assert picture.data[1].predicted == 2 * 4 * 64 * 64 * 4 * 3 / 4 / 1e3
    assert "You guessed 6" in str(picture) and "b·s·h·4 bytes: right." in str(picture)


def test_the_experts_of_a_layer_of_deepseek_v3():
    """In bf16; transformers' defaults are the published model's."""
    config = pytest.importorskip("transformers").DeepseekV3Config()
    parameters = config.n_routed_experts * 3 * config.hidden_size * config.moe_intermediate_size
    assert f"{parameters / 1e9:.1f} billion, {2 * parameters / 1e9:.1f} GB" == (
        "11.3 billion, 22.5 GB")


def test_torchs_own_function_of_the_notebook():
    """The rows that the notebook's counts_then_rows sends, and gradients of their destinations."""
    sent, arrived = (launch(function, ranks=2, quiet=True)
                     for function in (right.counts_then_rows, right.torchs_all_to_all))
    assert [each["rows"] for each in sent] == [[0, 10, 11], [1, 2, 3]]
    assert [each["rows"] for each in arrived] == [each["rows"] for each in sent]
    assert [each["gradients"] for each in arrived] == [[1, 2, 2, 2], [1, 1]]


def test_the_rows_that_are_tried_differ_where_they_must():
    for ranks in (2, 3, 4):
        equal, uneven = equal_totals(ranks), some_nothing(ranks)
        columns = [[list(column) for column in zip(*matrix, strict=True)]
                   for matrix in (equal, uneven)]
        assert [sum(row) for row in equal] == [sum(column) for column in columns[0]]
        assert (equal != columns[0]) == (ranks > 2)
        assert all(sum(row) != sum(column) for row, column in
                   zip(uneven, columns[1], strict=True))
        assert not any(uneven[0]) and not any(columns[1][-1])

"""What the check of exercise 7.11 must reject, and what it must accept."""

import math
import sys

import cloudpickle
import gate
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import asked_for, assert_rejected, assert_waits, judge_in_one_launch

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07a_tensor_parallel")
merge, pass_on = right.merge, right.pass_on
RANKS = 4  # on which most answers are judged, all in one launch


def without_maximum(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


# 7.11


def visible_by_position(positions, places, **_):
    return positions[:, None] >= places


class Ring:
    """The right answer in pieces that a wrong one replaces; called as ring_attention is."""

    def __init__(self, **pieces):
        self.__dict__.update({"visible": visible_by_position, "merge": merge, "pass_on": pass_on,
                              "rounds": 0, "unused": 0, "start": -math.inf, "scale": 1.0,
                              "first": lambda k, v, places: [each.contiguous()
                                                             for each in (k, v, places)],
                              "with_v": True, "passes": 0, "own_only": False, "own_lse": False,
                              **pieces})

    def forward(self, q, k, v, positions, group):
        ring, own_v = self.first(k, v, positions), v
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], self.start)
        ranks = dist.get_world_size(group)
        for passed in range(ranks + self.rounds):
            if passed:
                ring = self.pass_on(ring, group)
            keys, values, places = ring
            visible = self.visible(positions, places, passed=passed, group=group)
            part = lab.block_attention(q * self.scale, keys, values if self.with_v else own_v,
                                       visible)
            out, lse = self.merge(out, lse, *part)
        for _ in range(self.unused):
            ring = self.pass_on(ring, group)
        return out, lse

    def backward(self, q, k, v, positions, out, lse, grad, group):
        ring = [each.contiguous() for each in (k, v, positions)]
        ring += [torch.zeros_like(ring[0]), torch.zeros_like(ring[1])]
        dq, ranks = torch.zeros_like(q), dist.get_world_size(group)
        for number in range(1 if self.own_only else ranks):
            keys, values, places, dk, dv = ring
            visible = positions[:, None] >= places
            of = lab.block_attention(q, keys, values, visible) if self.own_lse else (out, lse)
            parts = lab.block_backward(q, keys, values, visible, *of, grad)
            for total, part in zip((dq, dk, dv), parts, strict=True):
                total += part
            if number < ranks + self.passes and not self.own_only:
                ring = self.pass_on(ring, group)
        return dq, ring[3], ring[4]

    def __call__(self, q, k, v, positions, group):
        forward, backward = self.forward, self.backward

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                out, lse = forward(q, k, v, positions, group)
                ctx.save_for_backward(q, k, v, out, lse)
                return out

            @staticmethod
            def backward(ctx, grad):
                q, k, v, out, lse = ctx.saved_tensors
                return backward(q, k, v, positions, out, lse, grad, group)

        return Function.apply(q, k, v)


def alone(q, k, v, positions, group):
    """Each rank attends to its own keys; autograd differentiates it."""
    return lab.full_attention(q, k, v, positions)


def mean_of_blocks(out_a, lse_a, out_b, lse_b):
    """The mean of all blocks so far; lse counts them."""
    count = lse_a + 1
    return out_a + (out_b - out_a) / count[..., None], count


def by_local_index(positions, places, **_):
    return torch.ones(len(positions), len(places), dtype=torch.bool).tril()


def by_rank(positions, places, passed, group):
    """As if the ranks had consecutive pieces."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    source = (rank - passed) % ranks
    whole = torch.ones(len(positions), len(places), dtype=torch.bool)
    return whole.tril() if source == rank else whole if source < rank else ~whole


def one_after_the_other(tensors, group):
    """isend and irecv, each by itself."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received, works = [torch.empty_like(tensor) for tensor in tensors], []
    for tensor, arriving in zip(tensors, received, strict=True):
        works += [dist.isend(tensor, group=group, group_dst=(rank + 1) % ranks),
                  dist.irecv(arriving, group=group, group_src=(rank - 1) % ranks)]
    for work in works:
        work.wait()
    return received


def even_ranks_send_first(tensors, group):
    """In no batch, and no rank waits for ever."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = [torch.empty_like(tensor) for tensor in tensors]
    for tensor, arriving in zip(tensors, received, strict=True):
        if rank % 2:
            dist.recv(arriving, group=group, group_src=(rank - 1) % ranks)
        dist.send(tensor, group=group, group_dst=(rank + 1) % ranks)
        if rank % 2 == 0:
            dist.recv(arriving, group=group, group_src=(rank - 1) % ranks)
    return received


def one_message(tensors, group):
    """All in one message of bytes."""
    packed = torch.cat([tensor.view(torch.uint8).flatten() for tensor in tensors])
    (arrived,), works = batch_of([packed], group)
    for work in works:
        work.wait()
    parts = arrived.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    return [part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)]


def batch_of(tensors, group, towards=1):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = [torch.empty_like(tensor) for tensor in tensors]
    batch = [dist.P2POp(operation, tensor, group=group, group_peer=(rank + step) % ranks)
             for operation, given, step in ((dist.isend, tensors, towards),
                                            (dist.irecv, received, -towards))
             for tensor in given]
    return received, dist.batch_isend_irecv(batch)


def never_waits(tensors, group):
    received, works = batch_of(tensors, group)
    dist.barrier(group)  # so that the numbers are there, and only the wait is missing
    return received


def other_way_round(tensors, group):
    received, works = batch_of(tensors, group, -1)
    for work in works:
        work.wait()
    return received


class Repeats(Ring):
    """Sends each key once for every query head."""

    def forward(self, q, k, v, positions, group):
        groups = q.shape[1] // k.shape[1]
        return super().forward(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1),
                               positions, group)


class KeepsAll(Ring):
    """Passes K and V round, and keeps every piece that has been here."""

    def forward(self, q, k, v, positions, group):
        self.pieces = [[each.contiguous() for each in (k, v, positions)]]
        for _ in range(dist.get_world_size(group) - 1):
            self.pieces.append(pass_on(self.pieces[-1], group))
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
        for keys, values, places in self.pieces:
            part = lab.block_attention(q, keys, values, positions[:, None] >= places)
            out, lse = merge(out, lse, *part)
        return out, lse


class JoinsAll(KeepsAll):
    """An all-gather made of passes, and one block of (s/N) · s scores."""

    def forward(self, q, k, v, positions, group):
        super().forward(q, k, v, positions, group)
        k, v, places = (torch.cat(parts, dim) for parts, dim in zip(
            zip(*self.pieces, strict=True), (2, 2, 0), strict=True))
        return lab.block_attention(q, k, v, positions[:, None] >= places)


class KeepsScores(torch.autograd.Function):
    """The right ring, which keeps the scores of every block until backward."""

    @staticmethod
    def forward(ctx, q, k, v, positions, group):
        out, lse = right.ring_forward(q, k, v, positions, group)
        ctx.group, keys = group, k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        ctx.scores = [q @ keys.mT for _ in range(group.size())]  # as large as those of all blocks
        ctx.save_for_backward(q, k, v, positions, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return *right.ring_backward(*ctx.saved_tensors, grad, ctx.group), None, None


class Returns(Ring):
    """Other gradients: those that change(gradients, ranks) makes of the right ones."""

    def __init__(self, change):
        super().__init__(change=change)

    def backward(self, *given):
        return self.change(super().backward(*given), given[-1].size())


class OverwritesK(Ring):
    def forward(self, q, k, v, positions, group):
        out, lse = super().forward(q, k, v, positions, group)
        k.copy_(pass_on([k.contiguous()], group)[0])
        return out, lse


class RankZero(Ring):
    """One process does all: every rank gets q, k and v of all, and computes the whole."""

    def forward(self, q, k, v, positions, group):
        whole = []
        for piece, dim in ((q, 2), (k, 2), (v, 2), (positions, 0)):
            pieces = [torch.empty_like(piece.contiguous()) for _ in range(group.size())]
            dist.all_gather(pieces, piece.contiguous(), group=group)
            whole.append(torch.cat(pieces, dim))
        q, k, v, places = whole
        out, lse = lab.block_attention(q, k, v, places[:, None] >= places)
        rank = dist.get_rank(group)
        return (each.chunk(group.size(), 2)[rank] for each in (out, lse))


class Sums(Ring):
    """dK and dV are added up on all ranks, from memory for the whole sequence."""

    def backward(self, q, k, v, positions, out, lse, grad, group):
        dq, dk, dv = super().backward(q, k, v, positions, out, lse, grad, group)
        spare = torch.zeros(group.size(), *k.shape)
        dist.all_reduce(spare, group=group)
        return dq, dk, dv


WRONG_RINGS = [
    ("each rank alone", alone, "own_piece_alone"),
    ("all-gather", right.gathered_attention,
     "wrong_collective"),
    ("Ulysses", right.ulysses_attention, "raised_ValueError"),
    ("one process does all", RankZero(), "wrong_collective"),
    ("all-gather by passes", JoinsAll(), "memory_grows"),
    ("keeps all pieces", KeepsAll(), "memory_grows"),
    ("mean of blocks", Ring(merge=mean_of_blocks, start=0.0), "mean_of_parts"),
    ("sum of blocks", Ring(merge=lambda a, la, b, lb: (a + b, lb)), "sum_of_parts"),
    ("no maximum", Ring(merge=without_maximum), "not_finite numbers"),
    ("lse begins at 0", Ring(start=0.0), "starts_with_a_key"),
    ("no mask", Ring(visible=lambda positions, places, **_: torch.ones(
        len(positions), len(places), dtype=torch.bool)), "not_causal"),
    ("local index", Ring(visible=by_local_index), "masked_by_local_index"),
    ("masked by rank", Ring(visible=by_rank), "masked_by_rank"),
    ("one round too few", Ring(rounds=-1), "piece_missing"),
    ("one round too many", Ring(rounds=1), "counted_twice"),
    ("one pass too many", Ring(unused=1), "wrong_traffic"),
    ("V stays", Ring(with_v=False), "values_stay"),
    ("scaled twice", Ring(scale=8**-0.5), "scaled_twice"),
    ("heads repeated", Repeats(), "wrong_traffic"),
    ("one after the other", Ring(pass_on=one_after_the_other),
     "deadlock_on_nccl"),
    ("keeps scores", KeepsScores.apply, "memory_grows"),
    ("float64", lambda *given: Ring()(*given).double(), "wrong_dtype rank"),
    ("K and V confused", Returns(lambda each, ranks: (each[0], each[2], each[1])),
     "swapped"),
    ("a mean over ranks", Returns(lambda each, ranks: tuple(one / ranks for one in each)),
     "mean_not_sum 1/4"),
    ("own key not seen", Ring(visible=lambda positions, places, **_: positions[:, None] > places),
     "own_key_masked"),
    ("never waits", Ring(pass_on=never_waits), "never_waited"),
    ("k is overwritten", OverwritesK(), "changes_input"),
    ("not home", Ring(passes=-1), "not_home"),
    ("own block's gradient", Ring(own_only=True),
     "own_piece_alone contribute"),
    ("each block's lse", Ring(own_lse=True), "lse_of_each_block"),
    ("gradients summed whole", Sums(), "wrong_collective all_reduce"),
    ("no gradient", lambda *given: Ring()(*given).detach(), "no_gradient_function"),
    ("not contiguous", Ring(first=lambda k, v, places: [k, v, places]),
     "not_contiguous strides"),
    ("nothing returned", lambda *_: None, "wrong_type nothing")]


@pytest.fixture(scope="module")
def verdicts(warm_launcher, request):
    """By name, the verdict on each wrong answer that is asked for, in one launch."""
    names = asked_for(request, "name")
    answers = {name: (answer,) for name, answer, _ in WRONG_RINGS if name in names}
    found = judge_in_one_launch(lab.check_ring_attention, list(answers.values()), RANKS)
    return dict(zip(answers, found, strict=True))


@pytest.mark.parametrize("name, words", [(each[0], each[2]) for each in WRONG_RINGS],
                         ids=[each[0] for each in WRONG_RINGS])
def test_wrong_ring(verdicts, name, words):
    assert_rejected(verdicts[name], words)


def to_global_rank(tensors, group):
    """Takes numbers in the group for global ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = [torch.empty_like(tensor) for tensor in tensors]
    batch = [dist.P2POp(dist.isend, tensor, (rank + 1) % ranks, group) for tensor in tensors]
    batch += [dist.P2POp(dist.irecv, tensor, (rank - 1) % ranks, group) for tensor in received]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return received


def test_peers_are_numbered_in_their_group():
    # In the group of ranks 1 and 2, rank 1 sends to itself and rank 2 to one outside: gloo refuses
    # the one, torch the other, and the rank that is heard first is named.
    assert_rejected(lab.check_ring_attention(Ring(pass_on=to_global_rank)),
                    "raised_RuntimeError|raised_ValueError numbered")


class WaitsInBackward(Ring):
    def backward(self, *_):
        raise NotImplementedError("Exercise 7.11")


def test_unfilled():
    assert_waits(lab.check_ring_attention, "7.11")


class Prefetches(Ring):
    """Begins the next pass before it computes."""

    def forward(self, q, k, v, positions, group):
        ring = [each.contiguous() for each in (k, v, positions)]
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
        for left in reversed(range(group.size())):
            arriving, works = batch_of(ring, group) if left else (None, [])
            visible = positions[:, None] >= ring[2]
            if visible.any():
                out, lse = merge(out, lse, *lab.block_attention(q, *ring[:2], visible))
            for work in works:
                work.wait()
            ring = arriving
        return out, lse


def by_all_to_all(tensors, group):
    """As torch's own `context_parallel` may do it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = [torch.empty_like(tensor) for tensor in tensors]
    for tensor, arriving in zip(tensors, received, strict=True):
        to, of = [0] * ranks, [0] * ranks
        to[(rank + 1) % ranks] = of[(rank - 1) % ranks] = tensor.numel()
        dist.all_to_all_single(arriving.view(-1), tensor.view(-1), of, to, group=group)
    return received


RIGHT_RINGS = [Ring(), Ring(pass_on=other_way_round), Ring(pass_on=by_all_to_all), Prefetches(),
               Ring(pass_on=even_ranks_send_first), Ring(pass_on=one_message)]


def test_right_rings():
    answers = [*gate.some_of(RIGHT_RINGS, 1), WaitsInBackward()]
    half = judge_in_one_launch(lab.check_ring_attention, [(answer,) for answer in answers], RANKS)
    assert all(verdict.passed for verdict in half[:-1]), half
    assert half[-1].passed is None and "`ring_backward` is waiting" in half[-1].sentence


def test_right_on_all_numbers_of_ranks():
    verdict = lab.check_ring_attention(right.ring_attention)
    assert verdict.passed, verdict

"""Exercise 7.13: what its check must reject, with the words that must say why, and what it must
accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import (
    asked_for,
    assert_rejected,
    assert_waits,
    judge_all,
    judge_in_one_launch,
)

import labs.sharded_muon as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07d_sharded_muon")
RANKS = 4  # on which most answers are judged, all in one launch


def mean_of(local, momentum, group):
    """This rank's shard of the mean over ranks of a flat tensor."""
    mean = torch.empty_like(momentum)
    dist.reduce_scatter_single(mean, local / group.size(), group=group)
    return mean


def gathered(shard, group):
    """The flat tensor of which each rank has a shard."""
    flat = shard.new_empty(group.size() * len(shard))
    dist.all_gather_single(flat, shard, group=group)
    return flat


def my_part(flat, group):
    return flat.chunk(group.size())[dist.get_rank(group)]


def orthogonalised(flat, shapes):
    """Newton-Schulz of each matrix of a flat tensor, with zeros in the padding."""
    done, begin = torch.zeros_like(flat), 0
    for rows, columns in shapes:
        part = slice(begin, begin + rows * columns)
        done[part] = lab.newton_schulz(flat[part].view(rows, columns)).flatten()
        begin = part.stop
    return done


class Muon:
    """The right answer in pieces that a wrong one replaces; called as muon_update is."""

    def __init__(self, **pieces):
        self.__dict__.update({"reduce": lambda gradients, momentum, group: mean_of(
            sum(gradients), momentum, group), "matrix": right.gather_matrix,
            "orthogonal": lab.newton_schulz, "padding": 0.0, "beta": 0.95,
                              "barrier": False, **pieces})

    def __call__(self, gradients, momentum, shapes, group):
        rank, update = dist.get_rank(group), torch.full_like(momentum, self.padding)
        momentum.mul_(self.beta).add_(self.reduce(gradients, momentum, group))
        for shape, pieces in zip(shapes, lab.pieces_of(shapes, group.size()), strict=True):
            if rank in pieces:
                matrix = self.orthogonal(self.matrix(momentum, pieces, shape, group))
                update[pieces[rank].in_shard] = matrix.flatten()[pieces[rank].in_matrix]
        if self.barrier:  # so that all has arrived, and only a wait is missing
            dist.barrier(group)
        return update


def own_elements(shard, pieces, shape, group):
    """Naive ZeRO-1: zeros for what another rank has."""
    whole = shard.new_zeros(shape[0] * shape[1])
    piece = pieces[dist.get_rank(group)]
    whole[piece.in_matrix] = shard[piece.in_shard]
    return whole.view(shape)


def own_gradients(gradients, momentum, shapes, group):
    """Nothing parallel: what one process would do with its own samples."""
    local = sum(gradients)
    momentum.mul_(0.95).add_(my_part(local, group))
    return my_part(orthogonalised(local, shapes), group)


class PartlyReduced:
    """As in DeepSpeed's issue 7807: after the reduce-scatter the rest of the flat gradient is
    still this rank's own, and the update is computed from all of it."""

    def __init__(self):
        self.flat = None

    def __call__(self, gradients, momentum, shapes, group):
        if self.flat is None or momentum.eq(0).all():
            self.flat = torch.zeros_like(gradients[0])
        # what this rank has of the rest is of this step alone, as in a gradient buffer
        local = sum(gradients)
        momentum.mul_(0.95).add_(mean_of(local, momentum, group))
        mixed = 0.95 * self.flat + local
        self.flat = 0.95 * self.flat + sum(gathered_sum(gradients, group))
        my_part(mixed, group).copy_(momentum)
        return my_part(orthogonalised(mixed, shapes), group)


def gathered_sum(gradients, group):
    total = sum(gradients).clone()
    dist.all_reduce(total, group=group)
    return [total / group.size()]


def each_micro_batch(gradients, momentum, shapes, group):
    """As in DeepSpeed's issue 8443: an update for each micro-batch, and their sum."""
    before, update = gathered(momentum, group), 0
    for gradient in gradients:
        mean = gathered(mean_of(gradient, momentum, group), group)
        update = update + my_part(orthogonalised(0.95 * before + mean, shapes), group)
    momentum.mul_(0.95).add_(mean_of(sum(gradients), momentum, group))
    return update


def gathers_all(gradients, momentum, shapes, group):
    """Every rank gets all of the momentum, and computes the update of every matrix."""
    momentum.mul_(0.95).add_(mean_of(sum(gradients), momentum, group))
    return my_part(orthogonalised(gathered(momentum, group), shapes), group)


def rank_zero(gradients, momentum, shapes, group):
    """One process does all, and the others get its result."""
    momentum.mul_(0.95).add_(mean_of(sum(gradients), momentum, group))
    flat = gathered(momentum, group)
    if dist.get_rank(group) == 0:
        flat = orthogonalised(flat, shapes)
    dist.broadcast(flat, group=group, group_src=0)
    return my_part(flat, group).clone()


def all_reduced(gradients, momentum, group):
    total = sum(gradients) / group.size()
    dist.all_reduce(total, group=group)
    return my_part(total, group)


def reduced_for_each(gradients, momentum, group):
    return sum(mean_of(gradient, momentum, group) for gradient in gradients)


def from_gradient(gradients, momentum, shapes, group):
    mean = mean_of(sum(gradients), momentum, group)
    momentum.mul_(0.95).add_(mean)
    return Muon(reduce=lambda *_: 0.0, beta=1.0)(gradients, mean, shapes, group)


def another_momentum(gradients, momentum, shapes, group):
    """The update of the right momentum, which is then forgotten."""
    return Muon()(gradients, momentum.clone(), shapes, group)


def sums_in_place(gradients, momentum, shapes, group):
    total = gradients[0]
    for gradient in gradients[1:]:
        total += gradient
    return Muon()([total], momentum, shapes, group)


def batched(whole, mine, pieces, group, peer):
    """The works of an exchange with each other owner of a matrix."""
    batch = []
    for other in pieces.keys() - {dist.get_rank(group)}:
        theirs = whole[pieces[other].in_matrix]
        batch += [dist.P2POp(dist.isend, mine, group=group, **{peer: other}),
                  dist.P2POp(dist.irecv, theirs, group=group, **{peer: other})]
    return dist.batch_isend_irecv(batch) if batch else []


def exchanged(waits=True, peer="group_peer"):
    def matrix(shard, pieces, shape, group):
        piece = pieces[dist.get_rank(group)]
        whole = shard.new_empty(shape[0] * shape[1])
        mine = whole[piece.in_matrix].copy_(shard[piece.in_shard])
        works = batched(whole, mine, pieces, group, peer)
        if waits:
            for work in works:
                work.wait()
        return whole.view(shape)
    return matrix


def send_first(shard, pieces, shape, group):
    """isend and irecv by themselves, the sends first on all ranks."""
    rank, works = dist.get_rank(group), []
    whole = shard.new_empty(shape[0] * shape[1])
    mine = whole[pieces[rank].in_matrix].copy_(shard[pieces[rank].in_shard])
    for other in sorted(pieces.keys() - {rank}):
        works += [dist.isend(mine, group=group, group_dst=other),
                  dist.irecv(whole[pieces[other].in_matrix], group=group, group_src=other)]
    for work in works:
        work.wait()
    return whole.view(shape)


def by_columns(shard, pieces, shape, group):
    """As if the flat tensor had the matrices column after column."""
    return right.gather_matrix(shard, pieces, shape[::-1], group).T


WRONG = [
    ("own elements", Muon(matrix=own_elements),
     "not_gathered"),
    ("own gradients", own_gradients, "not_reduced"),
    ("partly reduced", PartlyReduced(), "partly_reduced"),
    ("each micro-batch", each_micro_batch, "one_update_a_micro_batch"),
    ("gathers all", gathers_all, "wrong_traffic"),
    ("one rank does all", rank_zero, "wrong_traffic"),
    ("all-reduce", Muon(reduce=all_reduced), "wrong_traffic"),
    ("a reduce-scatter for each", Muon(reduce=reduced_for_each), "wrong_traffic"),
    ("sum over ranks", Muon(reduce=lambda gradients, momentum, group: mean_of(
        sum(gradients), momentum, group) * group.size()), "sum_not_mean"),
    ("last micro-batch", Muon(reduce=lambda gradients, momentum, group: mean_of(
        gradients[-1], momentum, group)), "one_micro_batch last"),
    ("mean of micro-batches", Muon(reduce=lambda gradients, momentum, group: mean_of(
        sum(gradients), momentum, group) / len(gradients)), "mean_not_sum"),
    ("no beta", Muon(beta=1.0), "beta_missing"),
    ("from the gradient", from_gradient, "without_momentum"),
    ("another momentum", another_momentum, "not_updated"),
    ("not orthogonalised", Muon(orthogonal=lambda matrix: matrix), "not_orthogonalised"),
    ("normalised alone", Muon(orthogonal=lambda matrix: matrix / matrix.norm()),
     "wrong_update"),
    ("padding", Muon(padding=1.0), "padding_updated"),
    ("sums in place", sums_in_place, "changes_input"),
    ("by columns", Muon(matrix=by_columns), "wrong_update"),
    ("nothing", lambda *_: None, "not_updated"),
    ("updates in place alone", lambda *given: (Muon()(*given), None)[1],
     "wrong_type nothing"),
    ("float64", lambda *given: Muon()(*given).double(), "wrong_dtype"),
    ("whole update", lambda *given: gathered(Muon()(*given), given[3]),
     "wrong_type")]


# What is still on its way when the check has ended would reach the next answer's receives.
IN_A_LAUNCH_OF_ITS_OWN = [
    (Muon(matrix=exchanged(waits=False), barrier=True), "never_waited"),
    (Muon(matrix=send_first), "deadlock_on_nccl")]


@pytest.mark.parametrize("answer, words", IN_A_LAUNCH_OF_ITS_OWN, ids=["never waits", "send first"])
def test_messages_on_their_way(warm_launcher, answer, words):
    assert_rejected(lab.check_muon_update(answer), words)


@pytest.fixture(scope="module")
def verdicts(warm_launcher, request):
    """By name, the verdict on each wrong answer that is asked for, in one launch."""
    names = asked_for(request, "name")
    answers = {name: (answer,) for name, answer, _ in WRONG if name in names}
    found = judge_in_one_launch(lab.check_muon_update, list(answers.values()), RANKS)
    return dict(zip(answers, found, strict=True))


@pytest.mark.parametrize("name, words", [(each[0], each[2]) for each in WRONG],
                         ids=[each[0] for each in WRONG])
def test_wrong_update(verdicts, name, words):
    assert_rejected(verdicts[name], words)


def first_owner(gradients, momentum, shapes, group):
    """The first owner of a matrix computes its update, and sends each other its piece; blocking
    calls, of which one rank's send meets another's receive."""
    rank, update = dist.get_rank(group), torch.zeros_like(momentum)
    momentum.mul_(0.95).add_(mean_of(sum(gradients), momentum, group))
    for (rows, columns), pieces in zip(shapes, lab.pieces_of(shapes, group.size()), strict=True):
        if rank not in pieces:
            continue
        owner, *others = sorted(pieces)
        mine = pieces[rank].in_shard
        if rank != owner:
            dist.send(momentum[mine], group=group, group_dst=owner)
            dist.recv(update[mine], group=group, group_src=owner)
            continue
        flat = momentum.new_empty(rows * columns)
        flat[pieces[rank].in_matrix] = momentum[mine]
        for other in others:
            dist.recv(flat[pieces[other].in_matrix], group=group, group_src=other)
        flat = lab.newton_schulz(flat.view(rows, columns)).flatten()
        for other in others:
            dist.send(flat[pieces[other].in_matrix], group=group, group_dst=other)
        update[mine] = flat[pieces[rank].in_matrix]
    return update


def all_in_one_batch(gradients, momentum, shapes, group):
    """All matrices on a boundary travel at once; the reduction is an all-to-all."""
    rank, parts = dist.get_rank(group), torch.stack(gradients).sum(0)
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    momentum.copy_(0.95 * momentum + arrived.view(group.size(), -1).mean(0))
    whole, batch = {}, []
    layout = lab.pieces_of(shapes, group.size())
    for number, (shape, pieces) in enumerate(zip(shapes, layout, strict=True)):
        if rank not in pieces:
            continue
        flat = whole[number] = torch.zeros(shape).flatten()
        mine = flat[pieces[rank].in_matrix].copy_(momentum[pieces[rank].in_shard])
        for other in sorted(set(pieces) - {rank}):
            batch.append(dist.P2POp(dist.irecv, flat[pieces[other].in_matrix], group=group,
                                    group_peer=other))
            batch.append(dist.P2POp(dist.isend, mine, group=group, group_peer=other))
    for work in dist.batch_isend_irecv(batch) if batch else ():
        work.wait()
    done = [lab.newton_schulz(flat.view(shapes[number])).flatten()[layout[number][rank].in_matrix]
            for number, flat in whole.items()]
    update = torch.cat(done) if done else momentum[:0]
    return torch.nn.functional.pad(update, (0, len(momentum) - len(update)))


def test_right_updates():
    judge_all(lab.check_muon_update, [], [Muon(), first_owner, all_in_one_batch], RANKS)


def test_right_on_all_numbers_of_ranks():
    verdict = lab.check_muon_update(right.muon_update)
    assert verdict.passed, verdict


def test_peers_are_numbered_in_their_group():
    verdict = lab.check_muon_update(Muon(matrix=exchanged(peer="peer")))
    assert_rejected(verdict, "raised_RuntimeError numbered")


def test_unfilled():
    assert_waits(lab.check_muon_update, "7.13")

"""What the checks of notebook 03's exercises 3.6, 3.7 and 3.9 must reject, and accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from zero_answers import N, accepted, named, rejected, right

import labs.zero_stages as lab
from labs.predictions import hardware
from labs.zero_stages.checks import choose

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def gradients_of(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]


def scaled(optimizer, norm, max_norm):
    for gradient in gradients_of(optimizer):
        gradient.mul_(min(1.0, max_norm / float(norm)))
    return norm


def local_square(optimizer):
    return sum(gradient.square().sum() for gradient in gradients_of(optimizer))


# 3.6 clip_grad_norm


class Clip:
    def nothing(optimizer, max_norm):
        pass

    def torchs(optimizer, max_norm):
        """Sees this rank's shards alone."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def own_norm(optimizer, max_norm):
        return scaled(optimizer, local_square(optimizer).sqrt(), max_norm)

    def norms_added(optimizer, max_norm):
        norm = local_square(optimizer).sqrt()
        dist.all_reduce(norm)
        return scaled(optimizer, norm, max_norm)

    def mean_of_norms(optimizer, max_norm):
        norm = local_square(optimizer).sqrt()
        dist.all_reduce(norm)
        return scaled(optimizer, norm / N(), max_norm)

    def largest_norm(optimizer, max_norm):
        norm = local_square(optimizer).sqrt()
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        return scaled(optimizer, norm, max_norm)

    def root_forgotten(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        return scaled(optimizer, square, max_norm)

    def each_shard_by_itself(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        for gradient in gradients_of(optimizer):
            gradient.mul_(min(1.0, max_norm / gradient.norm().item()))
        return square.sqrt()

    def always_scaled(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        for gradient in gradients_of(optimizer):
            gradient.mul_(max_norm / square.sqrt())
        return square.sqrt()

    def not_scaled(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        return square.sqrt()

    def not_a_number(optimizer, max_norm):
        return scaled(optimizer, local_square(optimizer) * float("nan"), max_norm)

    def returns_nothing(optimizer, max_norm):
        right.clip_grad_norm(optimizer, max_norm)

    def everything_gathered(optimizer, max_norm):
        square = 0.0
        for gradient in gradients_of(optimizer):
            whole = gradient.new_empty(gradient.numel() * N())
            lab.all_gather(whole, gradient)
            square += whole.square().sum()
        return scaled(optimizer, square.sqrt(), max_norm)


@pytest.mark.parametrize("answer, words", [
    (Clip.nothing, "clip_grad_norm returned nothing .None., not the norm"),
    (Clip.torchs, r"rank 0, the norm: .*norm of this rank's shards alone"),
    (Clip.own_norm, r"rank 0, the norm: .*norm of this rank's shards alone"),
    (Clip.norms_added, r"the norm: you say .*\n.*Norms do not add up, their squares do"),
    (Clip.mean_of_norms, r"the norm: you say .*\n.*Norms do not add up"),
    (Clip.largest_norm, "the norm: you say .*, that of the whole gradient is"),
    (Clip.root_forgotten, r"the norm: .*its square\n.*Take the root after the sum"),
    (Clip.each_shard_by_itself, "max_norm 0.5: the gradients are .*x what they were, instead of"),
    (Clip.always_scaled, r"max_norm 1e\+06: the gradients are .* instead of 1.0000x"),
    (Clip.not_scaled, "max_norm 0.5: the gradients are 1.0000x what they were"),
    (Clip.not_a_number, "rank 0, the norm: it returned nan, not a number"),
    (Clip.returns_nothing, "returned nothing .None., not the norm"),
    (Clip.everything_gathered, "communicates .* elements to find one number")], ids=named)
def test_wrong_clip(answer, words):
    rejected(lab.check_clip_grad_norm(answer), words)


def clip_by_a_vector(optimizer, max_norm):
    """As torch does it: the norm of the norms, and a small number in the divisor."""
    norms = torch.stack([gradient.norm() for gradient in gradients_of(optimizer)])
    square = norms.norm().square()
    dist.all_reduce(square)
    factor = min(1.0, max_norm / (square.sqrt().item() + 1e-6))
    for gradient in gradients_of(optimizer):
        gradient.mul_(factor)
    return square.sqrt().item()


@pytest.mark.parametrize("answer", [right.clip_grad_norm, clip_by_a_vector])
def test_right_clip(answer):
    accepted(lab.check_clip_grad_norm(answer))


# 3.7 reshard


class Reshard:
    def nothing(pieces, elements, ranks):
        return None

    def as_they_are(pieces, elements, ranks):
        return pieces

    def padding_kept(pieces, elements, ranks):
        return right.cut(torch.cat(pieces), ranks)

    def chunks(pieces, elements, ranks):
        return list(torch.cat(pieces)[:elements].chunk(ranks))

    def only_the_first(pieces, elements, ranks):
        return right.cut(pieces[0], ranks)

    def each_divided(pieces, elements, ranks):
        cuts = [right.cut(piece, ranks) for piece in pieces]
        return [torch.cat(parts) for parts in zip(*cuts, strict=True)]

    def reversed(pieces, elements, ranks):
        return right.cut(torch.cat(pieces)[:elements], ranks)[::-1]

    def one_short(pieces, elements, ranks):
        return right.cut(torch.cat(pieces)[:elements], ranks)[:-1]


@pytest.mark.parametrize("answer, words", [
    (Reshard.nothing, "reshard returned nothing .None."),
    (Reshard.as_they_are, "1597 elements from 2 to 3 ranks: 2 pieces"),
    (Reshard.padding_kept, "1597 elements from 3 to 2 ranks: rank 0 gets 800 numbers, not 799"),
    (Reshard.chunks, "1597 elements from 2 to 3 ranks: rank 2 gets 531 numbers, not 533"),
    (Reshard.only_the_first, "from 2 to 3 ranks: rank 0 gets"),
    (Reshard.each_divided, "from 2 to 3 ranks: rank 0 gets"),
    (Reshard.reversed, "rank 0 gets other numbers than are its own"),
    (Reshard.one_short, "from 2 to 3 ranks: 2 pieces")], ids=named)
def test_wrong_reshard(answer, words):
    rejected(lab.check_reshard(answer, right.zero1), words)


def test_loading_needs_a_strategy_that_can_be_saved():
    def plain(model, optimizer_class, **settings):
        return model, optimizer_class(model.parameters(), **settings)

    rejected(lab.check_reshard(right.reshard, plain), "is an AdamW, not a lab.ShardedOptimizer")


class MomentsLost(right.ZeRO1):
    """Forgets a moment in every step, so also between saving and loading."""

    def gather(self):
        super().gather()
        for state in self.state.values():
            state["exp_avg"].zero_()


class NotFinite(right.ZeRO1):
    """The last number is padding on the 3 ranks that save, not on the 2 that load."""

    def gather(self):
        super().gather()
        self.flats[-1].full[-1] = float("nan")


@pytest.mark.parametrize("optimizer, words", [
    (MomentsLost, "after 2 steps on 3 ranks, before anything is saved: it was updated to"),
    (NotFinite, "2 steps after loading on 2 ranks: it is not finite")], ids=named)
def test_training_must_go_on_as_if_never_interrupted(optimizer, words):
    def strategy(model, optimizer_class, **settings):
        return model, optimizer(lab.flatten_layers(model), optimizer_class, **settings)

    rejected(lab.check_reshard(right.reshard, strategy), words)


def reshard_by_index(pieces, elements, ranks):
    flat = torch.zeros(-(-elements // ranks) * ranks)
    flat[:elements] = torch.cat(list(pieces))[:elements]
    return flat.view(ranks, -1).unbind()


@pytest.mark.parametrize("answer", [right.reshard, reshard_by_index])
def test_right_reshard(answer):
    accepted(lab.check_reshard(answer, right.zero1))


# 3.9 choose


def fits(stage, parameters, ranks, capacity, activations):
    return lab.state_bytes(parameters, ranks, stage) + activations <= capacity


class Choose:
    def nothing(*case):
        return None

    def always_3(*case):
        return 3

    def never_none(*case):
        return next((stage for stage in range(3) if fits(stage, *case)), 3)

    def the_highest(*case):
        return next((stage for stage in (3, 2, 1, 0) if fits(stage, *case)), None)

    def without_activations(parameters, ranks, capacity, activations):
        return right.choose(parameters, ranks, capacity, 0)

    def gibibytes(parameters, ranks, capacity, activations):
        return right.choose(parameters, ranks, capacity / 1e9 * 2**30, activations)

    def limits(parameters, ranks, capacity, activations):
        """4 times, 8 times, N times, as the tables say."""
        for stage, saving in enumerate((1, 4, 8, ranks)):
            if 16 * parameters / saving + activations <= capacity:
                return stage

    def no_stage_1(*case):
        return next((stage for stage in (0, 2, 3) if fits(stage, *case)), None)

    def one_rank(parameters, ranks, capacity, activations):
        return right.choose(parameters, 1, capacity, activations)

    def a_name(*case):
        return f"ZeRO-{right.choose(*case)}"

    def a_bool(*case):
        return fits(0, *case)


@pytest.mark.parametrize("answer, words", [
    (Choose.nothing, "1.3B on 1 × A100-40 .*: you say that nothing fits; stage 0 fits too"),
    (Choose.always_3, "you say stage 3; stage 0 fits too"),
    (Choose.never_none, "you say stage 3, which takes .* of 42.4 GB"),
    (Choose.the_highest, "you say stage 3; stage 0 fits too"),
    (Choose.without_activations, "12 GB of activations: you say stage"),
    (Choose.gibibytes, "which takes .* GB"),
    (Choose.limits, "you say stage 1, which takes .* GB"),
    (Choose.no_stage_1, "you say stage 2; stage 1 fits too"),
    (Choose.one_rank, "you say that nothing fits; stage"),
    (Choose.a_name, "choose returned 'ZeRO-0'"),
    (Choose.a_bool, "choose returned True")], ids=named)
def test_wrong_choose(answer, words):
    rejected(lab.check_choose(answer), words)


def choose_by_min(*case):
    return min((stage for stage in range(4) if fits(stage, *case)), default=None)


@pytest.mark.parametrize("answer", [right.choose, choose_by_min])
def test_right_choose(answer):
    accepted(lab.check_choose(answer))


def test_the_cases_ask_for_every_stage():
    asked = {choose.lowest_stage(parameters, ranks, hardware.gpu(gpu).usable, 12e9)
             for parameters in choose.MODELS.values() for ranks in choose.RANKS
             for gpu in choose.GPUS}
    assert asked == {0, 1, 2, 3, None}

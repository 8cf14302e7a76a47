"""What the checks of notebook 03's exercises 3.6, 3.7 and 3.9 must reject, and accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from zero_answers import N, accepted, named, rejected, right

import labs.zero_stages as lab
from labs.predictions import hardware
from labs.zero_stages import choose

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

    def first_group_alone(optimizer, max_norm):
        optimizer.param_groups = optimizer.param_groups[:1]
        return right.clip_grad_norm(optimizer, max_norm)

    def first_group_scaled(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        norm = square.sqrt()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(min(1.0, max_norm / float(norm)))
        return norm

    def replaced(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        norm = square.sqrt()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * min(1.0, max_norm / float(norm))
        return norm

    def norm_afterwards(optimizer, max_norm):
        return right.clip_grad_norm(optimizer, max_norm).clamp(max=max_norm)

    def clipped_by_value(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        for gradient in gradients_of(optimizer):
            gradient.clamp_(-max_norm, max_norm)
        return square.sqrt()

    def of_the_weights(optimizer, max_norm):
        square = sum(p.detach().square().sum() for group in optimizer.param_groups
                     for p in group["params"])
        dist.all_reduce(square)
        return scaled(optimizer, square.sqrt(), max_norm)

    def not_reduced_before(optimizer, max_norm):
        square = local_square(optimizer) + torch.zeros(())
        dist.all_reduce(square)
        return scaled(optimizer, square.sqrt(), max_norm)

    def everything_gathered(optimizer, max_norm):
        square = 0.0
        for gradient in gradients_of(optimizer):
            whole = gradient.new_empty(gradient.numel() * N())
            lab.all_gather(whole, gradient)
            square += whole.square().sum()
        return scaled(optimizer, square.sqrt(), max_norm)


@pytest.mark.parametrize("answer, words", [
    (Clip.nothing, "not_a_number"),
    (Clip.torchs, "norm_of_one_rank"),
    (Clip.own_norm, "norm_of_one_rank"),
    (Clip.norms_added, "wrong_number"),
    (Clip.mean_of_norms, "wrong_number"),
    (Clip.largest_norm, "norm_of_one_rank"),
    (Clip.root_forgotten, "square_not_root"),
    (Clip.each_shard_by_itself, "wrong_scale"),
    (Clip.always_scaled, "clipped_below_limit"),
    (Clip.not_scaled, "not_scaled"),
    (Clip.not_a_number, "not_a_number number"),
    (Clip.returns_nothing, "not_a_number"),
    (Clip.first_group_alone, "wrong_number"),
    (Clip.first_group_scaled, "not_scaled"),
    (Clip.replaced, "gradient_replaced"),
    (Clip.norm_afterwards, "norm_after_clipping"),
    (Clip.clipped_by_value, "wrong_scale"),
    (Clip.of_the_weights, "wrong_number"),
    (Clip.not_reduced_before, "norm_before_reduce"),
    (Clip.everything_gathered, "too_much_sent")], ids=named)
def test_wrong_clip(answer, words):
    rejected(lab.check_clip_grad_norm(answer), words)


def clip_by_a_vector(optimizer, max_norm):
    """As torch does it: the norm of the norms, and a small number in the divisor."""
    optimizer.reduce_once()
    norms = torch.stack([gradient.norm() for gradient in gradients_of(optimizer)])
    square = norms.norm().square()
    dist.all_reduce(square)
    factor = min(1.0, max_norm / (square.sqrt().item() + 1e-6))
    for gradient in gradients_of(optimizer):
        gradient.mul_(factor)
    return square.sqrt().item()


def clip_by_torchs_pieces(optimizer, max_norm):
    """torch's own functions for a norm and for scaling by one."""
    optimizer.reduce_once()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm(gradients_of(optimizer)) ** 2
    dist.all_reduce(norm)
    norm = norm.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def clip_by_gathered_norms(optimizer, max_norm):
    """One number of each rank, by a functional collective."""
    optimizer.reduce_once()
    mine = local_square(optimizer).sqrt().reshape(1)
    norm = torch.linalg.vector_norm(funcol.all_gather_tensor(mine, 0, dist.group.WORLD))
    torch._foreach_mul_(gradients_of(optimizer), min(1.0, max_norm / norm.item()))
    return norm


@pytest.mark.parametrize("answer", [right.clip_grad_norm, clip_by_a_vector, clip_by_torchs_pieces,
                                    clip_by_gathered_norms])
def test_right_clip(answer):
    accepted(lab.check_clip_grad_norm(answer))


# 3.7 reshard


def lengths(elements, before, after):
    return -(-elements // before), -(-elements // after)


def everything(read, elements, before):
    """The whole, with its padding."""
    length = -(-elements // before)
    return torch.cat([read(old, 0, length) for old in range(before)])


class Reshard:
    def nothing(read, elements, before, after, rank):
        return None

    def as_they_are(read, elements, before, after, rank):
        return read(rank, 0, -(-elements // before))

    def all_shards(read, elements, before, after, rank):
        return right.cut(everything(read, elements, before)[:elements], after)

    def everything_read(read, elements, before, after, rank):
        return right.cut(everything(read, elements, before)[:elements], after)[rank]

    def padding_kept(read, elements, before, after, rank):
        return right.cut(everything(read, elements, before), after)[rank]

    def zeros_taken_for_padding(read, elements, before, after, rank):
        whole = everything(read, elements, before)
        last = int(whole.nonzero().max()) + 1 if whole.any() else 1
        return right.cut(whole[:last], after)[rank]

    def chunks(read, elements, before, after, rank):
        chunks = everything(read, elements, before)[:elements].chunk(after)
        return chunks[rank] if rank < len(chunks) else torch.zeros(0)

    def only_one_old_rank(read, elements, before, after, rank):
        """Right where a new shard lies inside an old one."""
        old, k = lengths(elements, before, after)
        source = min(rank * k // old, before - 1)
        begin = min(rank * k - source * old, old)
        part = read(source, begin, min(begin + k, old))
        return torch.nn.functional.pad(part, (0, k - len(part)))

    def swapped(read, elements, before, after, rank):
        return right.reshard(read, elements, after, before, rank)

    def rounded_down(read, elements, before, after, rank):
        return right.reshard(read, elements, before, after, rank)[:elements // after]

    def not_padded(read, elements, before, after, rank):
        k = -(-elements // after)
        return right.reshard(read, elements, before, after, rank)[:max(0, elements - rank * k)]

    def reversed(read, elements, before, after, rank):
        return right.reshard(read, elements, before, after, after - 1 - rank)

    def a_list(read, elements, before, after, rank):
        return right.reshard(read, elements, before, after, rank).tolist()

    def counted_in_the_whole(read, elements, before, after, rank):
        k = -(-elements // after)
        return read(0, rank * k, min((rank + 1) * k, elements))

    def to_the_end_of_the_old_shard(read, elements, before, after, rank):
        """Reads what is behind the last element, because it is zero."""
        old, k = lengths(elements, before, after)
        shard = torch.zeros(k)
        first, last = rank * k, (rank + 1) * k
        for source in range(before):
            begin, end = max(first, source * old), min(last, (source + 1) * old)
            if begin < end:
                shard[begin - first:end - first] = read(source, begin - source * old,
                                                        end - source * old)
        return shard

    def one_short(read, elements, before, after, rank):
        shard = right.reshard(read, elements, before, after, rank)
        return torch.cat([shard[:-1], shard.new_zeros(1)])

    def one_after_the_other(read, elements, before, after, rank):
        """Reads its elements one by one, each from the beginning of its shard."""
        old, k = lengths(elements, before, after)
        shard = torch.zeros(k)
        for n in range(k):
            if rank * k + n < elements:
                source, place = divmod(rank * k + n, old)
                shard[n] = read(source, 0, place + 1)[place]
        return shard


@pytest.mark.parametrize("answer, words", [
    (Reshard.nothing, "wrong_type nothing"),
    (Reshard.as_they_are, "wrong_shape"),
    (Reshard.all_shards, "wrong_type"),
    (Reshard.everything_read, "reads_too_much"),
    (Reshard.padding_kept, "wrong_shape 800"),
    (Reshard.zeros_taken_for_padding, "wrong_shape 599"),
    (Reshard.chunks, "reads_too_much"),
    (Reshard.only_one_old_rank, "wrong_elements"),
    (Reshard.swapped, "wrong_shape"),
    (Reshard.rounded_down, "wrong_shape"),
    (Reshard.not_padded, "wrong_shape"),
    (Reshard.reversed, "wrong_elements"),
    (Reshard.a_list, "wrong_type 799"),
    (Reshard.counted_in_the_whole, "out_of_range"),
    (Reshard.to_the_end_of_the_old_shard, "padding_kept"),
    (Reshard.one_short, "wrong_elements"),
    (Reshard.one_after_the_other, "reads_too_much")], ids=named)
def test_wrong_reshard(answer, words):
    rejected(lab.check_reshard(answer, right.zero1), words)


def test_loading_needs_a_strategy_that_can_be_saved():
    def plain(model, optimizer_class, **settings):
        return model, optimizer_class(model.parameters(), **settings)

    rejected(lab.check_reshard(right.reshard, plain), "wrong_strategy")


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
    (MomentsLost, "differs_from_reference"),
    (NotFinite, "not_finite")], ids=named)
def test_training_must_go_on_as_if_never_interrupted(optimizer, words):
    def strategy(model, optimizer_class, **settings):
        return model, optimizer(lab.flatten_layers(model), optimizer_class, **settings)

    rejected(lab.check_reshard(right.reshard, strategy), words)


def reshard_without_what_is_behind(read, elements, before, after, rank):
    """Reads old padding, too, and leaves it out of the new shard."""
    shard = Reshard.to_the_end_of_the_old_shard(read, elements, before, after, rank)
    shard[max(0, elements - rank * len(shard)):] = 0
    return shard


def reshard_by_index(read, elements, before, after, rank):
    """Element by element, with NumPy's integers."""
    old, k = lengths(elements, before, after)
    shard = torch.zeros(k)
    for n in np.arange(k):
        whole = rank * k + n
        if whole < elements:
            shard[n] = read(whole // old, whole % old, whole % old + 1)[0]
    return shard


def reshard_by_pieces(read, elements, before, after, rank):
    """As many pieces as there are old ranks, also empty ones, and padding at the end."""
    old, k = lengths(elements, before, after)
    pieces = []
    for source in range(before):
        begin = min(max(rank * k - source * old, 0), old)
        stop = min((rank + 1) * k, elements) - source * old
        pieces.append(read(source, begin, max(begin, min(stop, old))))
    whole = torch.cat(pieces)
    return torch.nn.functional.pad(whole, (0, k - len(whole)))


@pytest.mark.parametrize("answer", [right.reshard, reshard_by_index, reshard_by_pieces,
                                    reshard_without_what_is_behind])
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

    def activations_divided(parameters, ranks, capacity, activations):
        return right.choose(parameters, ranks, capacity, activations / ranks)

    def activations_divided_from_stage_3(parameters, ranks, capacity, activations):
        for stage in range(4):
            share = activations / ranks if stage == 3 else activations
            if fits(stage, parameters, ranks, capacity, share):
                return stage

    def nearly_full(parameters, ranks, capacity, activations):
        return right.choose(parameters, ranks, 0.8 * capacity, activations)

    def capacity_of_all_ranks(parameters, ranks, capacity, activations):
        return right.choose(parameters, ranks, capacity * ranks, activations)

    def less_than(parameters, ranks, capacity, activations):
        return next((stage for stage in range(4) if lab.state_bytes(parameters, ranks, stage)
                     + activations < capacity), None)

    def minus_one(*case):
        stage = right.choose(*case)
        return -1 if stage is None else stage

    def a_name(*case):
        return f"ZeRO-{right.choose(*case)}"

    def a_bool(*case):
        return fits(0, *case)


@pytest.mark.parametrize("answer, words", [
    (Choose.nothing, "stage_too_high"),
    (Choose.always_3, "stage_too_high"),
    (Choose.never_none, "stage_too_low"),
    (Choose.the_highest, "stage_too_high"),
    (Choose.without_activations, "stage_too_low"),
    (Choose.gibibytes, "stage_too_low"),
    (Choose.limits, "stage_too_low"),
    (Choose.no_stage_1, "stage_too_high"),
    (Choose.one_rank, "stage_too_high"),
    (Choose.activations_divided, "stage_too_low"),
    (Choose.activations_divided_from_stage_3, "stage_too_low"),
    (Choose.nearly_full, "stage_too_high"),
    (Choose.capacity_of_all_ranks, "stage_too_low"),
    (Choose.less_than, "exact_fit_refused"),
    (Choose.minus_one, "not_a_stage"),
    (Choose.a_name, "not_a_stage 'ZeRO-0'"),
    (Choose.a_bool, "not_a_stage True")], ids=named)
def test_wrong_choose(answer, words):
    rejected(lab.check_choose(answer), words)


def choose_by_min(*case):
    return min((stage for stage in range(4) if fits(stage, *case)), default=None)


def choose_by_gigabytes(parameters, ranks, capacity, activations):
    """Subtracts, in GB."""
    room = capacity / 1e9 - activations / 1e9
    return next((stage for stage in range(4)
                 if lab.state_bytes(parameters, ranks, stage) / 1e9 <= room), None)


def choose_by_numpy(*case):
    found = np.flatnonzero([fits(stage, *case) for stage in range(4)])
    return found[0] if len(found) else None


def choose_by_tensor(*case):
    return None if right.choose(*case) is None else torch.tensor(right.choose(*case))


@pytest.mark.parametrize("answer", [right.choose, choose_by_min, choose_by_numpy,
                                    choose_by_tensor, choose_by_gigabytes])
def test_right_choose(answer):
    accepted(lab.check_choose(answer))


def test_the_cases_ask_for_every_stage():
    asked = {choose.lowest_stage(parameters, ranks, hardware.gpu(gpu).usable, 12e9)
             for parameters in choose.MODELS.values() for ranks in choose.RANKS
             for gpu in choose.GPUS}
    assert asked == {0, 1, 2, 3, None}

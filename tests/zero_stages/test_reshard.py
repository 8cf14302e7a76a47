"""What the check of exercise 3.7 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from zero_answers import accepted, named, rejected, right

import labs.zero_stages as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


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

"""What the check of exercise 2.5 must reject, and what it must accept."""

import itertools
import sys

import cloudpickle
import pytest
from ddp_answers import (
    Answers,
    accepted,
    make_buckets,
    rejected,
    right,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]


# 2.5 make_buckets


class Buckets:
    def all_in_one(parameters, cap):
        return [[p for p in parameters if p.requires_grad][::-1]]

    def one_each(parameters, cap):
        return [[p] for p in list(parameters)[::-1] if p.requires_grad]

    def first_layer_first(parameters, cap):
        return [b[::-1] for b in make_buckets(parameters, cap)[::-1]]

    def last_one_dropped(parameters, cap):
        return make_buckets(parameters, cap)[:-1]

    def counts_elements(parameters, cap):
        return make_buckets(parameters, cap * 4)

    def closed_after_the_cap(parameters, cap):
        buckets, size = [[]], 0
        for p in [p for p in parameters if p.requires_grad][::-1]:
            buckets[-1].append(p)
            size += p.numel() * p.element_size()
            if size >= cap:
                buckets.append([])
                size = 0
        return [b for b in buckets if b]

    def frozen_too(parameters, cap):
        parameters = list(parameters)
        frozen = [[p] for p in parameters if not p.requires_grad]
        return make_buckets(parameters, cap) + frozen

    def names(parameters, cap):
        return [["second.bias"]]

    def copies(parameters, cap):
        return [[p.clone() for p in b] for b in make_buckets(parameters, cap)]

    def mixed_types(parameters, cap):
        buckets, size = [], 0
        for p in [p for p in parameters if p.requires_grad][::-1]:
            nbytes = p.numel() * p.element_size()
            if not buckets or size + nbytes > cap:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += nbytes
        return buckets

    def an_empty_one(parameters, cap):
        return [[], *make_buckets(parameters, cap)]

    def nothing(parameters, cap):
        return None

    def a_generator(parameters, cap):
        yield from make_buckets(parameters, cap)

    def an_iterator(parameters, cap):
        return reversed(make_buckets(parameters, cap)[::-1])

    def sets(parameters, cap):
        return [set(bucket) for bucket in make_buckets(parameters, cap)]

    def a_flat_list(parameters, cap):
        return [p for p in parameters if p.requires_grad][::-1]

    def turns_the_list_round(parameters, cap):
        parameters = parameters if isinstance(parameters, list) else list(parameters)
        parameters.reverse()
        return make_buckets(parameters[::-1], cap)

    def four_bytes_each(parameters, cap):
        return greedy(parameters, cap, size_of=lambda p: 4 * p.numel())

    def elements(parameters, cap):
        return greedy(parameters, cap // 4, size_of=lambda p: p.numel())

    def below_the_cap(parameters, cap):
        return greedy(parameters, cap - 1)

    def begins_with_an_empty_one(parameters, cap):
        buckets, size = [[]], 0
        for p in [p for p in parameters if p.requires_grad][::-1]:
            nbytes = p.numel() * p.element_size()
            if size + nbytes > cap or buckets[-1] and buckets[-1][0].dtype != p.dtype:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += nbytes
        return buckets

    def too_large_left_out(parameters, cap):
        return make_buckets([p for p in parameters if p.numel() * p.element_size() <= cap], cap)

    def too_large_joined_by_the_next(parameters, cap):
        buckets, size = [], cap
        for p in [p for p in parameters if p.requires_grad][::-1]:
            nbytes = p.numel() * p.element_size()
            if size + nbytes > cap or buckets[-1][0].dtype != p.dtype:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += nbytes if nbytes <= cap else 0
        return buckets

    def dtype_of_the_first(parameters, cap):
        parameters = [p for p in parameters if p.requires_grad]
        same = [p for p in parameters if p.dtype == parameters[-1].dtype]
        other = [p for p in parameters if p.dtype != parameters[-1].dtype]
        return make_buckets(same, cap) + make_buckets(other, cap)

    def largest_first(parameters, cap):
        return sorted(make_buckets(parameters, cap), key=len)

    def turned_round_inside(parameters, cap):
        return [bucket[::-1] for bucket in make_buckets(parameters, cap)]

    def one_twice(parameters, cap):
        buckets = make_buckets(parameters, cap)
        return [*buckets, buckets[-1]]


def greedy(parameters, cap, size_of=lambda p: p.numel() * p.element_size()):
    buckets, size = [], 0
    for p in [p for p in parameters if p.requires_grad][::-1]:
        fits = buckets and size + size_of(p) <= cap and buckets[-1][0].dtype == p.dtype
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += size_of(p)
    return buckets


WRONG = [
    (Buckets.nothing, "wrong_type"),
    (Buckets.all_in_one, "cap_exceeded"),
    (Buckets.one_each, "bucket_not_filled"),
    (Buckets.first_layer_first, "not_last_layer_first"),
    (Buckets.last_one_dropped, "missing_entry"),
    (Buckets.counts_elements, "cap_exceeded"),
    (Buckets.closed_after_the_cap, "cap_exceeded"),
    (Buckets.frozen_too, "frozen_parameter"),
    (Buckets.names, "not_own_parameters"),
    (Buckets.copies, "not_own_parameters"),
    (Buckets.an_empty_one, "empty_bucket"),
    (Buckets.mixed_types, "mixed_dtypes"),
    (Buckets.a_generator, "wrong_type generator"),
    (Buckets.an_iterator, "wrong_type list_reverseiterator"),
    (Buckets.sets, "wrong_type set"),
    (Buckets.a_flat_list, "wrong_type"),
    (Buckets.turns_the_list_round, "changes_input"),
    (Buckets.four_bytes_each, "cap_exceeded|bucket_not_filled"),
    (Buckets.elements, "cap_exceeded|bucket_not_filled"),
    (Buckets.below_the_cap, "bucket_not_filled 280"),
    (Buckets.begins_with_an_empty_one, "empty_bucket"),
    (Buckets.too_large_left_out, "missing_entry"),
    (Buckets.too_large_joined_by_the_next, "cap_exceeded"),
    (Buckets.dtype_of_the_first, "grouped_by_dtype"),
    (Buckets.largest_first, "not_last_layer_first|wrong_order"),
    (Buckets.turned_round_inside, "not_last_layer_first|wrong_order"),
    (Buckets.one_twice, "duplicate_entry")]
WRONG_ANSWERS = Answers([
    *((lab.check_make_buckets, *row) for row in WRONG)])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


# right, and written in another way


class Right:
    def one_open_for_each_dtype(parameters, cap):
        """As torch does."""
        buckets, opened = [], {}
        for p in [p for p in parameters if p.requires_grad][::-1]:
            nbytes = p.numel() * p.element_size()
            bucket, size = opened.get(p.dtype, (None, cap))
            if bucket is None or size + nbytes > cap:
                bucket, size = [], 0
                buckets.append(bucket)
            bucket.append(p)
            opened[p.dtype] = bucket, size + nbytes
        return buckets

    def tuples(parameters, cap):
        return tuple(map(tuple, make_buckets(parameters, cap)))

    def grouped(parameters, cap):
        room, group, before = [0], [0], [None]

        def number(p):
            room[0] -= p.nbytes
            if room[0] < 0 or p.dtype != before[0]:
                group[0] += 1
                room[0] = cap - p.nbytes
            before[0] = p.dtype
            return group[0]

        wanted = [p for p in parameters if p.requires_grad][::-1]
        return [list(bucket) for _, bucket in itertools.groupby(wanted, key=number)]


RIGHT_ANSWERS = Answers([
    *((lab.check_make_buckets, answer) for answer in (
        right.make_buckets, Right.one_open_for_each_dtype, Right.tuples, Right.grouped,
        greedy))], ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))

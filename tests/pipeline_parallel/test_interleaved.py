"""What the check of exercise 7.16 must reject, and what it must accept."""

import pytest
from answers import assert_rejected, assert_waits, named
from schedule_answers import interleaved, one_f_one_b

import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F


def all_forwards_first(ranks, micro_batches, chunks):
    """Breadth first: every micro-batch through chunk 0, then all through chunk 1."""
    one = [F(i, chunk) for chunk in range(chunks) for i in range(micro_batches)]
    one += [B(i, chunk) for chunk in reversed(range(chunks)) for i in range(micro_batches)]
    return [one] * ranks


def with_warm_up(length):
    """Megatron's order with another warm-up."""
    def answer(ranks, micro_batches, chunks):
        right = interleaved(ranks, micro_batches, chunks)
        lists = []
        for rank, actions in enumerate(right):
            forwards = [action for action in actions if action.kind == "F"]
            backwards = [action for action in actions if action.kind == "B"]
            first = max(0, min(len(forwards), length(ranks, chunks, rank)))
            found = forwards[:first]
            for forward, backward in zip(forwards[first:], backwards, strict=False):
                found += [forward, backward]
            lists.append(found + backwards[len(forwards) - first:])
        return lists

    return answer


def depth_first(ranks, micro_batches, chunks):
    """Each micro-batch through all chunks before the next one begins."""
    return [[kind(i, chunk) for i in range(micro_batches) for kind, order in
             ((F, range(chunks)), (B, reversed(range(chunks)))) for chunk in order]
            for _ in range(ranks)]


WRONG = named(
    one_f_one_b=(lambda ranks, micro_batches, chunks: one_f_one_b(ranks, micro_batches),
                 "action_missing"),
    breadth_first=(all_forwards_first, "too_many_in_flight"),
    depth_first=(depth_first, "one_rank_at_a_time"),
    one_f_one_bs_warm_up=(with_warm_up(lambda p, v, rank: p - 1 - rank),
                          "wrong_order"),
    one_too_few=(with_warm_up(lambda p, v, rank: p - 2 - rank + (v - 1) * p),
                 "wrong_order"),
    one_too_many=(with_warm_up(lambda p, v, rank: 2 * (p - 1 - rank) + (v - 1) * p + 1),
                  "too_many_in_flight"),
    same_on_all_ranks=(with_warm_up(lambda p, v, rank: (v - 1) * p),
                       "too_many_slots"),
    all_in_the_warm_up=(with_warm_up(lambda p, v, rank: 10**6), "too_many_in_flight"),
    for_2_chunks=(lambda ranks, micro_batches, chunks: interleaved(ranks, micro_batches, 2),
                  "action_missing"),
    chunk_from_1=(lambda ranks, micro_batches, chunks: [
        [type(action)(action.kind, action.micro_batch, action.chunk + 1) for action in actions]
        for actions in interleaved(ranks, micro_batches, chunks)], "no_such_chunk has"),
    backwards_in_the_order_of_forwards=(lambda ranks, micro_batches, chunks: [
        [*(action for action in actions if action.kind == "F"),
         *(B(action.micro_batch, action.chunk) for action in actions if action.kind == "F")]
        for actions in interleaved(ranks, micro_batches, chunks)],
        "deadlock"))
RIGHT = [
    interleaved, with_warm_up(lambda p, v, rank: 2 * (p - 1 - rank) + (v - 1) * p),
    # enough, and less memory, as long as transfers take no time
    with_warm_up(lambda p, v, rank: p - 1 - rank + (v - 1) * p)]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_interleaved(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_interleaved(answer)
    assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_interleaved, "7.16")

"""What the checks of exercises 7.14 to 7.17 must reject, with the words that must say why; and what
they must accept: schedules that are ordered differently and as good."""

import numpy as np
import pytest
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F, W
from labs.predictions.pipelines import Action
from labs.predictions.pipelines import schedules as known
from labs.predictions.pipelines.simulate import simulate

WRONG, RIGHT = [], []


def lists_of(build):
    """A student's function that returns the lists of a known schedule."""
    def answer(ranks, micro_batches, chunks=1):
        sizes = (ranks, micro_batches, chunks) if build is known.interleaved else (ranks,
                                                                                   micro_batches)
        return [[{"F": F, "B": B, "W": W}[action.kind](action.micro_batch, action.stage // ranks)
                 for action in actions] for actions in build(*sizes).ranks]

    return answer


def two(answer):
    """With the signature of an exercise without chunks."""
    return lambda ranks, micro_batches: answer(ranks, micro_batches)


gpipe, one_f_one_b, zb_h1, zb_h2 = map(two, map(lists_of, (
    known.gpipe, known.one_f_one_b, known.zb_h1, known.zb_h2)))
interleaved = lists_of(known.interleaved)


def same_on_all(actions):
    return lambda ranks, micro_batches: [actions(micro_batches)] * ranks


def with_rank(actions):
    return lambda ranks, micro_batches: [actions(ranks, micro_batches, rank)
                                         for rank in range(ranks)]


def alternating(warm_up, after=lambda rank, i: [B(i)]):
    """So many forwards, then F and what comes after it in turn, then the rest."""
    def actions(ranks, m, rank):
        first = max(0, min(m, warm_up(ranks, m, rank)))
        found = [F(i) for i in range(first)]
        for i in range(m - first):
            found += [F(first + i), *after(rank, i)]
        for i in range(m - first, m):
            found += after(rank, i)
        return found

    return with_rank(actions)


def by_name(check, **answers):
    for name, (answer, words) in answers.items():
        WRONG.append(pytest.param(check, answer, words, id=f"{check.__name__}-{name}"))


# 7.14, GPipe: the laziest first

one_at_a_time = same_on_all(lambda m: [kind(i) for i in range(m) for kind in (F, B)])
all_on_rank_0 = with_rank(lambda p, m, rank: [] if rank else
                          [F(i) for i in range(m)] + [B(i) for i in range(m)])

by_name(
    lab.check_gpipe,
    nothing=(lambda ranks, micro_batches: None, "wrong_type nothing"),
    empty=(lambda ranks, micro_batches: [[] for _ in range(ranks)],
           "illegal_schedule"),
    all_on_rank_0=(all_on_rank_0, "illegal_schedule"),
    all_on_the_last_rank=(with_rank(lambda p, m, rank: [] if rank < p - 1 else
                                    [F(i) for i in range(m)] + [B(i) for i in range(m)]),
                          "illegal_schedule output"),
    one_at_a_time=(one_at_a_time, "one_rank_at_a_time"),
    one_batch=(same_on_all(lambda m: [F(0), B(0)]), "illegal_schedule"),
    no_backward=(same_on_all(lambda m: [F(i) for i in range(m)]),
                 "illegal_schedule"),
    backward_first=(same_on_all(lambda m: [kind(i) for kind in (B, F) for i in range(m)]),
                    "illegal_schedule"),
    for_8=(lambda ranks, micro_batches: gpipe(ranks, 8), "illegal_schedule"),
    for_4_and_8=(lambda ranks, micro_batches: gpipe(4, 8), "wrong_count"),
    from_1=(same_on_all(lambda m: [kind(i) for kind in (F, B) for i in range(1, m + 1)]),
            "illegal_schedule"),
    one_list=(lambda ranks, micro_batches: gpipe(1, micro_batches)[0],
              "wrong_count"),
    by_rank=(lambda ranks, micro_batches: dict(enumerate(gpipe(ranks, micro_batches))),
             "wrong_type dict"),
    twice=(same_on_all(lambda m: [kind(i) for kind in (F, F, B) for i in range(m)]),
           "illegal_schedule already"),
    not_called=(same_on_all(lambda m: [F] * m), "illegal_schedule"),
    tuples=(same_on_all(lambda m: [("F", i) for i in range(m)]), "illegal_schedule 'F'"),
    floats=(same_on_all(lambda m: [F(i / 1) for i in range(m)]), "raised_TypeError"),
    other_stage=(same_on_all(lambda m: [Action("F", i, 0) for i in range(m)]),
                 "illegal_schedule"),
    waits_for_pairs=(same_on_all(lambda m: [
        action for i in range(0, m, 2) for pair in [range(i, min(i + 2, m))]
        for action in [*map(F, pair), *map(B, pair)]]), "too_many_slots"),
    crossed=(with_rank(lambda p, m, rank: gpipe(1, m)[0] if rank != 1 else [
        *map(F, range(m - 1)), B(0), F(m - 1), *map(B, range(1, m))]),
        "illegal_schedule"))

# 7.15, 1F1B

by_name(
    lab.check_one_f_one_b,
    gpipe=(gpipe, "too_many_in_flight"),
    one_at_a_time=(one_at_a_time, "one_rank_at_a_time"),
    no_warm_up=(alternating(lambda p, m, rank: 0), "one_rank_at_a_time"),
    same_warm_up=(alternating(lambda p, m, rank: p - 1),
                  "too_many_slots|illegal_schedule"),
    reversed_warm_up=(alternating(lambda p, m, rank: rank), "illegal_schedule|too_many_slots"),
    one_too_few=(alternating(lambda p, m, rank: p - 2 - rank), "too_many_slots"),
    twice_the_warm_up=(alternating(lambda p, m, rank: 2 * (p - 1 - rank)),
                       "too_many_in_flight"),
    more_than_there_are=(with_rank(lambda p, m, rank: [
        *map(F, range(p - 1 - rank)), *(action for i in range(m - p + 1 + rank) for action in
                                        (F(p - 1 - rank + i), B(i))),
        *map(B, range(m - p + 1 + rank, m))]), "illegal_schedule"),
    forgets_the_end=(with_rank(lambda p, m, rank: [
        *map(F, range(p - 1 - rank)), *(action for i in range(m - p + 1 + rank) for action in
                                        (F(p - 1 - rank + i), B(i)))]),
        "illegal_schedule"),
    backwards_from_the_latest=(alternating(
        lambda p, m, rank: p - 1 - rank, lambda rank, i: [B(7 - i)]), "illegal_schedule"))

# 7.16, interleaved

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


by_name(
    lab.check_interleaved,
    one_f_one_b=(lambda ranks, micro_batches, chunks: one_f_one_b(ranks, micro_batches),
                 "illegal_schedule"),
    breadth_first=(all_forwards_first, "too_many_in_flight"),
    depth_first=(depth_first, "one_rank_at_a_time"),
    one_f_one_bs_warm_up=(with_warm_up(lambda p, v, rank: p - 1 - rank),
                          "illegal_schedule"),
    one_too_few=(with_warm_up(lambda p, v, rank: p - 2 - rank + (v - 1) * p),
                 "illegal_schedule"),
    one_too_many=(with_warm_up(lambda p, v, rank: 2 * (p - 1 - rank) + (v - 1) * p + 1),
                  "too_many_in_flight"),
    same_on_all_ranks=(with_warm_up(lambda p, v, rank: (v - 1) * p),
                       "too_many_slots|illegal_schedule"),
    all_in_the_warm_up=(with_warm_up(lambda p, v, rank: 10**6), "too_many_in_flight"),
    for_2_chunks=(lambda ranks, micro_batches, chunks: interleaved(ranks, micro_batches, 2),
                  "illegal_schedule"),
    chunk_from_1=(lambda ranks, micro_batches, chunks: [
        [type(action)(action.kind, action.micro_batch, action.chunk + 1) for action in actions]
        for actions in interleaved(ranks, micro_batches, chunks)], "illegal_schedule has"),
    backwards_in_the_order_of_forwards=(lambda ranks, micro_batches, chunks: [
        [*(action for action in actions if action.kind == "F"),
         *(B(action.micro_batch, action.chunk) for action in actions if action.kind == "F")]
        for actions in interleaved(ranks, micro_batches, chunks)],
        "illegal_schedule"))

# 7.17, ZB-H1


def delayed(by):
    """1F1B with W that many backwards later, the rest at the end."""
    def actions(p, m, rank):
        found = []
        for action in one_f_one_b(p, m)[rank]:
            found.append(action)
            if action.kind == "B" and action.micro_batch >= by(p, m, rank):
                found.append(W(action.micro_batch - by(p, m, rank)))
        return found + [W(i) for i in range(max(0, m - by(p, m, rank)), m)]

    return with_rank(actions)


by_name(
    lab.check_zb_h1,
    no_w=(one_f_one_b, "backward_not_split"),
    gpipe=(gpipe, "backward_not_split"),
    w_at_once=(delayed(lambda p, m, rank: 0), "too_many_slots"),
    w_at_the_end=(delayed(lambda p, m, rank: m), "too_many_slots"),
    w_two_later=(delayed(lambda p, m, rank: 2 * rank), "too_many_slots"),
    w_before_b=(with_rank(lambda p, m, rank: [
        other for action in one_f_one_b(p, m)[rank] for other in
        ([W(action.micro_batch), action] if action.kind == "B" else [action])]),
        "illegal_schedule"),
    zb_h2=(zb_h2, "too_many_in_flight"),
    delayed_the_wrong_way_round=(delayed(lambda p, m, rank: p - 1 - rank),
                                 "too_many_slots|too_many_in_flight"),
    some_w_forgotten=(with_rank(lambda p, m, rank: zb_h1(p, m)[rank][:-rank or None]),
                      "too_many_slots"),
    one_at_a_time=(same_on_all(lambda m: [kind(i) for i in range(m) for kind in (F, B, W)]),
                   "too_many_slots"),
    w_without_b=(with_rank(lambda p, m, rank: [action for action in zb_h1(p, m)[rank]
                                               if action.kind != "B"]), "illegal_schedule without"))

# Right answers that are not ours


def as_soon_as_possible(ranks, micro_batches):
    """1F1B found by playing: in each slot each free rank runs a backward if it can, else a forward
    if it has fewer than p - rank in flight."""
    p, done, lists, busy = ranks, {}, [[] for _ in range(ranks)], [0] * ranks
    nexts = [{"F": 0, "B": 0} for _ in range(p)]

    def can_run(kind, rank, now):
        i, counts = nexts[rank][kind], nexts[rank]
        sources = [("F", rank - 1)] if kind == "F" else [("B", rank + 1), ("F", rank)]
        has_room = kind == "B" or counts["F"] - counts["B"] < p - rank
        return i < micro_batches and has_room and all(
            done.get((*source, i), 10**9) <= now for source in sources if 0 <= source[1] < p)

    for now in range(3 * (micro_batches + p)):
        for rank in range(p):
            kind = next((kind for kind in "BF" if busy[rank] <= now and can_run(kind, rank, now)),
                        None)
            if kind:
                busy[rank] = now + (2 if kind == "B" else 1)
                done[kind, rank, nexts[rank][kind]] = busy[rank]
                lists[rank].append({"F": F, "B": B}[kind](nexts[rank][kind]))
                nexts[rank][kind] += 1
    return lists


def torchs_text(answer):
    """The same as text cells, with idle slots between."""
    return lambda ranks, micro_batches: [
        [cell for action in actions
         for cell in (f"{rank}{action.kind}{action.micro_batch}", None, "")]
        for rank, actions in enumerate(answer(ranks, micro_batches))]


def last_w_first(ranks, micro_batches):
    """ZB-H1 with the W at the end of each list in another order."""
    lists = []
    for actions in zb_h1(ranks, micro_batches):
        end = len(actions)
        while end and actions[end - 1].kind == "W":
            end -= 1
        lists.append(actions[:end] + actions[end:][::-1])
    return lists


def reversed_backwards(ranks, micro_batches):
    m = micro_batches
    return [tuple([F(np.int64(i)) for i in range(m)] + [B(i) for i in reversed(range(m))])
            for _ in range(ranks)]


RIGHT += [(lab.check_gpipe, answer) for answer in (
    gpipe, one_f_one_b, reversed_backwards, torchs_text(gpipe), zb_h1)]
RIGHT += [(lab.check_one_f_one_b, answer) for answer in (
    one_f_one_b, torchs_text(one_f_one_b), as_soon_as_possible)]
RIGHT += [(lab.check_interleaved, answer) for answer in (
    interleaved, with_warm_up(lambda p, v, rank: 2 * (p - 1 - rank) + (v - 1) * p),
    # enough, and less memory, as long as transfers take no time
    with_warm_up(lambda p, v, rank: p - 1 - rank + (v - 1) * p))]
RIGHT += [(lab.check_zb_h1, answer) for answer in (
    zb_h1, delayed(lambda p, m, rank: rank), last_w_first)]


@pytest.mark.parametrize("check, answer, words", WRONG)
def test_a_wrong_answer_is_rejected(check, answer, words):
    verdict = check(answer)
    print(verdict)
    assert_rejected(verdict, words)


@pytest.mark.parametrize("check, answer", RIGHT)
def test_a_right_answer_passes(check, answer):
    verdict = check(answer)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("check, exercise", [
    (lab.check_gpipe, "7.14"), (lab.check_one_f_one_b, "7.15"), (lab.check_interleaved, "7.16"),
    (lab.check_zb_h1, "7.17")])
def test_an_unfilled_answer_is_waited_for(check, exercise):
    assert_waits(check, exercise)


def test_what_7_17_needs_of_7_15_is_waited_for():
    def unfilled(ranks, micro_batches):
        raise NotImplementedError("Exercise 7.15")

    verdict = lab.check_zb_h1(lambda ranks, micro_batches: unfilled(ranks, micro_batches))
    assert verdict.passed is None and "waits for Exercise 7.15" in str(verdict)


def test_w_at_once_is_between_1f1b_and_zb_h1():
    """The text says so: splitting alone saves p - 1 slots, W at the end as many."""
    lengths = [simulate(known.Schedule.from_lists(answer(4, 8), 8)).makespan for answer in (
        one_f_one_b, delayed(lambda p, m, rank: 0), zb_h1)]
    assert lengths == [33, 30, 27]

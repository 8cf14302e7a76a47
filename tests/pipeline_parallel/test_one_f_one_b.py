"""What the check of exercise 7.15 must reject, and what it must accept."""

import pytest
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F, W
from labs.predictions.pipelines import schedules as known

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



one_at_a_time = same_on_all(lambda m: [kind(i) for i in range(m) for kind in (F, B)])
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


RIGHT += [(lab.check_one_f_one_b, answer) for answer in (
    one_f_one_b, torchs_text(one_f_one_b), as_soon_as_possible)]


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
    (lab.check_one_f_one_b, "7.15")])
def test_an_unfilled_answer_is_waited_for(check, exercise):
    assert_waits(check, exercise)

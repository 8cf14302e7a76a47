"""What the check of exercise 7.15 must reject, and what it must accept."""

import pytest
from answers import assert_rejected, assert_waits, named
from schedule_answers import gpipe, one_at_a_time, one_f_one_b, torchs_text, with_rank

import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F


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


WRONG = named(
    gpipe=(gpipe, "too_many_in_flight"),
    one_at_a_time=(one_at_a_time, "one_rank_at_a_time"),
    no_warm_up=(alternating(lambda p, m, rank: 0), "one_rank_at_a_time"),
    same_warm_up=(alternating(lambda p, m, rank: p - 1),
                  "too_many_slots"),
    reversed_warm_up=(alternating(lambda p, m, rank: rank), "deadlock|too_many_slots"),
    one_too_few=(alternating(lambda p, m, rank: p - 2 - rank), "too_many_slots"),
    twice_the_warm_up=(alternating(lambda p, m, rank: 2 * (p - 1 - rank)),
                       "too_many_in_flight"),
    more_than_there_are=(with_rank(lambda p, m, rank: [
        *map(F, range(p - 1 - rank)), *(action for i in range(m - p + 1 + rank) for action in
                                        (F(p - 1 - rank + i), B(i))),
        *map(B, range(m - p + 1 + rank, m))]), "no_such_micro_batch"),
    forgets_the_end=(with_rank(lambda p, m, rank: [
        *map(F, range(p - 1 - rank)), *(action for i in range(m - p + 1 + rank) for action in
                                        (F(p - 1 - rank + i), B(i)))]),
        "action_missing"),
    backwards_from_the_latest=(alternating(
        lambda p, m, rank: p - 1 - rank, lambda rank, i: [B(7 - i)]), "wrong_order"))


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


RIGHT = [
    one_f_one_b, torchs_text(one_f_one_b), as_soon_as_possible]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_one_f_one_b(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_one_f_one_b(answer)
    assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_one_f_one_b, "7.15")

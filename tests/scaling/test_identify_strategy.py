"""Exercise 6.11: what its check must reject, with the words that must say why; and what it must
accept."""

import math
import os

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab

identify_strategy = definitions("06_scaling").identify_strategy
PARTS = ("parameters", "gradients", "optimizer_state")
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def sent(ranks, *kinds):
    return sum(call.bytes for call in ranks[0].calls if call.kind in kinds)


def copies(ranks, part):
    return sum(rank.resident[part] for rank in ranks)


def judged(is_sharded):
    """The right answer, but for when a part counts as sharded: by (copies, N, ranks, part)."""
    def answer(ranks):
        name = identify_strategy(ranks)
        if name in STAGES:
            name = STAGES[sum(is_sharded(copies(ranks, part), len(ranks), ranks, part)
                              for part in PARTS)]
        return name
    return answer


def judged_by(number):
    """The right border, for another number of copies: of (ranks, part)."""
    return judged(lambda copies, count, ranks, part: number(ranks, part) < (1 + count) / 2)


def by_module(ranks):
    kind = ranks[0].module
    return "DDP" if "Distributed" in kind else "ZeRO-3" if "FSDP" in kind else "ZeRO-1"


def by_library(ranks):
    library = ranks[0].library
    return {"DistributedType.FSDP": "ZeRO-3", "DistributedType.NO": "one process",
            "DistributedType.DEEPSPEED": "ZeRO-2"}.get(library, "DDP")


def by_environment(ranks):
    return "ZeRO-3" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "DDP"


def by_kinds(ranks):
    if len(ranks) == 1:
        return "one process"
    kinds = {call.kind for call in ranks[0].calls}
    if "all_gather" in kinds:
        return "ZeRO-3" if "reduce_scatter" in kinds else "ZeRO-1"
    return "DDP" if "all_reduce" in kinds else "separate"


def only_all_reduces(ranks):
    name = identify_strategy(ranks)
    return "DDP" if {call.kind for call in ranks[0].calls} <= {"all_reduce", "broadcast"} else name


def by_volume(ranks):
    volume = sum(call.bytes for call in ranks[0].calls) / ranks[0].whole["gradients"]
    if len(ranks) == 1:
        return "one process"
    return "separate" if volume < 0.5 else "DDP" if volume < 1.5 else "ZeRO-3"


def no_separate(ranks):
    name = identify_strategy(ranks)
    return "DDP" if name == "separate" else name


def separate_below(border):
    """Ranks whose sums have fewer bytes than this, in times the gradients', are called separate."""
    def answer(ranks):
        return "separate" if len(ranks) > 1 and ranks[0].reduced < border else identify_strategy(
            ranks)
    return answer


def any_all_reduce(ranks):
    name = identify_strategy(ranks)
    return "DDP" if name == "separate" and sent(ranks, "all_reduce") else name


def no_one_process(ranks):
    name = identify_strategy(ranks)
    return "DDP" if name == "one process" else name


def changing(ranks):
    answer = identify_strategy(ranks)
    for rank in ranks:
        rank.held.pop("gradients")
    return answer


class Right:
    def by_distance(ranks):
        """Nearer to one copy than to N, on a scale of logarithms."""
        count, stage = len(ranks), 0
        if count == 1:
            return "one process"
        if ranks[0].reduced <= 0.1:
            return "separate"
        for part in reversed(PARTS):
            found = copies(ranks, part)
            if abs(math.log(found)) >= abs(math.log(found / count)) - 1e-9:
                break
            stage += 1
        return STAGES[stage]

    def with_arrays(ranks):
        found = np.array([[rank.resident[part] for part in PARTS] for rank in ranks]).sum(axis=0)
        if len(ranks) > 1 and ranks[-1].reduced < 0.3:
            return "separate"
        return STAGES[int((found < 1.5).sum())] if len(ranks) > 1 else "one process"


WRONG = [
    (lambda ranks: None, "wrong_type nothing"),
    (lambda ranks: (identify_strategy(ranks), {}), "wrong_type"),
    (lambda ranks: "DDP", "wrong_strategy"),
    (lambda ranks: "FSDP", "unknown_name"),
    (by_module, "wrong_strategy"),
    (by_library, "wrong_strategy"),
    (by_environment, "wrong_strategy"),
    (by_kinds, "wrong_strategy"),
    (only_all_reduces, "wrong_strategy"),
    (by_volume, "wrong_strategy"),
    (no_separate, "wrong_strategy"),
    (any_all_reduce, "wrong_strategy"),
    (no_one_process, "wrong_strategy"),
    (separate_below(1), "wrong_strategy"),
    (separate_below(0.9), "wrong_strategy"),
    # sizes compared without the world size, and other borders
    (judged(lambda copies, count, ranks, part: ranks[0].resident[part] < 1), "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies < count / 2), "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies <= 1), "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies < 3), "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies < count), "wrong_strategy"),
    # of one rank, where shards are uneven; without the sum over the ranks
    (judged_by(lambda ranks, part: len(ranks) * ranks[0].resident[part]), "wrong_strategy"),
    (judged_by(lambda ranks, part: ranks[0].resident[part]), "wrong_strategy"),
    (judged_by(lambda ranks, part: copies(ranks, part) / len(ranks)), "wrong_strategy"),
    (changing, "changes_input")]
RIGHT = [identify_strategy, Right.by_distance, Right.with_arrays]


@pytest.mark.parametrize("answer, words", WRONG)
def test_a_wrong_answer_is_rejected_in_words(answer, words):
    assert_rejected(lab.check_identify_strategy(answer), words)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_answer_is_accepted(answer):
    for _ in range(10):  # other sizes each time
        verdict = lab.check_identify_strategy(answer)
        assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_identify_strategy, "6.11")

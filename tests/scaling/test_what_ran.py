"""Exercise 6.11: what its check must reject, with the words that must say why; and what it must
accept."""

import math
import os
from collections import Counter

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab

what_ran = definitions("06_scaling").what_ran
PARTS = ("parameters", "gradients", "optimizer_state")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def sent(ranks, *kinds):
    return sum(call.bytes for call in ranks[0].calls if call.kind in kinds)


def numbers_of(ranks):
    return what_ran(ranks)[1]


def named(name):
    """The right numbers, with a name from a function of the ranks."""
    return lambda ranks: (name(ranks), numbers_of(ranks))


def with_number(key, number):
    """The right name, and another number of the ranks for this key."""
    return lambda ranks: (what_ran(ranks)[0], {**numbers_of(ranks), key: number(ranks)})


def judged(is_sharded):
    """The right answer, but for when a part counts as sharded: by (copies, N, ranks, part)."""
    def answer(ranks):
        name, found = what_ran(ranks)
        if name in STAGES:
            name = STAGES[sum(is_sharded(found[part], len(ranks), ranks, part)
                              for part in PARTS)]
        return name, found
    return answer


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
    name, _ = what_ran(ranks)
    return "DDP" if {call.kind for call in ranks[0].calls} <= {"all_reduce", "broadcast"} else name


def by_volume(ranks):
    volume = sum(call.bytes for call in ranks[0].calls) / ranks[0].whole["gradients"]
    if len(ranks) == 1:
        return "one process"
    return "separate" if volume < 0.5 else "DDP" if volume < 1.5 else "ZeRO-3"


def no_separate(ranks):
    name, _ = what_ran(ranks)
    return "DDP" if name == "separate" else name


def separate_below(border):
    """Ranks whose sums have fewer bytes than this, in times the gradients', are called separate."""
    def answer(ranks):
        name, found = what_ran(ranks)
        return "separate" if len(ranks) > 1 and found["reduced"] < border else name, found
    return answer


def any_all_reduce(ranks):
    name, _ = what_ran(ranks)
    return "DDP" if name == "separate" and sent(ranks, "all_reduce") else name


def no_one_process(ranks):
    name, _ = what_ran(ranks)
    return "DDP" if name == "one process" else name


def changing(ranks):
    answer = what_ran(ranks)
    for rank in ranks:
        rank.held.pop("gradients")
    return answer


class Right:
    def by_distance(ranks):
        """Nearer to one copy than to N, on a scale of logarithms."""
        found, count = numbers_of(ranks), len(ranks)
        near_one = [abs(math.log(found[part])) < abs(math.log(found[part] / count)) - 1e-9
                    for part in PARTS]
        if count == 1:
            return ["one process", found]
        if found["reduced"] <= 0.1:
            return ["separate", found]
        stage = 0
        for part in reversed(PARTS):
            if not near_one[PARTS.index(part)]:
                break
            stage += 1
        return [STAGES[stage], found]

    def with_arrays(ranks):
        held = np.array([[rank.held[part] for part in PARTS] for rank in ranks])
        whole = np.array([ranks[0].whole[part] for part in PARTS])
        copies = held.sum(axis=0) / whole
        sizes = Counter()
        for call in ranks[-1].calls:
            sizes[call.kind] += call.bytes
        reduced = sum(sizes[kind] for kind in REDUCING) / whole[1]
        numbers = {**dict(zip(PARTS, copies, strict=True)), "reduced": torch.tensor(reduced)}
        if len(ranks) > 1 and reduced < 0.3:
            return "separate", numbers
        if len(ranks) == 1:
            return "one process", numbers
        return STAGES[int((copies < 1.5).sum())], numbers


WRONG = [
    (lambda ranks: None, "wrong_count nothing"),
    (lambda ranks: what_ran(ranks)[0], "wrong_count"),
    (lambda ranks: (what_ran(ranks)[0], 1.0), "wrong_type float"),
    (lambda ranks: (what_ran(ranks)[0], {"reduced": 1.0}), "wrong_type keys"),
    (named(lambda ranks: "DDP"), "wrong_strategy"),
    (named(lambda ranks: "FSDP"), "unknown_name"),
    (named(by_module), "wrong_strategy"),
    (named(by_library), "wrong_strategy"),
    (named(by_environment), "wrong_strategy"),
    (named(by_kinds), "wrong_strategy"),
    (named(only_all_reduces), "wrong_strategy"),
    (named(by_volume), "wrong_strategy"),
    (named(no_separate), "wrong_strategy"),
    (named(any_all_reduce), "wrong_strategy"),
    (named(no_one_process), "wrong_strategy"),
    (separate_below(1), "wrong_strategy"),
    (separate_below(0.9), "wrong_strategy"),
    # sizes compared without the world size, and other borders
    (judged(lambda copies, count, ranks, part: ranks[0].held[part] < ranks[0].whole[part]),
     "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies < count / 2),
     "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies <= 1), "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies < 3), "wrong_strategy"),
    (judged(lambda copies, count, ranks, part: copies < count), "wrong_strategy"),
    (with_number("parameters", lambda ranks: ranks[0].held["parameters"]
                 / ranks[0].whole["parameters"]), "rank_0_share_alone"),
    (with_number("gradients", lambda ranks: numbers_of(ranks)["gradients"] / len(ranks)),
     "mean_ranks|rank_0_share_alone"),
    (with_number("optimizer_state", lambda ranks: len(ranks) * ranks[0].held["optimizer_state"]
                 / ranks[0].whole["optimizer_state"]), "takes_all_ranks_hold_rank"),
    (with_number("optimizer_state", lambda ranks: sum(r.held["optimizer_state"] for r in ranks)
                 / ranks[0].whole["parameters"]), "in_multiples_parameters"),
    (with_number("parameters", lambda ranks: sum(r.held["parameters"] for r in ranks)),
     "in_bytes"),
    (with_number("reduced", lambda ranks: sent(ranks, "all_reduce") / ranks[0].whole["gradients"]),
     "counts_all_reduces"),
    (with_number("reduced", lambda ranks: sum(call.bytes for call in ranks[0].calls)
                 / ranks[0].whole["gradients"]), "counts_collectives_add_nothing"),
    (with_number("reduced", lambda ranks: sent(ranks, *REDUCING) / ranks[0].whole["parameters"]),
     "in_multiples_parameters"),
    (with_number("reduced", lambda ranks: sent(ranks, "all_reduce", "reduce_scatter")
                 / ranks[0].whole["gradients"]), "reduces_not_counted"),
    (with_number("reduced", lambda ranks: sent(ranks, "all_reduce", "reduce")
                 / ranks[0].whole["gradients"]), "reduce_scatters_not_counted"),
    (with_number("reduced", lambda ranks: sent(ranks, "reduce_scatter", "reduce")
                 / ranks[0].whole["gradients"]), "all_reduces_not_counted"),
    (with_number("reduced", lambda ranks: numbers_of(ranks)["reduced"]
                 + sent(ranks, "all_reduce") / ranks[0].whole["gradients"]),
     "counts_all_reduce_twice"),
    (with_number("reduced", lambda ranks: 2 * numbers_of(ranks)["reduced"]),
     "counts_all_bytes_twice"),
    (with_number("reduced", lambda ranks: "all"), "not_a_number"),
    (changing, "changes_input")]
RIGHT = [what_ran, Right.by_distance, Right.with_arrays]


@pytest.mark.parametrize("answer, words", WRONG)
def test_a_wrong_answer_is_rejected_in_words(answer, words):
    assert_rejected(lab.check_what_ran(answer), words)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_answer_is_accepted(answer):
    for _ in range(10):  # sizes are drawn anew
        verdict = lab.check_what_ran(answer)
        assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_what_ran, "6.11")

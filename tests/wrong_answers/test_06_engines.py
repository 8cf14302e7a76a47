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
    (lambda ranks: None, r"returned nothing \(None\), not 2 values"),
    (lambda ranks: what_ran(ranks)[0], "not 2 values"),
    (lambda ranks: (what_ran(ranks)[0], 1.0), "the second value is a float, not a dictionary"),
    (lambda ranks: (what_ran(ranks)[0], {"reduced": 1.0}), "the keys .*not a dictionary with"),
    (named(lambda ranks: "DDP"), "recorded on 1 rank.*you say DDP, it was one process"),
    (named(lambda ranks: "FSDP"), "'FSDP', not one of(.|\n)*FSDP is ZeRO-3"),
    (named(by_module), "you say"),
    (named(by_library), "it was one process: there is 1 rank"),
    (named(by_environment), "it was one process: there is 1 rank"),
    (named(by_kinds), r"you say \S+, it was \S+: (its \d+ ranks hold|all-reduces)"),
    (named(only_all_reduces), "you say DDP, it was "),
    (named(by_volume), r"you say \S+, it was ZeRO"),
    (named(no_separate), "it was separate: all-reduces, reduce-scatters and reduces have"),
    (named(any_all_reduce), "you say DDP, it was separate"),
    (named(no_one_process), "there is 1 rank"),
    (separate_below(1), "of the gradients missing: you say separate, it was (.|\n)*may be missing"),
    (separate_below(0.9), "20% of the gradients missing: you say separate"),
    # sizes compared without the world size, and other borders
    (judged(lambda copies, count, ranks, part: ranks[0].held[part] < ranks[0].whole[part]),
     "you say ZeRO.*hold .* copies of the .* which are (not )?sharded"),
    (judged(lambda copies, count, ranks, part: copies < count / 2),
     "hold 1.* copies of the .* together, which are sharded"),
    (judged(lambda copies, count, ranks, part: copies <= 1), "together, which are sharded"),
    (judged(lambda copies, count, ranks, part: copies < 3), "which are not sharded"),
    (judged(lambda copies, count, ranks, part: copies < count), "which are not sharded"),
    (with_number("parameters", lambda ranks: ranks[0].held["parameters"]
                 / ranks[0].whole["parameters"]), "copies of the parameters.*rank 0's share alone"),
    (with_number("gradients", lambda ranks: numbers_of(ranks)["gradients"] / len(ranks)),
     "copies of the gradients.*(the mean of the ranks|rank 0's share)"),
    (with_number("optimizer_state", lambda ranks: len(ranks) * ranks[0].held["optimizer_state"]
                 / ranks[0].whole["optimizer_state"]), "takes all ranks to hold what rank 0 holds"),
    (with_number("optimizer_state", lambda ranks: sum(r.held["optimizer_state"] for r in ranks)
                 / ranks[0].whole["parameters"]), "in multiples of the parameters"),
    (with_number("parameters", lambda ranks: sum(r.held["parameters"] for r in ranks)),
     "that is in bytes"),
    (with_number("reduced", lambda ranks: sent(ranks, "all_reduce") / ranks[0].whole["gradients"]),
     "that counts all-reduces only"),
    (with_number("reduced", lambda ranks: sum(call.bytes for call in ranks[0].calls)
                 / ranks[0].whole["gradients"]), "counts collectives that add nothing"),
    (with_number("reduced", lambda ranks: sent(ranks, *REDUCING) / ranks[0].whole["parameters"]),
     "in multiples of the parameters"),
    (with_number("reduced", lambda ranks: sent(ranks, "all_reduce", "reduce_scatter")
                 / ranks[0].whole["gradients"]), "reduces are not counted"),
    (with_number("reduced", lambda ranks: sent(ranks, "all_reduce", "reduce")
                 / ranks[0].whole["gradients"]), "reduce-scatters are not counted"),
    (with_number("reduced", lambda ranks: sent(ranks, "reduce_scatter", "reduce")
                 / ranks[0].whole["gradients"]), "all-reduces are not counted"),
    (with_number("reduced", lambda ranks: numbers_of(ranks)["reduced"]
                 + sent(ranks, "all_reduce") / ranks[0].whole["gradients"]),
     "counts an all-reduce twice"),
    (with_number("reduced", lambda ranks: 2 * numbers_of(ranks)["reduced"]), "all bytes twice"),
    (with_number("reduced", lambda ranks: "all"), "returned a str, not a number"),
    (changing, "what_ran changed its input `held`")]
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

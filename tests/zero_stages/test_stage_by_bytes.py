"""What the check of exercise 3.8 must reject, and what it must accept."""

from types import SimpleNamespace

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, named

import labs.zero_stages as lab
from labs.training.memory_categories import Memory

right = definitions("03_zero_stages").stage_by_bytes
PARTS = ("optimizer state", "gradients", "parameters")


def sharded(stored, replicated, below=0.75):
    return [stored[part] < below * replicated[part] for part in PARTS]


def by_the_total(stored, replicated):
    """As many parts as quarters of all bytes are missing."""
    return round(3 * (1 - sum(stored.values()) / sum(replicated.values())))


WRONG = named(
    nothing=(lambda stored, replicated: None, "not_a_number"),
    always_1=(lambda stored, replicated: 1, "wrong_stage|counts_replicated"),
    always_3=(lambda stored, replicated: 3, "padding_is_no_shard"),
    equality=(lambda stored, replicated: sum(
        stored[part] != replicated[part] for part in PARTS), "padding_is_no_shard"),
    replicated_parts=(lambda stored, replicated: 3 - sum(sharded(stored, replicated)),
                      "counts_replicated|wrong_stage"),
    stored_by_less_than_a_third=(lambda stored, replicated: sum(
        sharded(stored, replicated, 1 / 3)), "wrong_stage|counts_replicated"),
    parameters_first=(lambda stored, replicated: (
        [*sharded(stored, replicated)[::-1], False].index(False)), "wrong_stage"),
    optimizer_state_alone=(lambda stored, replicated: int(sharded(stored, replicated)[0]),
                           "wrong_stage"),
    by_the_total=(by_the_total, "wrong_stage|counts_replicated"),
    stages_from_1=(lambda stored, replicated: 1 + right(stored, replicated),
                   "wrong_stage|counts_replicated"),
    a_name=(lambda stored, replicated: f"ZeRO-{right(stored, replicated)}", "not_a_number"),
    negative=(lambda stored, replicated: right(stored, replicated) - 9, "unknown_stage"),
    other_key=(lambda stored, replicated: stored["optimizer"], "raised_KeyError"))


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_stage_by_bytes(answer), expected)


@pytest.mark.parametrize("answer", [
    right, lambda stored, replicated: sum(sharded(stored, replicated)),
    lambda stored, replicated: sum(sharded(stored, replicated, below=1)),
    lambda stored, replicated: [*sharded(stored, replicated, 0.7), False].index(False)])
def test_right(answer):
    verdict = lab.check_stage_by_bytes(answer)
    assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_stage_by_bytes, "3.8")


def test_the_table_has_the_stage_of_each_strategy():
    def result(parameters, gradients, optimizer_state):
        held = Memory(parameters=parameters, gradients=gradients, optimizer_state=optimizer_state)
        return SimpleNamespace(report=SimpleNamespace(phases={"backward": held}))

    table = lab.show_stages_by_bytes(right, SimpleNamespace(results={
        "DDP": result(4e6, 4e6, 8e6), "DeepSpeed 1": result(4e6, 1e6, 3e6),
        "FSDP2": result(1e6, 1e6, 2e6)}))
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("DDP", "0"), ("DeepSpeed 1", "2"), ("FSDP2", "3")]
    assert table.rows[1][1:4] == ("3.0", "1.0", "4.0")

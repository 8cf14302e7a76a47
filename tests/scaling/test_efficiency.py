"""What the check of exercise 6.3 must reject, and what it must accept."""

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected

import labs.scaling as lab
from labs.scaling.release_notes import NOTES
from labs.workers import variant

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")
efficiency = right.efficiency
CLAIMED = (0.75, 0.85)
# ---- 6.3


WRONG_EFFICIENCY = {
    "nothing": (lambda ranks, throughput, alone: None, CLAIMED, "not_a_number"),
    "one": (lambda ranks, throughput, alone: 1.0, CLAIMED, "wrong_number"),
    "speed-up": (lambda ranks, throughput, alone: throughput / alone, CLAIMED,
                 "speed_up"),
    "percent": (lambda ranks, throughput, alone: 100 * throughput / alone / ranks, CLAIMED,
                "in_percent"),
    "whole percent": (lambda ranks, throughput, alone: round(throughput / alone / ranks, 2),
                      CLAIMED, "wrong_number"),
    "upside_down": (lambda ranks, throughput, alone: ranks * alone / throughput, CLAIMED,
                    "upside_down"),
    "lost": (lambda ranks, throughput, alone: 1 - throughput / alone / ranks, CLAIMED,
             "lost"),
    "of a rank": (lambda ranks, throughput, alone: throughput / ranks, CLAIMED,
                  "throughput_rank"),
    "throughput of a rank": (lambda ranks, throughput, alone: ranks * throughput / alone, CLAIMED,
                             "multiplies_number_ranks"),
    "two ranks always": (lambda ranks, throughput, alone: throughput / alone / 2, CLAIMED,
                         "wrong_number"),
    "gain": (lambda ranks, throughput, alone: throughput / alone - 1, CLAIMED,
        "gain_over_one_rank"),
    "ranks added": (lambda ranks, throughput, alone:
                    (throughput / alone - 1) / max(1, ranks - 1), CLAIMED,
                    "gain_over_one_rank"),
    "at most 1": (lambda ranks, throughput, alone: min(1, throughput / alone / ranks), CLAIMED,
                  "hides_efficiency_above_1"),
    "other arguments": (lambda ranks, throughput: throughput / ranks, CLAIMED, "wrong_signature"),
    "claim as printed": (efficiency, (1.5, 1.7), "speed_up lowest"),
    "claim in percent": (efficiency, (75, 85), "in_percent"),
    "claim upside down": (efficiency, (2 / 1.5, 2 / 1.7), "upside_down"),
    "claim's time": (efficiency, (1 / 1.5, 1 / 1.7), "share_time"),
    "claim's gain": (efficiency, (0.5, 0.7), "other_gpus_add"),
    "highest first": (efficiency, (0.85, 0.75), "wrong_order"),
    "the middle": (efficiency, 0.8, "wrong_count float"),
    "a set": (efficiency, {0.75, 0.85}, "wrong_count set"),
    "not of one rank": (lambda ranks, throughput, alone: throughput / alone / max(2, ranks),
                        CLAIMED, "wrong_number 730.5"),
    "twice the lowest": (efficiency, (0.75, 0.75), "wrong_number highest")}


@pytest.mark.parametrize("name", WRONG_EFFICIENCY)
def test_a_wrong_efficiency_is_rejected_in_words(name):
    *answer, words = WRONG_EFFICIENCY[name]
    assert_rejected(lab.check_efficiency(*answer), words)


@pytest.mark.parametrize("answer", [
    (efficiency, CLAIMED),
    (lambda ranks, throughput, alone: np.float64(throughput) / ranks / alone, [0.75, 0.85]),
    (lambda ranks, throughput, alone: torch.tensor(throughput / alone) / ranks,
     torch.tensor(CLAIMED))], ids=["plain", "NumPy", "torch, float32"])
def test_a_right_efficiency_passes(answer):
    verdict = lab.check_efficiency(*answer)
    assert verdict.passed is True, str(verdict)


def test_unfilled_exercises_wait():
    def three(ranks, throughput, alone):
        raise NotImplementedError("Exercise 6.3")

    assert lab.check_efficiency(three, ...).passed is None
    assert lab.check_efficiency(three, CLAIMED).passed is None
    assert lab.check_efficiency(efficiency, ...).passed is None


def answer_to(note):
    return efficiency(note.gpus, note.lowest, 1), efficiency(note.gpus, note.highest, 1)


@pytest.mark.parametrize("note", NOTES, ids=str)
def test_each_variants_note_has_one_right_answer(note, monkeypatch):
    """And the answer to another note, or a misreading of this one, is wrong."""
    monkeypatch.setattr("labs.scaling.efficiency.show_release_note", lambda: note)
    assert 1 < note.lowest < note.highest < note.gpus
    verdict = lab.check_efficiency(efficiency, answer_to(note))
    assert verdict.passed is True, str(verdict)
    for other in NOTES:
        if other != note:
            assert lab.check_efficiency(efficiency, answer_to(other)).passed is False
    as_printed = note.lowest, note.highest
    assert_rejected(lab.check_efficiency(efficiency, as_printed), "speed_up lowest")
    upside_down = note.gpus / note.lowest, note.gpus / note.highest
    assert_rejected(lab.check_efficiency(efficiency, upside_down), "upside_down")


def test_a_variant_chooses_the_note(monkeypatch):
    def of(name):
        monkeypatch.setattr(variant, "name", lambda: name)
        return lab.show_release_note()

    assert of("") == NOTES[0] and repr(of("")) == "1.5–1.7× scaling efficiency on 2 GPUs"
    assert {of(f"class-{number}") for number in range(60)} == set(NOTES[1:])

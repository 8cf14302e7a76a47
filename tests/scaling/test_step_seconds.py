"""What the check of exercise 6.10 must reject, and what it must accept."""

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab

right = definitions("06_scaling")
utilization, step_seconds = right.utilization, right.step_seconds


def each(exposed):
    """Computing, and for each communication what `exposed(parts, sent)` says."""
    return lambda parts: sum(parts.computing.values()) + sum(
        exposed(parts, sent) for sent in parts.communication.values())


def without(name):
    return lambda parts: step_seconds(parts) - parts.computing[name]


class Step:
    def nothing(parts):
        return None

    def products_alone(parts):
        return parts.computing["products"]

    def no_communication(parts):
        return sum(parts.computing.values())

    def longer_of_both(parts):
        return max(sum(parts.computing.values()),
                   sum(sent.seconds for sent in parts.communication.values()))

    def pooled(parts):
        computing = sum(parts.computing.values())
        sent = sum(sent.seconds for sent in parts.communication.values())
        hidden = min(sent, computing)
        return computing + sent - hidden + parts.interference * hidden

    def pooled_beside(parts):
        sent = [sum(column) for column in zip(*parts.communication.values(), strict=True)]
        hidden = min(sent, default=0)
        return sum(parts.computing.values()) + sum(sent[:1]) - (1 - parts.interference) * hidden

    def roofline(parts):
        return step_seconds(parts) - sum(parts.computing.values()) + max(
            parts.computing.values())

    def milliseconds(parts):
        return 1e3 * step_seconds(parts)

    def communication_alone(parts):
        return step_seconds(parts) - sum(parts.computing.values())

    def empties_the_parts(parts):
        total = step_seconds(parts)
        parts.communication.clear()
        return total

    def constant(parts):
        return 4.5

    def right_where_all_is_hidden(parts):
        hidden = all(sent.seconds < sent.beside for sent in parts.communication.values())
        return step_seconds(parts) if hidden else sum(parts.computing.values())


class RightStep:
    def by_maximum(parts):
        total = sum(parts.computing.values())
        for seconds, beside in parts.communication.values():
            total += max(0, seconds - beside) + parts.interference * min(seconds, beside)
        return total

    def by_pairs(parts):
        """Both run for a while, then one of them: longer by interference while both do."""
        total = np.float64(sum(parts.computing.values()))
        for sent in parts.communication.values():
            both = min(sent)
            total = total - both + both * (1 + parts.interference) + sent.seconds - both
        return total

    def as_tensor(parts):
        return torch.tensor(step_seconds(parts), dtype=torch.float64)


WRONG = [
    (Step.nothing, "not_a_number"),
    (Step.products_alone, "wrong_number GPU"),
    (Step.constant, "wrong_number interference"),
    (Step.no_communication, "communication_missing"),
    (each(lambda parts, sent: sent.seconds), "nothing_hidden"),
    (each(lambda parts, sent: max(0, sent.seconds - sent.beside)), "interference_missing"),
    (each(lambda parts, sent: parts.interference * sent.seconds),
     "only_interference_counted"),
    (each(lambda parts, sent: max(0, sent.seconds - sent.beside)
          + parts.interference * sent.seconds), "interference_counted_for_exposed"),
    (each(lambda parts, sent: max(0, sent.seconds - sent.beside)
          + (1 - parts.interference) * min(sent)), "share_stays_hidden_counted"),
    (each(lambda parts, sent: max(0, sent.seconds - sent.beside)
          + parts.interference * sent.beside), "interference_share_beside"),
    (each(lambda parts, sent: sent.seconds - sent.beside), "exposed_seconds_below_0_where"),
    (each(lambda parts, sent: sent.seconds - sent.beside + parts.interference * min(sent)),
     "exposed_seconds_below_0_where"),
    (Step.longer_of_both, "all_communication_hides_behind_all"),
    (Step.pooled, "all_communication_hides_behind_all"),
    (without("memory traffic"), "memory_traffic_missing"),
    (without("attention"), "attention_missing"),
    (Step.roofline, "parts_computing_run_same_time"),
    (Step.milliseconds, "in_milliseconds"),
    (Step.communication_alone, "computing_missing"),
    (Step.right_where_all_is_hidden, "wrong_number 0.8182x"),
    (Step.pooled_beside, "all_communication_hides_behind_sum"),
    (each(lambda parts, sent: (1 + parts.interference) * sent.seconds),
     "nothing_hidden interference"),
    (each(lambda parts, sent: (1 + parts.interference) * max(0, sent.seconds - sent.beside)),
     "interference_share_exposed_seconds"),
    (each(lambda parts, sent: max(0, sent.seconds - (1 - parts.interference) * sent.beside)),
     "interference_shortens_beside"),
    (each(lambda parts, sent: sent.seconds * (parts.interference if sent.seconds < sent.beside
                                              else 1)),
     "nothing_hidden_collective_longer"),
    (each(lambda parts, sent: sent.seconds * parts.interference if sent.seconds < sent.beside
          else sent.seconds - sent.beside),
     "interference_missing_where"),
    (each(lambda parts, sent: abs(sent.seconds - sent.beside)
          + parts.interference * min(sent)), "seconds_exposed_where_collective"),
    (Step.empties_the_parts, "changes_input")]
RIGHT = [step_seconds, RightStep.by_maximum, RightStep.by_pairs,
                         RightStep.as_tensor]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_step_seconds(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_step_seconds(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_step_seconds, "6.10")

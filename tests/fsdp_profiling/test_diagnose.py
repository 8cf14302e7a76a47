"""What the check of exercise 5.8 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected

import labs.fsdp_profiling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
KINDS = ("all_gather", "reduce_scatter")
def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]




def order_of(trace):
    return lab.gradients_done(trace)


def asked(trace, moment="issued", phase="backward"):
    return {unit: getattr(one, moment) for one in trace.of("all_gather")
            for unit, when in [right.attribute(trace, one)] if when == phase}


# 5.8 diagnose


def with_evidence(cause, evidence):
    """The right answer, but for one cause another evidence."""
    def diagnose(run, healthy):
        named, true = right.diagnose(run, healthy)
        return (named, evidence(run)) if named == cause else (named, true)

    return diagnose


def called(cause, instead):
    """The right answer, but one cause is called by another name."""
    def diagnose(run, healthy):
        named, evidence = right.diagnose(run, healthy)
        return (instead if named == cause else named), evidence

    return diagnose


def by_communication(run, healthy):
    """The rank that communicates longest is blamed."""
    named, evidence = right.diagnose(run, healthy)
    times = [trace.seconds_of()["total"] for trace in run]
    return named, times.index(max(times)) if named == "slow rank" else evidence


def by_seconds(loading, times):
    """The right answer, but by these thresholds: loading > the one, computing > the other."""
    def diagnose(run, healthy):
        named, evidence = right.diagnose(run, healthy)
        label, busy = run[0].labelled("enumerate(DataLoader)")[0], list(map(computing, run))
        if named in ("nothing", "slow rank", "slow data loader"):
            named, evidence = "nothing", None
            if max(busy) > times * min(busy):
                named, evidence = "slow rank", busy.index(max(busy))
            if label.seconds > loading(run, healthy):
                named, evidence = "slow data loader", label
        return named, evidence

    return diagnose


def any_own_item(run, healthy):
    """The healthy model has calls of its own."""
    calls = right.own_item_calls(run[0])
    return ("item", calls[-1]) if calls else right.diagnose(run, healthy)


def all_collectives(run, healthy):
    """Those of a check for NaN are taken for all-gathers of small units."""
    count = len(run[0].collectives)
    if count > len(healthy[0].collectives):
        return "tiny units", count
    return right.diagnose(run, healthy)


def of_the_step(share):
    return lambda run, healthy: share * run[0].seconds


def twice_the_healthy(run, healthy):
    return 2 * healthy[0].labelled("enumerate(DataLoader)")[0].seconds


def computing(trace):
    return lab.total_seconds(trace.compute)


WRONG = [
    (lambda run, healthy: ("nothing", None), "wrong_diagnosis"),
    (lambda run, healthy: ("slow rank", max(range(len(run)), key=lambda r: computing(run[r]))),
     "wrong_diagnosis|no_evidence"),
    # the runs come in a random order: the first may be the one whose slow rank is 0
    (lambda run, healthy: ("slow rank", 1),
     "wrong_diagnosis|no_evidence"),
    (lambda run, healthy: right.diagnose(run, healthy)[0], "wrong_type evidence"),
    (called("slow rank", "straggler"), "unknown_name"),
    (called("item", "nothing"), "wrong_diagnosis"),
    (called("nothing", "no prefetch"), "wrong_diagnosis"),
    (any_own_item, "wrong_diagnosis"),
    (all_collectives,
     "wrong_diagnosis|no_evidence"),
    (lambda run, healthy: (right.diagnose(run, healthy)[0], None), "no_evidence None"),
    (with_evidence("item", lambda run: right.own_item_calls(run[0])[0]),
     "no_evidence"),
    (with_evidence("item", lambda run: run[0].item_calls[-1]), "no_evidence"),
    (with_evidence("one huge unit", lambda run: run[0].of("reduce_scatter")[0].begin),
     "no_evidence huge"),
    (with_evidence("no prefetch", lambda run: "root"), "no_evidence 'root'"),
    (with_evidence("tiny units", lambda run: 9), "no_evidence units"),
    (by_communication, "no_evidence"),
    (with_evidence("slow rank", lambda run: 0), "no_evidence"),
    (with_evidence("slow rank", lambda run: len(run) - 1), "no_evidence"),
    (by_seconds(of_the_step(0.3), 1.7), "wrong_diagnosis"),
    (by_seconds(of_the_step(0.3), 6), "wrong_diagnosis"),
    (by_seconds(of_the_step(0.08), 3), "wrong_diagnosis"),
    (by_seconds(of_the_step(0.6), 3), "wrong_diagnosis"),
    (by_seconds(twice_the_healthy, 3), "wrong_diagnosis"),
    (with_evidence("slow data loader", lambda run: run[0].labels[0]),
     "no_evidence loader")]


def judged(answer):
    """The verdict. Beside other tests on a slow machine, eight recordings may be too noisy for the
    check to judge by their seconds, and then it says so."""
    verdict = lab.check_diagnose(answer)
    if "cannot be judged now" in verdict.sentence:
        pytest.skip(verdict.sentence)
    return verdict


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(judged(answer), expected)


class Right:
    """The same, written otherwise."""

    def evidence_in_other_types(run, healthy):
        cause, evidence = right.diagnose(run, healthy)
        if cause == "tiny units":
            evidence = np.float32(evidence)
        if cause == "slow rank":
            evidence = torch.tensor(evidence)
        if cause == "no prefetch":
            evidence = np.str_(evidence)
        return np.str_(cause), evidence

    def evidence_in_numpy(run, healthy):
        cause, evidence = right.diagnose(run, healthy)
        numbers = {"tiny units": np.int64, "slow rank": np.uint8}
        return cause, numbers.get(cause, lambda same: same)(evidence)

    def evidence_of_the_last_rank(run, healthy):
        cause, evidence = right.diagnose(run, healthy)
        if cause == "item":
            evidence = right.own_item_calls(run[-1])[-1]
        if cause == "one huge unit":
            evidence = max(run[-1].collectives, key=lambda one: one.elements)
        return [cause, evidence]


@pytest.mark.parametrize("answer", [
    Right.evidence_in_other_types,
    Right.evidence_in_numpy,
    right.diagnose,
    Right.evidence_of_the_last_rank,
    by_seconds(of_the_step(0.12), 2.1),
    by_seconds(of_the_step(0.48), 4.8)])
def test_right(answer):
    verdict = judged(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (by_seconds(twice_the_healthy, 3), "compare it with its own step")])
def test_the_hint_leads_on(answer, hint):
    verdict = judged(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

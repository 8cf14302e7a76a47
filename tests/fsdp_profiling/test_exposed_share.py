"""What the check of exercise 5.2 must reject, and what it must accept."""

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
def united(spans):
    return lab.total_seconds(lab.union(spans))


def from_call(one):
    return type(one)(**{**vars(one), "begin": one.issued})


# 5.2 exposed_share


def waiting(trace, *kinds):
    spans = trace.of(*kinds) if kinds else trace.collectives
    return lab.total_seconds(lab.subtract(lab.union(spans), trace.compute))


WRONG = [
    (lambda trace: None, "not_a_number exposed"),
    (lambda trace: 0.0, "wrong_number"),
    (lambda trace: united(trace.collectives) / trace.seconds, "all_communication"),
    (lambda trace: trace.seconds_of()["overlapped"] / trace.seconds, "part_hidden"),
    (lambda trace: waiting(trace), "in_seconds exposed"),
    (lambda trace: waiting(trace) / united(trace.collectives), "share_communication"),
    (lambda trace: waiting(trace, *KINDS) / trace.seconds, "leaves_out_all_reduce"),
    (lambda trace: 1 - computing(trace) / trace.seconds, "all_time_without_computing"),
    (lambda trace: max(0, united(trace.collectives) - computing(trace)) / trace.seconds,
     "subtracts_seconds_from_seconds"),
    (lambda trace: lab.total_seconds(lab.subtract(trace.compute, lab.union(trace.collectives)))
     / trace.seconds, "computing_without_communication"),
    (lambda trace: sum(lab.total_seconds(lab.subtract([(one.begin, one.end)], trace.compute))
                       for one in trace.collectives) / trace.seconds,
                           "all_time_without_computing|overlaps_counted_twice|wrong_number"),
    (lambda trace: sum(waiting(trace, kind) for kind in (*KINDS, "all_reduce")) / trace.seconds,
     "all_time_without_computing|overlaps_counted_twice|wrong_number"),
    (lambda trace: lab.total_seconds(lab.subtract(lab.union(trace.collectives), trace.compute[:1]))
     / trace.seconds, "all_time_without_computing|overlaps_counted_twice|wrong_number"),
    (lambda trace: lab.total_seconds(lab.subtract(lab.union(trace.collectives), [
        (trace.compute[0][0], trace.compute[-1][1])])) / trace.seconds,
         "computing_without_communication"),
    (lambda trace: waiting(trace) / trace.ends, "wrong_number between"),
    (lambda trace: lab.total_seconds(lab.subtract(lab.union(map(from_call, trace.collectives)),
                                                  trace.compute)) / trace.seconds,
     "all_time_without_computing|overlaps_counted_twice|wrong_number"),
    (lambda trace: waiting(trace) / computing(trace),
     "all_time_without_computing|overlaps_counted_twice|wrong_number"),
    (lambda trace: 1 - waiting(trace) / trace.seconds,
     "all_time_without_computing|overlaps_counted_twice|wrong_number")]




def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]




def order_of(trace):
    return lab.gradients_done(trace)


def asked(trace, moment="issued", phase="backward"):
    return {unit: getattr(one, moment) for one in trace.of("all_gather")
            for unit, when in [right.attribute(trace, one)] if when == phase}


def computing(trace):
    return lab.total_seconds(trace.compute)


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_exposed_share(answer), expected)


class Right:
    """The same, written otherwise."""

    def exposed_by_moments(trace):
        in_flight = lab.union(trace.collectives)
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in in_flight
                     for c, d in trace.compute)
        return (lab.total_seconds(in_flight) - hidden) / trace.seconds

    def exposed_in_tensors(trace):
        edges = torch.tensor(sorted({edge for one in trace.collectives
                                     for edge in (one.begin, one.end)}
                                    | {edge for pair in trace.compute for edge in pair}),
                             dtype=torch.float64)
        middles, widths = (edges[1:] + edges[:-1]) / 2, edges[1:] - edges[:-1]
        flying = sum((one.begin < middles) & (middles < one.end) for one in trace.collectives) > 0
        busy = sum((a < middles) & (middles < b) for a, b in trace.compute) > 0
        return (widths * (flying & ~busy)).sum() / trace.seconds


@pytest.mark.parametrize("answer", [
    right.exposed_share,
    Right.exposed_by_moments,
    Right.exposed_in_tensors,
    lambda trace: np.float64(right.exposed_share(trace))])
def test_right(answer):
    verdict = lab.check_exposed_share(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (lambda trace: lab.subtract(trace.collectives, trace.compute),
     "lab.union makes")])
def test_the_hint_leads_on(answer, hint):
    verdict = lab.check_exposed_share(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

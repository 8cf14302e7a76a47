"""What the check of exercise 5.1 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected

import labs.fsdp_profiling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
KINDS = ("all_gather", "reduce_scatter")
# 5.1 communication_share


def each(seconds):
    return lambda trace: {kind: seconds(trace, trace.of(kind)) for kind in KINDS}


def united(spans):
    return lab.total_seconds(lab.union(spans))


def less_what_neighbours_share(spans):
    order = sorted(spans, key=lambda one: one.begin)
    return sum(one.seconds for one in order) - sum(
        max(0, min(one.end, after.end) - after.begin)
        for one, after in zip(order, order[1:], strict=False))


def extended(spans, order="begin", keep_longer=True):
    """A union with one mistake: by its order, or an end that a shorter span moves back."""
    merged = []
    for one in sorted(spans, key=lambda one: getattr(one, order)):
        if merged and one.begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], one.end) if keep_longer else one.end
        else:
            merged.append([one.begin, one.end])
    return lab.total_seconds(merged)


def from_call(one):
    return type(one)(**{**vars(one), "begin": one.issued})


WRONG = [
    (lambda trace: None, "wrong_type"),
    (lambda trace: 0.5, "wrong_type 0.5"),
    (lambda trace: {"all_gather": 0.3}, "wrong_type"),
    (each(lambda trace, spans: 0.123), "wrong_number 0.123"),
    (each(lambda trace, spans: sum(one.seconds for one in spans) / trace.seconds),
     "overlaps_counted_twice"),
    (each(lambda trace, spans: united(spans)), "in_seconds"),
    (each(lambda trace, spans: 100 * united(spans) / trace.seconds),
     "in_percent"),
    (each(lambda trace, spans: len(spans) / len(trace.collectives)), "counts_calls"),
    (each(lambda trace, spans: united(map(from_call, spans)) / trace.seconds),
     "counts_from_call"),
    (each(lambda trace, spans: united(spans) / trace.seconds * len(trace.steps)),
     "divides_one_step_seconds"),
    (each(lambda trace, spans: united(trace.collectives) / trace.seconds),
     "counts_other_collectives_too"),
    (each(lambda trace, spans: united([*spans, *trace.of("all_reduce")]) / trace.seconds),
     "wrong_number all-reduce"),
    (each(lambda trace, spans: less_what_neighbours_share(spans) / trace.seconds),
     "takes_away_only_two_neighbours"),
    (each(lambda trace, spans: extended(spans, keep_longer=False) / trace.seconds),
     "wrong_number reduce_scatter"),
    (each(lambda trace, spans: extended(spans, order="issued") / trace.seconds),
     "unites_spans_if_began"),
    (each(lambda trace, spans: (max(one.end for one in spans) - min(one.begin for one in spans))
          / trace.seconds), "time_from_first_begin_last"),
    (each(lambda trace, spans: united(spans) / trace.ends),
     "divides_time_since_recording_began"),
    (each(lambda trace, spans: united(spans) / trace.steps[0].seconds), "divides_one_step_seconds"),
    (each(lambda trace, spans: sum(one.seconds for one in spans if one.seconds) / sum(
        one.seconds for one in trace.collectives)), "wrong_number"),
    (lambda trace: [0.1, 0.2], "wrong_type"),
    (lambda trace: dict.fromkeys(KINDS, "0.2"), "not_a_number str")]




def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]




def order_of(trace):
    return lab.gradients_done(trace)


def asked(trace, moment="issued", phase="backward"):
    return {unit: getattr(one, moment) for one in trace.of("all_gather")
            for unit, when in [right.attribute(trace, one)] if when == phase}


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_communication_share(answer), expected)


class Right:
    """The same, written otherwise."""

    def share_by_moments(trace):
        def total(spans):
            edges = sorted({edge for one in spans for edge in (one.begin, one.end)})
            return sum(b - a for a, b in zip(edges, edges[1:], strict=False)
                       if any(one.begin <= a and b <= one.end for one in spans))

        return {kind: total(trace.of(kind)) / trace.seconds for kind in KINDS}

    def share_by_the_meter(trace):
        return {kind: trace.seconds_of(kind)["total"] / trace.seconds for kind in KINDS}

    def share_as_fractions(trace):
        from fractions import Fraction
        from types import MappingProxyType
        shares = Right.share_by_the_meter(trace)
        return MappingProxyType({kind: Fraction(share) for kind, share in shares.items()})

    def share_by_numpy(trace):
        def total(spans):
            begins, ends = np.array(sorted((one.begin, one.end) for one in spans)).T
            ends = np.maximum.accumulate(ends)
            gaps = np.maximum(begins[1:] - ends[:-1], 0).sum()
            return ends[-1] - begins[0] - gaps

        return {kind: total(trace.of(kind)) / np.float64(trace.seconds) for kind in KINDS}


@pytest.mark.parametrize("answer", [
    right.communication_share,
    Right.share_by_moments,
    Right.share_by_the_meter,
    each(lambda trace, spans: united(
        [(one.begin, one.end) for one in spans]) / trace.seconds),
    Right.share_as_fractions,
    Right.share_by_numpy])
def test_right(answer):
    verdict = lab.check_communication_share(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (each(lambda trace, spans: lab.total_seconds(spans)),
     "lab.union make")])
def test_the_hint_leads_on(answer, hint):
    verdict = lab.check_communication_share(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

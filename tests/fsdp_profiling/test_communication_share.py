"""What the check of exercise 5.1 must reject, and what it must accept."""

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


def groups(trace):
    return {**{kind: trace.of(kind) for kind in KINDS}, "all": list(trace.collectives)}


def waited(trace, spans):
    """The right exposed share."""
    return lab.total_seconds(lab.subtract(lab.union(spans), trace.compute)) / trace.seconds


def each(seconds):
    """An answer whose shares in flight are these, and whose exposed shares are right."""
    return lambda trace: {kind: (seconds(trace, spans), waited(trace, spans))
                          for kind, spans in groups(trace).items()}


def exposed(share):
    """An answer that is right but for the exposed share of all collectives."""
    return lambda trace: {**right.communication_share(trace), "all": (
        right.communication_share(trace)["all"][0], share(trace))}


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
    (lambda trace: {"all_gather": (0.3, 0.1)}, "wrong_type"),
    (lambda trace: dict.fromkeys(KINDS, (0.3, 0.1)), "wrong_type all_gather"),
    (lambda trace: dict.fromkeys(groups(trace), 0.3), "wrong_type (in flight, exposed)"),
    (lambda trace: {kind: pair[::-1] for kind, pair in right.communication_share(trace).items()},
     "shares_swapped"),
    # the shares of all collectives in place of each kind's
    (lambda trace: dict.fromkeys(groups(trace), right.communication_share(trace)["all"]),
     "counts_other_collectives_too"),
    (lambda trace: {kind: (total, waited(trace, trace.collectives)) for kind, (total, _) in
                    right.communication_share(trace).items()},
     "counts_other_collectives_too|all_communication"),
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
    (lambda trace: dict.fromkeys(groups(trace), ("0.2", 0.1)), "not_a_number str")]


def computing(trace):
    return lab.total_seconds(trace.compute)


def waiting(trace, *kinds):
    spans = trace.of(*kinds) if kinds else trace.collectives
    return lab.total_seconds(lab.subtract(lab.union(spans), trace.compute))


EXPOSED = [
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


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_communication_share(answer), expected)


@pytest.mark.parametrize("share, expected", EXPOSED)
def test_wrong_exposed(share, expected):
    assert_rejected(lab.check_communication_share(exposed(share)), expected)


def by_moments(spans, others=()):
    """Seconds in which one of `spans` and no interval of `others` lasts."""
    edges = sorted({edge for one in spans for edge in (one.begin, one.end)}
                   | {edge for pair in others for edge in pair})
    return sum(b - a for a, b in zip(edges, edges[1:], strict=False)
               if any(one.begin <= a and b <= one.end for one in spans)
               and not any(begin <= a and b <= end for begin, end in others))


class Right:
    """The same, written otherwise."""

    def share_by_moments(trace):
        return {kind: [by_moments(spans) / trace.seconds,
                       by_moments(spans, trace.compute) / trace.seconds]
                for kind, spans in groups(trace).items()}

    def share_by_the_meter(trace):
        found = {}
        for kind, kinds in (("all_gather", ["all_gather"]), ("reduce_scatter", ["reduce_scatter"]),
                            ("all", [])):
            times = trace.seconds_of(*kinds)
            found[kind] = times["total"] / trace.seconds, times["exposed"] / trace.seconds
        return found

    def share_as_fractions(trace):
        from fractions import Fraction
        from types import MappingProxyType
        shares = Right.share_by_the_meter(trace)
        return MappingProxyType({kind: tuple(map(Fraction, pair)) for kind, pair in shares.items()})

    def share_by_numpy(trace):
        def total(spans):
            if not spans:
                return 0.0
            begins, ends = np.array(sorted((one.begin, one.end) for one in spans)).T
            ends = np.maximum.accumulate(ends)
            gaps = np.maximum(begins[1:] - ends[:-1], 0).sum()
            return ends[-1] - begins[0] - gaps

        return {kind: np.array([total(spans) / trace.seconds, waited(trace, spans)])
                for kind, spans in groups(trace).items()}

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
    right.communication_share,
    Right.share_by_moments,
    Right.share_by_the_meter,
    each(lambda trace, spans: united(
        [(one.begin, one.end) for one in spans]) / trace.seconds),
    Right.share_as_fractions,
    Right.share_by_numpy,
    exposed(Right.exposed_by_moments),
    exposed(Right.exposed_in_tensors),
    exposed(lambda trace: np.float64(right.communication_share(trace)["all"][1]))])
def test_right(answer):
    verdict = lab.check_communication_share(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (each(lambda trace, spans: lab.total_seconds(spans)),
     "lab.union make"),
    (exposed(lambda trace: lab.subtract(trace.collectives, trace.compute)), "lab.union make")])
def test_the_hint_leads_on(answer, hint):
    verdict = lab.check_communication_share(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

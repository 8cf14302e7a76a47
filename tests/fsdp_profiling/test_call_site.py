"""What the check of exercise 5.4 must reject, and what it must accept."""

import sys
from collections import Counter

import cloudpickle
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.fsdp_profiling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
KINDS = ("all_gather", "reduce_scatter")
# 5.4 call_site


def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]


WRONG = [
    (lambda one: None, "not_on_stack None"),
    (lambda one: one.stack[-1], "library_frame"),
    (lambda one: one.stack[0], "library_frame string"),
    (lambda one: own(one.stack)[0], "outer_caller step'"),
    (lambda one: own(one.stack)[-1].split("(")[0], "not_on_stack 'train.py'"),
    (lambda one: [f for f in one.stack if "built-in" not in f and "torch/distributed" not in f][-1],
     "library_frame call'"),
    (lambda one: [f for f in one.stack if f.startswith("train")][-1], "outer_caller"),
    (lambda one: own(one.stack)[-2:], "not_on_stack"),
    (lambda one: one.stack.index(own(one.stack)[-1]), "not_on_stack"),
    (lambda one: own(one.stack)[-1].split(": ")[-1], "not_on_stack"),
    (lambda one: [f for f in one.stack if "torch/" not in f][-1], "library_frame"),
    (lambda one: one.stack[2], "library_frame")]



def is_fsdps(trace, one, moment="issued"):
    return bool(trace.enclosing(getattr(one, moment), "FSDP::"))


def added(trace, seconds, chosen=lambda trace, one: not is_fsdps(trace, one),
          site=right.call_site):
    """{site: the sum of seconds(one)} over the chosen collectives."""
    found = {}
    for one in trace.collectives:
        if chosen(trace, one):
            found[site(one)] = found.get(site(one), 0) + seconds(one)
    return found


def exposed(trace, one, begin="begin"):
    return lab.total_seconds(lab.subtract([(getattr(one, begin), one.end)], trace.compute))


class Seconds:
    def nothing(trace):
        return None

    def empty(trace):
        return {}

    def a_number(trace):
        return trace.exposed_seconds

    def with_fsdps_own(trace):
        return added(trace, lambda one: exposed(trace, one), lambda trace, one: True)

    def all_reduces_alone(trace):
        return added(trace, lambda one: exposed(trace, one),
                     lambda trace, one: one.kind == "all_reduce")

    def by_its_begin(trace):
        return added(trace, lambda one: exposed(trace, one),
                     lambda trace, one: not is_fsdps(trace, one, "begin"))

    def by_all_labels(trace):
        return added(trace, lambda one: exposed(trace, one),
                     lambda trace, one: not trace.enclosing(one.issued))

    def by_kind(trace):
        return added(trace, lambda one: exposed(trace, one), site=lambda one: one.kind)

    def by_innermost_frame(trace):
        return added(trace, lambda one: exposed(trace, one), site=lambda one: one.stack[-1])

    def calls(trace):
        return added(trace, lambda one: 1)

    def in_flight(trace):
        return added(trace, lambda one: one.seconds)

    def hidden(trace):
        return added(trace, lambda one: one.seconds - exposed(trace, one))

    def from_the_call(trace):
        return added(trace, lambda one: exposed(trace, one, "issued"))

    def milliseconds(trace):
        return added(trace, lambda one: 1e3 * exposed(trace, one))

    def shares(trace):
        return added(trace, lambda one: exposed(trace, one) / trace.seconds)

    def last_call_alone(trace):
        return {right.call_site(one): exposed(trace, one) for one in trace.collectives
                if not is_fsdps(trace, one)}

    def texts(trace):
        return dict.fromkeys(right.exposed_by_call_site(trace), "0.1")


WRONG_SECONDS = [
    (Seconds.nothing, "wrong_type"), (Seconds.empty, "missing_entry"),
    (Seconds.a_number, "wrong_type"), (Seconds.with_fsdps_own, "extra_entry stats.py"),
    (Seconds.all_reduces_alone, "missing_entry grad_norm"),
    (Seconds.by_its_begin, "extra_entry|not_added_up"), (Seconds.by_all_labels, "missing_entry"),
    (Seconds.by_kind, "missing_entry"), (Seconds.by_innermost_frame, "missing_entry"),
    (Seconds.calls, "counts_calls"), (Seconds.in_flight, "all_communication"),
    (Seconds.hidden, "part_hidden"), (Seconds.from_the_call, "counts_from_call"),
    (Seconds.milliseconds, "in_milliseconds"), (Seconds.shares, "in_share"),
    (Seconds.last_call_alone, "not_added_up"), (Seconds.texts, "not_a_number")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_call_site(answer, right.exposed_by_call_site), expected)


@pytest.mark.parametrize("answer, expected", WRONG_SECONDS)
def test_wrong_seconds(answer, expected):
    assert_rejected(lab.check_call_site(right.call_site, answer), expected)


class Right:
    """The same, written otherwise."""

    def site_by_a_list(collective):
        return own(collective.stack)[-1]


    def seconds_by_the_meter(trace):
        sites = {own(one.stack)[-1] for one in trace.collectives if not is_fsdps(trace, one)}
        return {site: sum(exposed(trace, one) for one in trace.collectives
                          if not is_fsdps(trace, one) and own(one.stack)[-1] == site)
                for site in sites}

    def seconds_in_a_counter(trace):
        found = Counter()
        for one in trace.collectives:
            names = [label.name for label in trace.enclosing(one.issued)]
            if not any(name.startswith("FSDP::") for name in names):
                busy = sum(max(0.0, min(one.end, end) - max(one.begin, begin))
                           for begin, end in trace.compute)
                found[right.call_site(one)] += one.seconds - busy
        return found


@pytest.mark.parametrize("answer, seconds", [
    (right.call_site, right.exposed_by_call_site),
    (Right.site_by_a_list, right.exposed_by_call_site),
    (right.call_site, Right.seconds_by_the_meter), (right.call_site, Right.seconds_in_a_counter)])
def test_right(answer, seconds):
    verdict = lab.check_call_site(answer, seconds)
    assert verdict.passed is True, verdict


def test_waits():
    assert_waits(lab.check_call_site, "5.4", functions=2)

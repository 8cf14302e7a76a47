"""What the check of exercise 5.5 must reject, and what it must accept."""

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
def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]


# 5.5 fetched_late


def order_of(trace):
    return lab.gradients_done(trace)


def asked(trace, moment="issued", phase="backward"):
    return {unit: getattr(one, moment) for one in trace.of("all_gather")
            for unit, when in [right.attribute(trace, one)] if when == phase}


class Late:
    def nothing(trace):
        return []

    def a_bool(trace):
        return bool(right.fetched_late(trace))

    def everything(trace):
        return [span.name for span in order_of(trace) if span.name != "root"]

    def by_its_begin(trace):
        times, done = asked(trace, "begin"), order_of(trace)
        return [after.name for before, after in zip(done, done[1:], strict=False)
                if times.get(after.name, 0) > before.begin]

    def against_its_own_gradients(trace):
        times = asked(trace)
        return [span.name for span in order_of(trace) if times.get(span.name, 0) > span.begin]

    def any_phase(trace):
        times, done = asked(trace, phase="forward"), order_of(trace)
        return [after.name for before, after in zip(done, done[1:], strict=False)
                if times.get(after.name, 0) > before.begin]

    def only_the_first_late_one(trace):
        return right.fetched_late(trace)[:1]

    def by_the_label_prefetch(trace):
        ahead = [label.name.split()[-1] for label in trace.labelled("FSDP::backward_prefetch")]
        return [unit for unit in asked(trace) if unit not in ahead and unit != "root"]


    def sorted_by_name(trace):
        times, names = asked(trace), sorted({s.name for s in order_of(trace)} - {"root"})[::-1]
        done = {span.name: span.begin for span in order_of(trace)}
        return [after for before, after in zip(names, names[1:], strict=False)
                if times.get(after, 0) > done[before]]

    def not_gathered_is_late(trace):
        times, done = asked(trace), order_of(trace)
        return [after.name for before, after in zip(done, done[1:], strict=False)
                if times.get(after.name, float("inf")) > before.begin and after.name != "root"]

    def by_its_end(trace):
        times, done = asked(trace, "end"), order_of(trace)
        return [after.name for before, after in zip(done, done[1:], strict=False)
                if times.get(after.name, 0) > before.begin]

    def the_unit_before(trace):
        times, done = asked(trace), order_of(trace)
        return [before.name for before, after in zip(done, done[1:], strict=False)
                if times.get(after.name, 0) > before.begin]

    def exposed_ones(trace):
        return [right.attribute(trace, one)[0] for one in trace.of("all_gather")
                if right.attribute(trace, one)[1] == "backward" and lab.total_seconds(
                    lab.subtract([(one.begin, one.end)], trace.compute))]

    def after_all_of_them(trace):
        times, done = asked(trace), order_of(trace)
        return [unit for unit, at in times.items() if at > max(s.begin for s in done)]

    def in_time(trace):
        late = right.fetched_late(trace)
        return [unit for unit in asked(trace) if unit not in late]

    def numbers(trace):
        return list(range(len(right.fetched_late(trace))))

    def joined(trace):
        return ", ".join(right.fetched_late(trace))


WRONG = [
    (Late.sorted_by_name, "missing_entry layers'"),
    (Late.not_gathered_is_late, "extra_entry forward'"),
    (Late.by_its_end, "begin_not_issue"), (Late.the_unit_before, "extra_entry|missing_entry"),
    (Late.exposed_ones, "extra_entry|missing_entry"),
    (Late.after_all_of_them, "missing_entry layer.1"),
    (Late.in_time, "extra_entry"), (Late.numbers, "wrong_type"),
    (Late.joined, "wrong_type"),
    (Late.nothing, "missing_entry layer.1"),
    (Late.a_bool, "wrong_type False"),
    (Late.everything, "extra_entry"),
    (Late.by_its_begin, "begin_not_issue"),
    (Late.against_its_own_gradients, "missing_entry layer.1"),
    (Late.any_phase, "missing_entry layer.1"),
    (Late.only_the_first_late_one, "missing_entry"),
    (Late.by_the_label_prefetch, "extra_entry without'")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_fetched_late(answer), expected)


class Right:
    """The same, written otherwise."""

    def late_as_a_set(trace):
        done = {span.name: span.begin for span in order_of(trace)}
        units, times = list(done), asked(trace)
        return {unit for before, unit in zip(units, units[1:], strict=False)
                if times.get(unit, float("-inf")) > done[before]}

    def late_as_an_array(trace):
        return np.array(right.fetched_late(trace), dtype=object)

    def late_as_keys(trace):
        return dict.fromkeys(right.fetched_late(trace)).keys()

    def late_one_by_one(trace):
        yield from right.fetched_late(trace)


@pytest.mark.parametrize("answer", [
    right.fetched_late, Right.late_as_a_set,
    Right.late_as_an_array,
    Right.late_as_keys,
    Right.late_one_by_one])
def test_right(answer):
    verdict = lab.check_fetched_late(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (Late.by_its_begin, "collective.issued")])
def test_the_hint_leads_on(answer, hint):
    verdict = lab.check_fetched_late(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

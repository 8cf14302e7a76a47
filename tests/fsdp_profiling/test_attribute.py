"""What the check of exercise 5.3 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected

import labs.fsdp_profiling as lab
from labs.meters.trace_units import unit_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
KINDS = ("all_gather", "reduce_scatter")
# 5.3 attribute


def label_at(trace, moment, beginning, which=-1):
    found = trace.enclosing(moment, beginning)
    return unit_of(found[which].name) if found else "root"


def phase_at(trace, moment):
    return "forward" if trace.enclosing(moment, "labs::forward") else "backward"


class Attribute:
    def nothing(trace, one):
        return None

    def only_the_unit(trace, one):
        return label_at(trace, one.issued, "FSDP::all_gather")

    def everything_roots(trace, one):
        return "root", "forward"

    def by_its_begin(trace, one):
        return label_at(trace, one.begin, "FSDP::all_gather"), phase_at(trace, one.begin)

    def phase_by_the_end(trace, one):
        return label_at(trace, one.issued, "FSDP::all_gather"), phase_at(trace, one.end)

    def the_asking_unit(trace, one):
        return label_at(trace, one.issued, "FSDP::pre_", 0), phase_at(trace, one.issued)

    def with_brackets(trace, one):
        name = trace.enclosing(one.issued, "FSDP::all_gather")[-1].name
        return name.split()[-1] if "(" in name else "root", phase_at(trace, one.issued)

    def closing_bracket(trace, one):
        name = trace.enclosing(one.issued, "FSDP::all_gather")[-1].name
        return name.split("(")[-1] if "(" in name else "root", phase_at(trace, one.issued)

    def brackets_of_the_root(trace, one):
        name = trace.enclosing(one.issued, "FSDP::all_gather")[-1].name
        return name.split("(")[1][:-1], phase_at(trace, one.issued)

    def root_has_no_name(trace, one):
        unit = label_at(trace, one.issued, "FSDP::all_gather")
        return "" if unit == "root" else unit, phase_at(trace, one.issued)

    def first_half_is_forward(trace, one):
        early = one.issued < trace.seconds / 2
        return (label_at(trace, one.issued, "FSDP::all_gather"),
                "forward" if early else "backward")

    def in_the_order_of_the_calls(trace, one):
        number = trace.of("all_gather").index(one)
        order = ["root", "layer.0", "layer.1", "layer.2"]
        return (order[number], "forward") if number < 4 else (order[3 - number % 4], "backward")


    def one_step_only(trace, one):
        number = trace.of("all_gather").index(one)
        names = list(dict.fromkeys(label_at(trace, other.issued, "FSDP::all_gather")
                                   for other in trace.of("all_gather")))
        return label_at(trace, one.issued, "FSDP::all_gather"), (
            "forward" if number < len(names) else "backward")

    def first_time_is_forward(trace, one):
        unit = label_at(trace, one.issued, "FSDP::all_gather")
        earlier = [other for other in trace.of("all_gather") if other.issued < one.issued
                   and label_at(trace, other.issued, "FSDP::all_gather") == unit]
        return unit, "backward" if earlier else "forward"

    def every_second_is_backward(trace, one):
        unit = label_at(trace, one.issued, "FSDP::all_gather")
        earlier = [other for other in trace.of("all_gather") if other.issued < one.issued
                   and label_at(trace, other.issued, "FSDP::all_gather") == unit]
        return unit, "backward" if len(earlier) % 2 else "forward"

    def first_name_that_fits(trace, one):
        name = trace.enclosing(one.issued, "FSDP::all_gather")[-1].name
        units = sorted({unit_of(label.name) for label in trace.labelled("FSDP::all_gather")})
        return (next((unit for unit in units if unit in name), "root"),
                phase_at(trace, one.issued))

    def the_phases_label(trace, one):
        return (label_at(trace, one.issued, "FSDP::all_gather"),
                f"labs::{phase_at(trace, one.issued)}")

    def the_other_way_round(trace, one):
        return right.attribute(trace, one)[::-1]

    def a_string(trace, one):
        return " ".join(right.attribute(trace, one))

    def last_part_only(trace, one):
        unit, phase = right.attribute(trace, one)
        return unit.split(".")[-1], phase


WRONG = [
    (Attribute.one_step_only, "wrong_phase"),
    (Attribute.first_time_is_forward, "wrong_phase"),
    (Attribute.every_second_is_backward,
     "wrong_phase"),
    (Attribute.first_name_that_fits, "wrong_unit layers.10"),
    (Attribute.the_phases_label, "wrong_phase 'labs"),
    (Attribute.the_other_way_round, "wrong_phase 'root'"),
    (Attribute.a_string, "wrong_type forward'"),
    (Attribute.last_part_only, "wrong_unit '0'"),
    (Attribute.nothing, "wrong_type"),
    (Attribute.only_the_unit, "wrong_type"),
    (Attribute.everything_roots, "wrong_unit"),
    (Attribute.by_its_begin, "wrong_unit"),
    (Attribute.phase_by_the_end, "wrong_phase"),
    (Attribute.the_asking_unit, "prefetching_unit"),
    (Attribute.with_brackets, "wrong_unit"), (Attribute.closing_bracket, "wrong_unit"),
    (Attribute.brackets_of_the_root, "raised_IndexError brackets"),
    (Attribute.root_has_no_name, "root_missed"),
    (Attribute.first_half_is_forward, "wrong_phase 'forward'"),
    (Attribute.in_the_order_of_the_calls, "root_missed 'layer.2'")]




def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]




def order_of(trace):
    return lab.gradients_done(trace)


def asked(trace, moment="issued", phase="backward"):
    return {unit: getattr(one, moment) for one in trace.of("all_gather")
            for unit, when in [right.attribute(trace, one)] if when == phase}


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_attribute(answer), expected)


class Right:
    """The same, written otherwise."""

    def attribute_by_a_loop(trace, collective):
        unit = phase = None
        for label in trace.labels:
            if label.begin <= collective.issued <= label.end:
                if label.name in ("labs::forward", "labs::backward"):
                    phase = label.name[6:]
                elif label.name.startswith("FSDP::all_gather"):
                    unit = label.name[17:].strip("() ") or "root"
        return [unit, phase]

    def attribute_in_an_array(trace, collective):
        return np.array(right.attribute(trace, collective))


@pytest.mark.parametrize("answer", [
    right.attribute, Right.attribute_by_a_loop,
    Right.attribute_in_an_array])
def test_right(answer):
    verdict = lab.check_attribute(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (Attribute.by_its_begin, "collective.issued"),
    (lambda trace, one: trace.enclosing(one.begin, "FSDP::all_gather")[-1],
     "collective.issued"),
    (Attribute.first_half_is_forward, "The label around the call is")])
def test_the_hint_leads_on(answer, hint):
    verdict = lab.check_attribute(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

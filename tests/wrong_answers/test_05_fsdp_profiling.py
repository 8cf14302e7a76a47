"""What the checks of notebook 05 must reject, with the words that must say why; and what they must
accept."""

import sys
from itertools import islice

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
WRONG = {}


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


WRONG[lab.check_communication_share] = [
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


# 5.2 exposed_share


def waiting(trace, *kinds):
    spans = trace.of(*kinds) if kinds else trace.collectives
    return lab.total_seconds(lab.subtract(lab.union(spans), trace.compute))


WRONG[lab.check_exposed_share] = [
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


# 5.3 attribute


def label_at(trace, moment, beginning, which=-1):
    found = trace.enclosing(moment, beginning)
    return lab.unit_of(found[which].name) if found else "root"


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
        units = sorted({lab.unit_of(label.name) for label in trace.labelled("FSDP::all_gather")})
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


WRONG[lab.check_attribute] = [
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
    (Attribute.with_brackets, "wrong_unit"),
    (Attribute.root_has_no_name, "root_missed"),
    (Attribute.first_half_is_forward, "wrong_phase 'forward'"),
    (Attribute.in_the_order_of_the_calls, "root_missed 'layer.2'")]


# 5.4 call_site


def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]


WRONG[lab.check_call_site] = [
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


WRONG[lab.check_fetched_late] = [
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


# 5.6 no_prefetch, 5.7 forward_prefetch


class Off:
    def nothing(blocks):
        pass

    def an_empty_list(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch([])

    def forwards(blocks):
        for block in blocks:
            block.set_modules_to_forward_prefetch([block])

    def only_the_last(blocks):
        blocks[-1].set_modules_to_backward_prefetch([blocks[-1]])

    def the_one_before(blocks):
        for block, before in zip(blocks[1:], blocks, strict=False):
            block.set_modules_to_backward_prefetch([before])

    def all_of_them(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch(blocks)


class Counted:
    """Right for one number of blocks only."""

    def three(blocks):
        for block in blocks[:3]:
            block.set_modules_to_backward_prefetch([block])

    def but_the_last_two(blocks):
        for block in blocks[:-2]:
            block.set_modules_to_backward_prefetch([block])


class Again:
    """Late, but what backward is done with is gathered once more, for nothing."""

    def the_last(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch([blocks[-1]])

    def the_following(blocks):
        for block, following in zip(blocks, [*blocks[1:], blocks[-1]], strict=True):
            block.set_modules_to_backward_prefetch([following])


def and_forward(blocks):
    right.no_prefetch(blocks)
    for block, following in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])


def not_a_list(blocks):
    for block in blocks:
        block.set_modules_to_backward_prefetch(block)


def names_of_units(blocks):
    for number, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch([f"transformer.h.{number}"])


WRONG[lab.check_no_prefetch] = [
    *((answer, sentence) for answers, sentence in (
        (Off, "still_prefetched"), (Counted, "still_prefetched"),
        (Again, "gathered_again"))
      for name, answer in vars(answers).items() if not name.startswith("_")),
    (and_forward, "forward_changed"),
    (not_a_list, "raised_TypeError"), (names_of_units, "raised_ValueError")]


class Ahead:
    def nothing(blocks, ahead):
        pass

    def in_backward(blocks, ahead):
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_backward_prefetch([following])

    def the_one_before(blocks, ahead):
        for block, before in zip(blocks[1:], blocks, strict=False):
            block.set_modules_to_forward_prefetch([before])

    def itself(blocks, ahead):
        for block in blocks:
            block.set_modules_to_forward_prefetch([block])

    def only_the_first(blocks, ahead):
        blocks[0].set_modules_to_forward_prefetch(blocks[1:1 + ahead])

    def one_only(blocks, ahead):
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])

    def the_one_at_that_distance(blocks, ahead):
        for block, following in zip(blocks, blocks[ahead:], strict=False):
            block.set_modules_to_forward_prefetch([following])

    def all_that_follow(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1:])

    def two_always(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1:number + 3])

    def one_too_many(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1:number + 2 + ahead])

    def all_of_them(blocks, ahead):
        for block in blocks:
            block.set_modules_to_forward_prefetch(blocks)

    def round_the_end(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(
                [blocks[(number + k) % len(blocks)] for k in range(1, ahead + 1)])

    def three_blocks(blocks, ahead):
        for number, block in enumerate(blocks[:3]):
            block.set_modules_to_forward_prefetch(blocks[number + 1:number + 1 + ahead])

    def backward_off_too(blocks, ahead):
        right.forward_prefetch(blocks, ahead)
        right.no_prefetch(blocks)

    def backward_further_too(blocks, ahead):
        right.forward_prefetch(blocks, ahead)
        for number, block in enumerate(blocks):
            before = blocks[max(0, number - 2):number][::-1]
            block.set_modules_to_backward_prefetch(before or [block])


WRONG[lab.check_forward_prefetch] = [
    (lambda blocks: None, "wrong_signature blocks"),
    (Ahead.nothing, "not_prefetched"), (Ahead.in_backward, "gathered_again"),
    (Ahead.the_one_before, "gathered_again"),
    (Ahead.itself, "not_prefetched"), (Ahead.only_the_first, "not_prefetched"),
    (Ahead.one_only, "not_prefetched"),
    (Ahead.the_one_at_that_distance, "not_prefetched"),
    (Ahead.all_that_follow, "too_far_ahead"),
    (Ahead.two_always, "too_far_ahead"),
    (Ahead.one_too_many, "too_far_ahead"),
    (Ahead.all_of_them, "gathered_again"),
    (Ahead.round_the_end, "gathered_again"),
    (Ahead.three_blocks, "not_prefetched"),
    (Ahead.backward_off_too, "backward_changed late"),
    (Ahead.backward_further_too, "backward_changed gathered")]


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


WRONG[lab.check_diagnose] = [
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


# 5.9 collective_seconds

def ring(nbytes, ranks, bandwidth):
    return (ranks - 1) / ranks * nbytes / bandwidth


WRONG[lab.check_collective_seconds] = [
    (lambda n, r, b, a: None, "not_a_number time"),
    (lambda nbytes, ranks, bandwidth: ring(nbytes, ranks, bandwidth), "wrong_signature"),
    (lambda n, r, b, a: 0.0, "wrong_number"),
    (lambda n, r, b, a: ring(n, r, b), "leaves_out_latency"),
    (lambda n, r, b, a: ring(n, r, b) + (r - 1) * a, "latency_each_piece"),
    (lambda n, r, b, a: ring(n, r, b) - a, "takes_latency_away"),
    (lambda n, r, b, a: n / b + a, "own_piece_too"),
    (lambda n, r, b, a: n / b, "own_piece_too without"),
    (lambda n, r, b, a: a + 2 * ring(n, r, b), "all_reduce"),
    (lambda n, r, b, a: a + (r - 1) * n / b, "nbytes_of_a_piece"),
    (lambda n, r, b, a: a + n / r / b, "one_piece"),
    (lambda n, r, b, a: a + 8 * ring(n, r, b), "bandwidth_in_bits"),
    (lambda n, r, b, a: 1e3 * (a + ring(n, r, b)), "in_milliseconds"),
    (lambda n, r, b, a: max(a, ring(n, r, b)), "leaves_out_latency"),
    (lambda n, r, b, a: a * ring(n, r, b), "wrong_number"),
    (lambda n, r, b, a: a + (r - 1) / r * n * b, "wrong_number")]


@pytest.mark.parametrize("check, answer, sentence", [
    (check, answer, sentence) for check, cases in WRONG.items() for answer, sentence in cases])
def test_wrong(check, answer, sentence):
    verdict = check(answer)
    assert_rejected(verdict, sentence)


def test_every_check_has_five_wrong_answers():
    checks = {getattr(lab, name) for name in lab.__all__ if name.startswith("check_")}
    assert set(WRONG) == checks - {lab.check_exposed_seconds}  # it has a file of its own
    assert min(map(len, WRONG.values())) >= 5


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

    def exposed_by_moments(trace):
        in_flight = lab.union(trace.collectives)
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in in_flight
                     for c, d in trace.compute)
        return (lab.total_seconds(in_flight) - hidden) / trace.seconds

    def attribute_by_a_loop(trace, collective):
        unit = phase = None
        for label in trace.labels:
            if label.begin <= collective.issued <= label.end:
                if label.name in ("labs::forward", "labs::backward"):
                    phase = label.name[6:]
                elif label.name.startswith("FSDP::all_gather"):
                    unit = label.name[17:].strip("() ") or "root"
        return [unit, phase]

    def site_by_a_list(collective):
        return own(collective.stack)[-1]

    def late_as_a_set(trace):
        done = {span.name: span.begin for span in order_of(trace)}
        units, times = list(done), asked(trace)
        return {unit for before, unit in zip(units, units[1:], strict=False)
                if times.get(unit, float("-inf")) > done[before]}

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

    def exposed_in_tensors(trace):
        edges = torch.tensor(sorted({edge for one in trace.collectives
                                     for edge in (one.begin, one.end)}
                                    | {edge for pair in trace.compute for edge in pair}),
                             dtype=torch.float64)
        middles, widths = (edges[1:] + edges[:-1]) / 2, edges[1:] - edges[:-1]
        flying = sum((one.begin < middles) & (middles < one.end) for one in trace.collectives) > 0
        busy = sum((a < middles) & (middles < b) for a, b in trace.compute) > 0
        return (widths * (flying & ~busy)).sum() / trace.seconds

    def attribute_in_an_array(trace, collective):
        return np.array(right.attribute(trace, collective))

    def late_as_an_array(trace):
        return np.array(right.fetched_late(trace), dtype=object)

    def late_as_keys(trace):
        return dict.fromkeys(right.fetched_late(trace)).keys()

    def late_one_by_one(trace):
        yield from right.fetched_late(trace)

    def ahead_by_islice(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(islice(blocks, number + 1,
                                                              number + 1 + ahead)))

    def ahead_but_for_the_last(blocks, ahead):
        for number in range(len(blocks) - 1):
            blocks[number].set_modules_to_forward_prefetch(
                tuple(blocks[number + 1:number + 1 + ahead]))

    def ahead_with_itself(blocks, ahead):  # to fetch what is there does nothing
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number:number + 1 + ahead])

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

    def off_but_for_the_first(blocks):
        for block in blocks[1:]:  # nobody is left whom the first could fetch
            block.set_modules_to_backward_prefetch([block, block])

    def evidence_of_the_last_rank(run, healthy):
        cause, evidence = right.diagnose(run, healthy)
        if cause == "item":
            evidence = right.own_item_calls(run[-1])[-1]
        if cause == "one huge unit":
            evidence = max(run[-1].collectives, key=lambda one: one.elements)
        return [cause, evidence]


@pytest.mark.parametrize("check, answer", [
    (lab.check_communication_share, right.communication_share),
    (lab.check_communication_share, Right.share_by_moments),
    (lab.check_communication_share, Right.share_by_the_meter),
    (lab.check_communication_share, each(lambda trace, spans: united(
        [(one.begin, one.end) for one in spans]) / trace.seconds)),
    (lab.check_exposed_share, right.exposed_share),
    (lab.check_exposed_share, Right.exposed_by_moments),
    (lab.check_attribute, right.attribute), (lab.check_attribute, Right.attribute_by_a_loop),
    (lab.check_call_site, right.call_site), (lab.check_call_site, Right.site_by_a_list),
    (lab.check_fetched_late, right.fetched_late), (lab.check_fetched_late, Right.late_as_a_set),
    (lab.check_no_prefetch, right.no_prefetch),
    (lab.check_no_prefetch, Right.off_but_for_the_first),
    (lab.check_forward_prefetch, right.forward_prefetch),
    (lab.check_forward_prefetch, Right.ahead_by_islice),
    (lab.check_forward_prefetch, Right.ahead_but_for_the_last),
    (lab.check_forward_prefetch, Right.ahead_with_itself),
    (lab.check_communication_share, Right.share_as_fractions),
    (lab.check_communication_share, Right.share_by_numpy),
    (lab.check_exposed_share, Right.exposed_in_tensors),
    (lab.check_attribute, Right.attribute_in_an_array),
    (lab.check_fetched_late, Right.late_as_an_array),
    (lab.check_fetched_late, Right.late_as_keys),
    (lab.check_fetched_late, Right.late_one_by_one),
    (lab.check_diagnose, Right.evidence_in_other_types),
    (lab.check_diagnose, Right.evidence_in_numpy),
    (lab.check_diagnose, right.diagnose),
    (lab.check_diagnose, Right.evidence_of_the_last_rank),
    (lab.check_diagnose, by_seconds(of_the_step(0.12), 2.1)),
    (lab.check_diagnose, by_seconds(of_the_step(0.48), 4.8)),
    (lab.check_collective_seconds, right.collective_seconds),
    (lab.check_collective_seconds,
     lambda n, r, b, a: (n - n / r) / b + a),
    (lab.check_collective_seconds,
     lambda n, r, b, a: torch.tensor(right.collective_seconds(n, r, b, a))),
    (lab.check_collective_seconds,
     lambda n, r, b, a: np.float32(a) + np.float32((r - 1) * (n / r) / b)),
    (lab.check_exposed_share, lambda trace: np.float64(right.exposed_share(trace)))])
def test_right(check, answer):
    verdict = check(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("check, answer, hint", [
    (lab.check_communication_share, each(lambda trace, spans: lab.total_seconds(spans)),
     "lab.union make"),
    (lab.check_exposed_share, lambda trace: lab.subtract(trace.collectives, trace.compute),
     "lab.union makes"),
    (lab.check_attribute, Attribute.by_its_begin, "collective.issued"),
    (lab.check_attribute, lambda trace, one: trace.enclosing(one.begin, "FSDP::all_gather")[-1],
     "collective.issued"),
    (lab.check_attribute, Attribute.first_half_is_forward, "The label around the call is"),
    (lab.check_fetched_late, Late.by_its_begin, "collective.issued"),
    (lab.check_no_prefetch, not_a_list, "takes a list"),
    (lab.check_no_prefetch, names_of_units, "the units themselves"),
    (lab.check_diagnose, by_seconds(twice_the_healthy, 3), "compare it with its own step")])
def test_the_hint_leads_on(check, answer, hint):
    verdict = check(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

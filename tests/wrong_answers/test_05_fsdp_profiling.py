"""What the checks of notebook 05 must reject, with the words that must say why; and what they must
accept."""

import re
import sys
from itertools import islice

import cloudpickle
import numpy as np
import pytest
import torch
from _build.definitions import definitions

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
    (lambda trace: None, "returned None, not a share for each"),
    (lambda trace: 0.5, "returned 0.5, not a share for each"),
    (lambda trace: {"all_gather": 0.3}, "not a share for each of all_gather and reduce_scatter"),
    (each(lambda trace, spans: 0.123), "all_gather: the share: you say 0.123, it is "),
    (each(lambda trace, spans: sum(one.seconds for one in spans) / trace.seconds),
     "all_gather: the share: .*that counts a moment twice"),
    (each(lambda trace, spans: united(spans)), "the share: .*that is in seconds"),
    (each(lambda trace, spans: 100 * united(spans) / trace.seconds),
     "the share: .*that is in percent"),
    (each(lambda trace, spans: len(spans) / len(trace.collectives)), "counts calls, not seconds"),
    (each(lambda trace, spans: united(map(from_call, spans)) / trace.seconds),
     "'called long before it begins', all_gather: the share: .*that counts from the call"),
    (each(lambda trace, spans: united(spans) / trace.seconds * len(trace.steps)),
     "steps', all_gather: the share: .*that divides by one step's seconds"),
    (each(lambda trace, spans: united(trace.collectives) / trace.seconds),
     "the share: .*that counts other collectives too"),
    (each(lambda trace, spans: united([*spans, *trace.of("all_reduce")]) / trace.seconds),
     "'an all-reduce among them', all_gather: the share"),
    (each(lambda trace, spans: less_what_neighbours_share(spans) / trace.seconds),
     "takes away only what two neighbours share"),
    (each(lambda trace, spans: extended(spans, keep_longer=False) / trace.seconds),
     "'two all-gathers at once', reduce_scatter: the share"),
    (each(lambda trace, spans: extended(spans, order="issued") / trace.seconds),
     "'begun in another order than issued', all_gather: .*in the order in which they were issued"),
    (each(lambda trace, spans: (max(one.end for one in spans) - min(one.begin for one in spans))
          / trace.seconds), "from the first begin to the last end"),
    (each(lambda trace, spans: united(spans) / trace.ends),
     "'a pause between two steps', all_gather: .*since the recording began"),
    (each(lambda trace, spans: united(spans) / trace.steps[0].seconds), "by one step's seconds"),
    (each(lambda trace, spans: sum(one.seconds for one in spans if one.seconds) / sum(
        one.seconds for one in trace.collectives)), "the share: you say"),
    (lambda trace: [0.1, 0.2], "not a share for each"),
    (lambda trace: dict.fromkeys(KINDS, "0.2"), "it returned a str, not a number")]


# 5.2 exposed_share


def waiting(trace, *kinds):
    spans = trace.of(*kinds) if kinds else trace.collectives
    return lab.total_seconds(lab.subtract(lab.union(spans), trace.compute))


WRONG[lab.check_exposed_share] = [
    (lambda trace: None, "the exposed share: it returned nothing .None., not a number"),
    (lambda trace: 0.0, "the exposed share: you say 0, it is 0.4$"),
    (lambda trace: united(trace.collectives) / trace.seconds, "is all communication, hidden or"),
    (lambda trace: trace.seconds_of()["overlapped"] / trace.seconds, "is the part that is hidden"),
    (lambda trace: waiting(trace), "the exposed share: .*that is in seconds"),
    (lambda trace: waiting(trace) / united(trace.collectives), "a share of the communication"),
    (lambda trace: waiting(trace, *KINDS) / trace.seconds, "leaves out the all-reduce"),
    (lambda trace: 1 - computing(trace) / trace.seconds, "all the time without computing"),
    (lambda trace: max(0, united(trace.collectives) - computing(trace)) / trace.seconds,
     "subtracts seconds from seconds"),
    (lambda trace: lab.total_seconds(lab.subtract(trace.compute, lab.union(trace.collectives)))
     / trace.seconds, "is the computing without communication"),
    (lambda trace: sum(lab.total_seconds(lab.subtract([(one.begin, one.end)], trace.compute))
                       for one in trace.collectives) / trace.seconds, "the exposed share: you say"),
    (lambda trace: sum(waiting(trace, kind) for kind in (*KINDS, "all_reduce")) / trace.seconds,
     "the exposed share: you say"),
    (lambda trace: lab.total_seconds(lab.subtract(lab.union(trace.collectives), trace.compute[:1]))
     / trace.seconds, "the exposed share: you say"),
    (lambda trace: lab.total_seconds(lab.subtract(lab.union(trace.collectives), [
        (trace.compute[0][0], trace.compute[-1][1])])) / trace.seconds, "the share|exposed share"),
    (lambda trace: waiting(trace) / trace.ends, "'a pause between two steps': the exposed share"),
    (lambda trace: lab.total_seconds(lab.subtract(lab.union(map(from_call, trace.collectives)),
                                                  trace.compute)) / trace.seconds,
     "the exposed share: you say"),
    (lambda trace: waiting(trace) / computing(trace), "the exposed share: you say"),
    (lambda trace: 1 - waiting(trace) / trace.seconds, "the exposed share: you say")]


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
    (Attribute.one_step_only, "issued in .*, not in '"),
    (Attribute.first_time_is_forward, "'synthetic, two steps in which .*: issued in forward, not"),
    (Attribute.every_second_is_backward,
     "'synthetic, two steps in which .*: issued in forward, not in"),
    (Attribute.first_name_that_fits, "'synthetic, eleven layers', .* is for layers.10, not for"),
    (Attribute.the_phases_label, "issued in forward, not in 'labs::forward'"),
    (Attribute.the_other_way_round, "not in 'root'"),
    (Attribute.a_string, "returned 'root forward', not .unit, phase."),
    (Attribute.last_part_only, "it is for layer.0, not for '0'"),
    (Attribute.nothing, "attribute returned None, not"),
    (Attribute.only_the_unit, r"not \(unit, phase\)"),
    (Attribute.everything_roots, "it is for layer.0, not for 'root'"),
    (Attribute.by_its_begin, "all-gather 1: it is for layer.0, not for 'root'"),
    (Attribute.phase_by_the_end, "issued in forward, not in 'backward'"),
    (Attribute.the_asking_unit, "it is for layer.2; root is the unit that prefetched it"),
    (Attribute.with_brackets, r"it is for layer.0, not for '\(layer.0\)'"),
    (Attribute.root_has_no_name, "it is for the root, and attribute says ''"),
    (Attribute.first_half_is_forward, "issued in backward, not in 'forward'"),
    (Attribute.in_the_order_of_the_calls, "it is for the root, and attribute says 'layer.2'")]


# 5.4 call_site


def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]


WRONG[lab.check_call_site] = [
    (lambda one: None, "call_site returned None, which is not on the stack"),
    (lambda one: one.stack[-1], "'<built-in method allreduce of ProcessGroup>' is a library's"),
    (lambda one: one.stack[0], "'<string>.*' is a library's"),
    (lambda one: own(one.stack)[0], "'train.py.10.: step' is an outer caller"),
    (lambda one: own(one.stack)[-1].split("(")[0], "'train.py', which is not on the stack"),
    (lambda one: [f for f in one.stack if "built-in" not in f and "torch/distributed" not in f][-1],
     "'labs/workers/calls.py.64.: call' is a library's"),
    (lambda one: [f for f in one.stack if f.startswith("train")][-1], "is an outer caller"),
    (lambda one: own(one.stack)[-2:], "which is not on the stack"),
    (lambda one: one.stack.index(own(one.stack)[-1]), "which is not on the stack"),
    (lambda one: own(one.stack)[-1].split(": ")[-1], "which is not on the stack"),
    (lambda one: [f for f in one.stack if "torch/" not in f][-1], "is a library's"),
    (lambda one: one.stack[2], "is an outer caller|is a library's|it is ")]


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
    (Late.sorted_by_name, "'synthetic, eleven layers': "),
    (Late.not_gathered_is_late, "'synthetic, layer.1 is not freed after forward': "
                                "layer.1 was issued in time|layer.1"),
    (Late.by_its_end, "'synthetic, .*: "), (Late.the_unit_before, "'synthetic, without': "),
    (Late.exposed_ones, "'synthetic, without': "),
    (Late.after_all_of_them, "'synthetic, without': layer.1, layer.0 came late"),
    (Late.in_time, "'synthetic, with prefetch': "), (Late.numbers, "returned .0, 1., not a list"),
    (Late.joined, "returned '.*', not a list"),
    (Late.nothing, "'synthetic, without': layer.1, layer.0 came late"),
    (Late.a_bool, "fetched_late returned False, not a list"),
    (Late.everything, "layer.2 has no unit before it in backward"),
    (Late.by_its_begin, "says when an all-gather began to be in flight, not when it was issued"),
    (Late.against_its_own_gradients, "'synthetic, without': layer.1, layer.0 came late"),
    (Late.any_phase, "'synthetic, without': layer.1, layer.0 came late"),
    (Late.only_the_first_late_one, "'synthetic, without': layer.0 came late"),
    (Late.by_the_label_prefetch, "'synthetic, without': layer.2 has no unit before it")]


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
        (Off, "is still issued ahead"), (Counted, "is still issued ahead"),
        (Again, "transformer.h.. is gathered twice in backward"))
      for name, answer in vars(answers).items() if not name.startswith("_")),
    (and_forward, "2 blocks: forward gathers its units in another order"),
    (not_a_list, "is not iterable"), (names_of_units, "Expects FSDPModule")]


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


_BEHIND = "in forward, the all-gather of .* is issued only when .* is done"
_TOO_FAR = "in forward, the all-gather of .* is issued before .* is done: . blocks ahead"
WRONG[lab.check_forward_prefetch] = [
    (lambda blocks: None, r"\(blocks, ahead\) cannot be called"),
    (Ahead.nothing, _BEHIND), (Ahead.in_backward, "is gathered twice in backward"),
    (Ahead.the_one_before, "is gathered twice in forward"),
    (Ahead.itself, _BEHIND), (Ahead.only_the_first, f"5 blocks, ahead=1: {_BEHIND}"),
    (Ahead.one_only, f"5 blocks, ahead=2: {_BEHIND}"),
    (Ahead.the_one_at_that_distance, f". blocks, ahead=2: {_BEHIND}"),
    (Ahead.all_that_follow, f"5 blocks, ahead=1: {_TOO_FAR}"),
    (Ahead.two_always, f"5 blocks, ahead=1: {_TOO_FAR}"),
    (Ahead.one_too_many, f"5 blocks, ahead=1: {_TOO_FAR}"),
    (Ahead.all_of_them, "transformer.h.. is gathered twice in forward|blocks ahead"),
    (Ahead.round_the_end, "is gathered twice in forward|5 blocks, ahead"),
    (Ahead.three_blocks, f"5 blocks, ahead=1: {_BEHIND}"),
    (Ahead.backward_off_too, "in backward, .* is late now"),
    (Ahead.backward_further_too, "5 blocks, .*in backward, the units are gathered in another")]


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
    (lambda run, healthy: ("nothing", None), "was taken for one with nothing wrong"),
    (lambda run, healthy: ("slow rank", max(range(len(run)), key=lambda r: computing(run[r]))),
     "was taken for one with a slow rank"),
    # the runs come in a random order: the first may be the one whose slow rank is 0
    (lambda run, healthy: ("slow rank", 1),
     "was taken for one with a slow rank|a slow rank was named, but 1 is no evidence"),
    (lambda run, healthy: right.diagnose(run, healthy)[0], r"not \(cause, evidence\)"),
    (called("slow rank", "straggler"), "'straggler' is none of the causes"),
    (called("item", "nothing"), "a run with an .item.. was taken for one with nothing wrong"),
    (called("nothing", "no prefetch"), "nothing wrong was taken for one with prefetch off"),
    (any_own_item, "a run with nothing wrong was taken for one with an .item"),
    (all_collectives,
     "was taken for one with tiny units|tiny units was named, but .* is no evidence"),
    (lambda run, healthy: (right.diagnose(run, healthy)[0], None), "but None is no evidence of it"),
    (with_evidence("item", lambda run: right.own_item_calls(run[0])[0]),
     "an .item.. was named, but .* is no evidence"),
    (with_evidence("item", lambda run: run[0].item_calls[-1]), "but .* is no evidence of it"),
    (with_evidence("one huge unit", lambda run: run[0].of("reduce_scatter")[0].begin),
     "one huge unit was named, but .* is no evidence"),
    (with_evidence("no prefetch", lambda run: "root"), "prefetch off was named, but 'root'"),
    (with_evidence("tiny units", lambda run: 9), "tiny units was named, but 9 is no evidence"),
    (by_communication, "a slow rank was named, but .* is no evidence"),
    (with_evidence("slow rank", lambda run: 0), "a slow rank was named, but 0 is no evidence"),
    (with_evidence("slow rank", lambda run: len(run) - 1), "a slow rank was named, but . is no"),
    (by_seconds(of_the_step(0.3), 1.7), "nothing wrong.* was taken for one with a slow rank"),
    (by_seconds(of_the_step(0.3), 6), "a slow rank.* was taken for one with nothing wrong"),
    (by_seconds(of_the_step(0.08), 3), "was taken for one with a slow data loader"),
    (by_seconds(of_the_step(0.6), 3), "a slow data loader.* for one with nothing"),
    (by_seconds(twice_the_healthy, 3), "was taken for one with a slow data loader"),
    (with_evidence("slow data loader", lambda run: run[0].labels[0]),
     "a slow data loader was named, but .* is no evidence")]


# 5.9 collective_seconds

def ring(nbytes, ranks, bandwidth):
    return (ranks - 1) / ranks * nbytes / bandwidth


WRONG[lab.check_collective_seconds] = [
    (lambda n, r, b, a: None, "the time: it returned nothing .None., not a number"),
    (lambda nbytes, ranks, bandwidth: ring(nbytes, ranks, bandwidth), "cannot be called"),
    (lambda n, r, b, a: 0.0, "the time: you say 0 s, it is 0.0213"),
    (lambda n, r, b, a: ring(n, r, b), "that leaves out the latency"),
    (lambda n, r, b, a: ring(n, r, b) + (r - 1) * a, "the latency for each of the N-1 pieces"),
    (lambda n, r, b, a: ring(n, r, b) - a, "takes the latency away"),
    (lambda n, r, b, a: n / b + a, "as if a rank received its own piece too"),
    (lambda n, r, b, a: n / b, "received its own piece too, and without the latency"),
    (lambda n, r, b, a: a + 2 * ring(n, r, b), "of an all-reduce"),
    (lambda n, r, b, a: a + (r - 1) * n / b, "nbytes were one rank's piece"),
    (lambda n, r, b, a: a + n / r / b, "that of one piece"),
    (lambda n, r, b, a: a + 8 * ring(n, r, b), "8 times too long"),
    (lambda n, r, b, a: 1e3 * (a + ring(n, r, b)), "in milliseconds"),
    (lambda n, r, b, a: max(a, ring(n, r, b)), "you say 0.0213"),
    (lambda n, r, b, a: a * ring(n, r, b), "the time: you say"),
    (lambda n, r, b, a: a + (r - 1) / r * n * b, "the time: you say")]


@pytest.mark.parametrize("check, answer, sentence", [
    (check, answer, sentence) for check, cases in WRONG.items() for answer, sentence in cases])
def test_wrong(check, answer, sentence):
    verdict = check(answer)
    assert verdict.passed is False, verdict
    assert re.search(sentence, verdict.sentence), verdict


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

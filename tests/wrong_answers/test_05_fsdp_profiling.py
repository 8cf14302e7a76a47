"""What the checks of notebook 05 must reject, with the words that must say why; and what they must
accept."""

import re
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from _build.definitions import definitions

import labs.fsdp_profiling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")

right = definitions("05_fsdp_profiling")
KINDS = ("all_gather", "reduce_scatter")
WRONG = {}


# 5.1 communication_share


def each(seconds):
    return lambda trace: {kind: seconds(trace, trace.of(kind)) for kind in KINDS}


def united(spans):
    return lab.total_seconds(lab.union(spans))


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
     "'two steps', all_gather: the share: .*that divides by one step's seconds"),
    (each(lambda trace, spans: united(trace.collectives) / trace.seconds),
     "the share: .*that counts other collectives too"),
    (each(lambda trace, spans: united([*spans, *trace.of("all_reduce")]) / trace.seconds),
     "'an all-reduce among them', all_gather: the share")]


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
     / trace.seconds, "is the computing without communication")]


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


WRONG[lab.check_attribute] = [
    (Attribute.nothing, "attribute returned None, not"),
    (Attribute.only_the_unit, r"not \(unit, phase\)"),
    (Attribute.everything_roots, "it is for layer.0, not for 'root'"),
    (Attribute.by_its_begin, "all-gather 1: it is for layer.0, not for 'root'"),
    (Attribute.phase_by_the_end, "issued in forward, not in backward"),
    (Attribute.the_asking_unit, "it is for layer.2; root is the unit that prefetched it"),
    (Attribute.with_brackets, r"it is for layer.0, not for '\(layer.0\)'"),
    (Attribute.root_has_no_name, "it is for the root, and attribute says ''"),
    (Attribute.first_half_is_forward, "issued in backward, not in forward"),
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
    (lambda one: [f for f in one.stack if f.startswith("train")][-1], "is an outer caller")]


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


WRONG[lab.check_fetched_late] = [
    (Late.nothing, "'synthetic, without': layer.1, layer.0 came late"),
    (Late.a_bool, "fetched_late returned False, not a list"),
    (Late.everything, "layer.2 has no unit before it in backward"),
    (Late.by_its_begin, "'synthetic, slow link': layer.1, layer.0 was issued in time|"
                         "'synthetic, .*' was issued in time"),
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


class Again:
    """Late, but what backward is done with is gathered once more, for nothing."""

    def the_last(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch([blocks[-1]])

    def the_following(blocks):
        for block, following in zip(blocks, [*blocks[1:], blocks[-1]], strict=True):
            block.set_modules_to_backward_prefetch([following])


WRONG[lab.check_no_prefetch] = [
    (answer, sentence) for answers, sentence in (
        (Off, "is still issued ahead"), (Again, "transformer.h.2 is gathered twice in backward"))
    for name, answer in vars(answers).items() if not name.startswith("_")]


class Ahead:
    def nothing(blocks):
        pass

    def in_backward(blocks):
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_backward_prefetch([following])

    def the_one_before(blocks):
        for block, before in zip(blocks[1:], blocks, strict=False):
            block.set_modules_to_forward_prefetch([before])

    def only_the_first(blocks):
        blocks[0].set_modules_to_forward_prefetch([blocks[1]])

    def itself(blocks):
        for block in blocks:
            block.set_modules_to_forward_prefetch([block])

    def all_of_them(blocks):
        for block in blocks:
            block.set_modules_to_forward_prefetch(blocks)

    def backward_off_too(blocks):
        right.forward_prefetch(blocks)
        right.no_prefetch(blocks)


_BEHIND = "in forward, the all-gather of .* is issued only when the unit before it is done"
WRONG[lab.check_forward_prefetch] = [
    (Ahead.nothing, _BEHIND), (Ahead.in_backward, _BEHIND), (Ahead.the_one_before, _BEHIND),
    (Ahead.only_the_first, "the all-gather of transformer.h.2 is issued only when"),
    (Ahead.itself, _BEHIND), (Ahead.all_of_them, "transformer.h.0 is gathered twice in forward"),
    (Ahead.backward_off_too, "in backward, .* is late now")]


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

WRONG[lab.check_collective_seconds] = [
    (lambda nbytes, ranks, bandwidth: None, "the time: it returned nothing .None., not a number"),
    (lambda nbytes, ranks, bandwidth: 0.0, "the time: you say 0 s, it is 0.0213"),
    (lambda nbytes, ranks, bandwidth: nbytes / bandwidth,
     "as if a rank received its own piece too"),
    (lambda nbytes, ranks, bandwidth: 2 * (ranks - 1) / ranks * nbytes / bandwidth,
     "of an all-reduce"),
    (lambda nbytes, ranks, bandwidth: (ranks - 1) * nbytes / bandwidth,
     "nbytes were one rank's piece"),
    (lambda nbytes, ranks, bandwidth: nbytes / ranks / bandwidth, "that of one piece"),
    (lambda nbytes, ranks, bandwidth: 8 * (ranks - 1) / ranks * nbytes / bandwidth,
     "8 times too long")]


@pytest.mark.parametrize("check, answer, sentence", [
    (check, answer, sentence) for check, cases in WRONG.items() for answer, sentence in cases])
def test_wrong(check, answer, sentence):
    verdict = check(answer)
    assert verdict.passed is False, verdict
    assert re.search(sentence, verdict.sentence), verdict


def test_every_check_has_five_wrong_answers():
    assert set(WRONG) == {getattr(lab, name) for name in lab.__all__ if name.startswith("check_")}
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

    def off_but_for_the_first(blocks):
        for block in blocks[1:]:  # nobody is left whom the first could fetch
            block.set_modules_to_backward_prefetch([block, block])

    def two_ahead(blocks):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1:number + 3])

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
    (lab.check_exposed_share, right.exposed_share),
    (lab.check_exposed_share, Right.exposed_by_moments),
    (lab.check_attribute, right.attribute), (lab.check_attribute, Right.attribute_by_a_loop),
    (lab.check_call_site, right.call_site), (lab.check_call_site, Right.site_by_a_list),
    (lab.check_fetched_late, right.fetched_late), (lab.check_fetched_late, Right.late_as_a_set),
    (lab.check_no_prefetch, right.no_prefetch),
    (lab.check_no_prefetch, Right.off_but_for_the_first),
    (lab.check_forward_prefetch, right.forward_prefetch),
    (lab.check_forward_prefetch, Right.two_ahead),
    (lab.check_diagnose, right.diagnose),
    (lab.check_diagnose, Right.evidence_of_the_last_rank),
    (lab.check_diagnose, by_seconds(of_the_step(0.12), 2.1)),
    (lab.check_diagnose, by_seconds(of_the_step(0.48), 4.8)),
    (lab.check_collective_seconds, right.collective_seconds),
    (lab.check_collective_seconds,
     lambda nbytes, ranks, bandwidth: (nbytes - nbytes / ranks) / bandwidth),
    (lab.check_collective_seconds,
     lambda *job: torch.tensor(right.collective_seconds(*job))),
    (lab.check_exposed_share, lambda trace: np.float64(right.exposed_share(trace)))])
def test_right(check, answer):
    verdict = check(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("check, answer, hint", [
    (lab.check_communication_share, each(lambda trace, spans: lab.total_seconds(spans)),
     "lab.union make"),
    (lab.check_communication_share,
     each(lambda trace, spans: united([(one.begin, one.end) for one in spans])),
     "takes the spans themselves"),
    (lab.check_exposed_share, lambda trace: lab.subtract(trace.collectives, trace.compute),
     "lab.union makes"),
    (lab.check_attribute, Attribute.by_its_begin, "collective.issued"),
    (lab.check_attribute, lambda trace, one: trace.enclosing(one.begin, "FSDP::all_gather")[-1],
     "collective.issued"),
    (lab.check_diagnose, by_seconds(twice_the_healthy, 3), "compare it with its own step")])
def test_the_hint_leads_on(check, answer, hint):
    verdict = check(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict

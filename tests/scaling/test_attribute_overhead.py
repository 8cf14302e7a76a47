"""What the check of exercise 6.4 must reject, and what it must accept."""

from collections import defaultdict
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected

import labs.scaling as lab
from labs.meters import lost_time
from labs.meters.trace import Span, subtract, total_seconds, union

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")
LOADER = "enumerate(DataLoader)"


# ---- 6.4: the parts of a rank's step


def last_begins(run):
    return [max(one.begin for one in same)
            for same in zip(*(t.collectives for t in run), strict=True)]


def with_spans(trace, begins):
    return union((max(one.begin, begin), one.end)
                 for one, begin in zip(trace.collectives, begins, strict=True))


def parts_with(begins=last_begins, busy=True, merged=True, priority="moving", loader=LOADER,
               hidden=True, per_step=True, rest=None, unit=1.0):
    """A division with something else in the place of one part. busy: what hides communication;
    rest: seconds of computing, of the trace and the other parts."""
    def parts_of_step(run, rank):
        trace = run[rank]
        compute, loading = list(trace.compute), union(trace.labelled(loader))
        taken = {True: union([*loading, *compute]), False: [], "compute": compute}[busy]
        moments, in_flight = begins(run), union(trace.collectives)
        moving = with_spans(trace, moments)
        if merged:
            waiting = subtract(in_flight, moving)
            if priority == "waiting":
                waiting = union((one.begin, last) for one, last in
                                zip(trace.collectives, moments, strict=True) if one.begin < last)
                moving = subtract(moving, waiting)
            seconds = {"communication": total_seconds(subtract(moving, taken)),
                       "waiting": total_seconds(subtract(waiting, taken))}
        else:
            seconds = {"communication": sum(
                total_seconds(subtract([(max(last, one.begin), one.end)], taken))
                for one, last in zip(trace.collectives, moments, strict=True)),
                "waiting": sum(total_seconds(subtract([(one.begin, last)], taken))
                               for one, last in zip(trace.collectives, moments, strict=True))}
        seconds["data loading"] = total_seconds(subtract(loading, compute if hidden else []))
        seconds["computing"] = (rest or (lambda t, s: t.seconds - sum(s.values())))(trace, seconds)
        steps = len(trace.steps) if per_step else 1
        return {part: unit * each / steps for part, each in seconds.items()}

    return parts_of_step


def of_begins(which, moment="begin"):
    return lambda run: [which(getattr(one, moment) for one in same)
                        for same in zip(*(t.collectives for t in run), strict=True)]


def all_is_communication(run, rank):
    """What is in flight is exposed, hidden or not; and nobody waits."""
    trace = run[rank]
    seconds = {"communication": total_seconds(union(trace.collectives)), "waiting": 0.0,
               "data loading": total_seconds(union(trace.labelled(LOADER)))}
    return {**seconds, "computing": trace.seconds - sum(seconds.values())}


def as_in_notebook_05(run, rank):
    """Exposed communication, waiting included."""
    trace = run[rank]
    loading = total_seconds(union(trace.labelled(LOADER)))
    return {"communication": trace.exposed_seconds, "waiting": 0.0, "data loading": loading,
            "computing": trace.seconds - trace.exposed_seconds - loading}


def rank_0s(run, rank):
    return lost_time.parts_of_step(run, 0)


def durations(run, rank):
    """Sums of durations less the seconds of computing."""
    trace = run[rank]
    flying = sum(one.seconds for one in trace.collectives)
    moving = sum(one.end - last for one, last in
                 zip(trace.collectives, last_begins(run), strict=True))
    return {"communication": moving, "waiting": flying - moving, "data loading": 0.0,
            "computing": trace.seconds - flying}


def loading_is_in_flight_too(run, rank):
    """Loading counts only where no collective is in flight."""
    found = dict(lost_time.parts_of_step(run, rank))
    trace = run[rank]
    loading = subtract(union(trace.labelled(LOADER)), list(trace.compute))
    found["data loading"] = total_seconds(subtract(loading, union(trace.collectives)))
    return found


def first_label(run, rank):
    """The longest label of any name."""
    found = dict(lost_time.parts_of_step(run, rank))
    found["data loading"] = sum(label.seconds for label in run[rank].labels
                                if "step" not in label.name and "enumerate" not in label.name)
    return found


def divide(parts_of_step=lost_time.parts_of_step, choose=None, finish=lambda value: value):
    def attribute_overhead(run, alone):
        parts = [parts_of_step(run, rank) for rank in range(len(run))]
        found = (choose or waits_most)(parts)
        single = parts_of_step(alone, 0)
        return {part: finish(found[part] - single[part]) for part in single}

    return attribute_overhead


def waits_most(parts):
    return max(parts, key=lambda part: part["waiting"])


def by_part(which):
    return lambda parts: {part: which(one[part] for one in parts) for part in parts[0]}


def divide_by_rank(choose):
    """Of the rank that choose(run) says."""
    def attribute_overhead(run, alone):
        of_run, of_alone = (lost_time.parts_of_step(each, number) for each, number in
                            ((run, choose(run)), (alone, 0)))
        return {part: of_run[part] - of_alone[part] for part in of_alone}

    return attribute_overhead


def waits_of(run, rank):
    """Of each collective, computing or not."""
    return [last - one.begin for one, last in
            zip(run[rank].collectives, last_begins(run), strict=True)]


def rank_with_most(key):
    return divide_by_rank(lambda run: max(range(len(run)), key=lambda rank: key(run, rank)))


def same_rank_of_alone(run, alone):
    chosen = max(range(len(run)), key=lambda rank: lost_time.parts_of_step(run, rank)["waiting"])
    return {part: seconds - lost_time.parts_of_step(alone, chosen)[part]
            for part, seconds in lost_time.parts_of_step(run, chosen).items()}


def forgets_alone(run, alone):
    return waits_most([lost_time.parts_of_step(run, rank) for rank in range(len(run))])


def upside_down(run, alone):
    return {part: -lost for part, lost in lost_time.lost_seconds(run, alone).items()}


def remainder(run, alone):
    """Slower computing is what is left, but at least 0, of other parts that may be below 0."""
    lost = dict(lost_time.lost_seconds(run, alone))
    whole = sum(lost.values())
    rest = {part: max(0.0, lost[part]) for part in lost if part != "computing"}
    return {**rest, "computing": max(0.0, whole - sum(rest.values()))}


def five_parts(run, rank):
    return {**lost_time.parts_of_step(run, rank), "idle": 0.0}


def three_parts(run, rank):
    found = lost_time.parts_of_step(run, rank)
    return {part: found[part] for part in found if part != "waiting"}


RIGHT = lost_time.parts_of_step
WRONG_DIVISION = {
    "nothing": (lambda run, rank: None, divide(), "not_a_dictionary nothing"),
    "zeros": (lambda run, rank: dict.fromkeys(lost_time.PARTS, 0.0), divide(),
              "wrong_number"),
    "a number": (lambda run, rank: run[rank].seconds, divide(), "not_a_dictionary float"),
    "three parts": (three_parts, divide(), "wrong_keys without"),
    "five parts": (five_parts, divide(), "wrong_keys addition"),
    "all is communication": (all_is_communication, divide(),
                             "counts_waiting_for_last_rank"),
    "as in notebook 05": (as_in_notebook_05, divide(),
                          "counts_waiting_for_last_rank"),
    "durations": (durations, divide(), "wrong_number"),
    "nothing hides": (parts_with(busy=False), divide(),
                      "counts_computing_loading_hides 'hidden"),
    "loading hides nothing": (parts_with(busy="compute"), divide(),
        "counts_computing_loading_hides"),
    "each collective alone": (parts_with(merged=False), divide(),
                              "overlaps_counted_twice"),
    "waiting first": (parts_with(priority="waiting"), divide(),
                      "leaves_out_moves_while_another"),
    "the first rank's begin": (parts_with(of_begins(min)), divide(),
                               "counts_waiting_for_last_rank"),
    "the mean begin": (parts_with(of_begins(fmean)), divide(), "begins_ranks_mean"),
    "the last call": (parts_with(of_begins(max, "issued")), divide(),
                      "begins_when_last_rank_called"),
    "the end of rank 0": (parts_with(lambda run: [one.end for one in run[0].collectives]),
                          divide(), "wrong_number"),
    "only rank 0": (rank_0s, divide(), "wrong_number waiting"),
    "any label": (parts_with(loader=""), divide(), "wrong_number"),
    "another label": (first_label, divide(), "takes_other_labels"),
    "loading under computing": (parts_with(hidden=False), divide(), "counts_computing_hides"),
    "loading after collectives": (loading_is_in_flight_too, divide(),
                                  "leaves_out_loading_while"),
    "no pauses": (parts_with(rest=lambda trace, s: total_seconds(trace.compute)), divide(),
                  "leaves_out_pauses_between"),
    "loading twice": (parts_with(rest=lambda trace, s: trace.seconds - s["waiting"]
                                 - s["communication"]), divide(), "counts_data_loading_again"),
    "the whole step": (parts_with(rest=lambda trace, s: trace.seconds), divide(),
                       "step"),
    "all steps together": (parts_with(per_step=False), divide(), "all_recorded_steps_together"),
    "milliseconds": (parts_with(unit=1e3), divide(), "in_milliseconds"),
    "pause of two steps": (parts_with(rest=lambda trace, s: trace.ends - sum(s.values())),
                           divide(), "counts_pause_between_two_steps"),
    "rank 0's loss": (RIGHT, divide(choose=lambda parts: parts[0]), "wrong_rank"),
    "last rank's loss": (RIGHT, divide(choose=lambda parts: parts[-1]),
                         "wrong_rank"),
    "the slow rank's loss": (RIGHT, divide(choose=lambda parts: min(
        parts, key=lambda part: part["waiting"])), "wrong_rank"),
    "mean of the ranks": (RIGHT, divide(choose=by_part(lambda values: fmean(values))),
                          "mean_ranks"),
    "sum of the ranks": (RIGHT, divide(choose=by_part(sum)), "sum_ranks"),
    "largest parts": (RIGHT, divide(choose=by_part(max)), "takes_largest_part"),
    "the rank that begins first": (
        RIGHT, rank_with_most(lambda run, rank: -run[rank].collectives[0].begin),
        "wrong_rank"),
    "the rank whose last collective begins first": (
        RIGHT, rank_with_most(lambda run, rank: -run[rank].collectives[-1].begin),
        "wrong_rank"),
    "the longest waits, hidden or not": (
        RIGHT, rank_with_most(lambda run, rank: sum(waits_of(run, rank))),
        "wrong_rank"),
    "the longest single wait": (
        RIGHT, rank_with_most(lambda run, rank: max(waits_of(run, rank))), "wrong_rank"),
    "the longest in flight": (RIGHT, rank_with_most(
        lambda run, rank: total_seconds(union(run[rank].collectives))), "wrong_rank"),
    "most communication": (RIGHT, rank_with_most(
        lambda run, rank: lost_time.parts_of_step(run, rank)["communication"]), "wrong_rank"),
    "least computing": (RIGHT, rank_with_most(
        lambda run, rank: -total_seconds(run[rank].compute)), "wrong_rank"),
    "the same rank of alone": (RIGHT, same_rank_of_alone, "raised_IndexError trace"),
    "without alone": (RIGHT, forgets_alone, "step_itself"),
    "upside_down": (RIGHT, upside_down, "upside_down"),
    "gains hidden": (RIGHT, divide(finish=lambda value: max(0.0, value)),
                     "hides_something_gained"),
    "gains as losses": (RIGHT, divide(finish=abs), "gain_for_loss"),
    "remainder": (RIGHT, remainder, "hides_something_gained")}


@pytest.mark.parametrize("name", WRONG_DIVISION)
def test_a_wrong_division_is_rejected_in_words(name):
    *answer, words = WRONG_DIVISION[name]
    assert_rejected(lab.check_attribute_overhead(*answer), words)


# right, and written in another way


def on_a_line(run, rank):
    """Walks through all begins and ends in order, and asks each piece what it is."""
    trace, last = run[rank], last_begins(run)
    loading = trace.labelled(LOADER)
    edges = {moment for begin, end in trace.compute for moment in (begin, end)}
    edges |= {moment for span in (*loading, *trace.collectives, *trace.steps)
              for moment in (span.begin, span.end)} | set(last)
    seconds, edges = defaultdict(float), sorted(edges)
    for begin, end in pairwise(edges):
        middle = (begin + end) / 2
        flying = [moment for one, moment in zip(trace.collectives, last, strict=True)
                  if one.begin < middle < one.end]
        if not any(step.begin < middle < step.end for step in trace.steps):
            continue
        if any(a < middle < b for a, b in trace.compute):
            part = "computing"
        elif any(span.begin < middle < span.end for span in loading):
            part = "data loading"
        elif flying:
            part = "communication" if min(flying) < middle else "waiting"
        else:
            part = "computing"
        seconds[part] += end - begin
    return {part: torch.tensor(seconds[part] / len(trace.steps), dtype=torch.float64)
            for part in lost_time.PARTS}


def layer_by_layer(run, rank):
    """Takes from what is left of the step, in the order of the list."""
    trace = run[rank]
    begins = np.array([[one.begin for one in each.collectives] for each in run])
    last = begins.max(axis=0) if begins.size else []
    left = [(step.begin, step.end) for step in trace.steps]
    whole, seconds = total_seconds(left), {}
    left = subtract(left, trace.compute)
    layers = {"data loading": trace.labelled(LOADER),
              "communication": [Span("", "", float(begin), one.end) for begin, one in
                                zip(last, trace.collectives, strict=True)],
              "waiting": trace.collectives}
    for part, spans in layers.items():
        rest = subtract(left, union(spans))
        seconds[part] = total_seconds(left) - total_seconds(rest)
        left = rest
    return {**{part: np.float64(each) / len(trace.steps) for part, each in seconds.items()},
            "computing": (whole - sum(seconds.values())) / len(trace.steps)}


def sorted_by_waiting(run, alone):
    ranks = sorted(range(len(run)), key=lambda rank: layer_by_layer(run, rank)["waiting"])
    chosen, single = layer_by_layer(run, ranks[-1]), layer_by_layer(alone, 0)
    lost = {part: chosen[part] - single[part] for part in ("communication", "waiting",
                                                           "data loading")}
    seconds = [sum(one.values()) for one in (chosen, single)]
    return {**lost, "computing": seconds[0] - seconds[1] - sum(lost.values())}


@pytest.mark.parametrize("answer", [
    (right.parts_of_step, right.attribute_overhead),
    (lost_time.parts_of_step, lost_time.lost_seconds), (on_a_line, divide(on_a_line)),
    (layer_by_layer, sorted_by_waiting), (parts_with(), divide(parts_with()))],
    ids=["as worked", "the lab's", "on a line", "layer by layer", "with its parts"])
def test_a_right_division_passes(answer):
    verdict = lab.check_attribute_overhead(*answer)
    assert verdict.passed is True, str(verdict)


def test_unfilled_exercises_wait():
    def four(run, rank):
        raise NotImplementedError("Exercise 6.4")

    def second(run, alone):
        raise NotImplementedError("Exercise 6.4")

    assert lab.check_attribute_overhead(four, second).passed is None
    assert lab.check_attribute_overhead(lost_time.parts_of_step, second).passed is None

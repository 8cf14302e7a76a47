"""Exercise 5.10: what its check must reject, with the words that must say why; and what it must
accept."""

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected

import labs.fsdp_profiling as lab
from labs.fsdp_profiling import synthetic_files
from labs.fsdp_profiling.exposed_seconds import exposed_in_step
from labs.fsdp_profiling.shared_recording import recorded
from labs.meters import trace_file

pytestmark = pytest.mark.usefixtures("warm_launcher")

right = definitions("05_fsdp_profiling")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def complete(path):
    with (gzip.open if path.endswith("gz") else open)(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def is_step(event):
    return event["name"] == "labs::step" and event["cat"] == "user_annotation"


def in_flight(event):
    return event["name"].startswith("link:") or (event["cat"] == "kernel"
                                                 and event["name"].startswith("nccl"))


def gloo_threads(events):
    return {event["tid"] for event in events if event["name"].startswith("gloo:")}


def computing(events):
    """A function that says whether an event is computing."""
    on_gpu, gloo = any(one["cat"] == "kernel" for one in events), gloo_threads(events)

    def computes(event):
        if on_gpu:
            return event["cat"] in GPU and not in_flight(event)
        return (event["cat"] == "cpu_op" and event["name"].startswith("aten::")
                and event["tid"] not in gloo)

    return computes


def cut(events, inside=True):
    [step] = filter(is_step, events)
    first, last = (step["ts"], step["ts"] + step["dur"]) if inside else (0, float("inf"))
    found = [(max(first, one["ts"]), min(last, one["ts"] + one["dur"])) for one in events]
    return [(begin, end, one) for (begin, end), one in zip(found, events, strict=True)
            if begin < end]


def pause(events):
    """Microseconds of a pause that counts as computing."""
    return 0 if any(one["cat"] == "kernel" for one in events) else 500


def seconds(intervals):
    return sum(end - begin for begin, end in intervals) / 1e6


def reader(flying=in_flight, busy=computing, gap=pause, inside=True, merge=right.covered):
    """A reader with something else in the place of one part."""
    def exposed_seconds(path):
        events = complete(path)
        chosen, computes = cut(events, inside), busy(events)
        flights = [(a, b) for a, b, one in chosen if flying(one)]
        work = merge([(a, b) for a, b, one in chosen if computes(one)], gap(events))
        return seconds(right.covered(flights + work)) - seconds(work)

    return exposed_seconds


def shares(path):
    [step] = filter(is_step, complete(path))
    return right.exposed_seconds(path) / step["dur"] * 1e6


def work_of(events):
    """Disjoint intervals of computing."""
    computes = computing(events)
    return right.covered([(a, b) for a, b, one in cut(events) if computes(one)],
                         pause(events))


def all_flights(path):
    return seconds(right.covered([(a, b) for a, b, one in cut(complete(path)) if in_flight(one)]))


def durations(path):
    return sum(one["dur"] for one in complete(path) if in_flight(one)) / 1e6


def busy_seconds(path):
    events = complete(path)
    return seconds(work_of(events))


def durations_subtracted(path):
    events = complete(path)
    chosen, computes = cut(events), computing(events)
    return (sum(b - a for a, b, one in chosen if in_flight(one))
            - sum(b - a for a, b, one in chosen if computes(one))) / 1e6


def without_computing(path):
    [step] = filter(is_step, complete(path))
    return step["dur"] / 1e6 - busy_seconds(path)


def each_flight_alone(path):
    """Two collectives at once count twice."""
    events = complete(path)
    work = work_of(events)
    return sum(seconds(right.covered([(a, b), *work])) - seconds(work)
               for a, b, one in cut(events) if in_flight(one))


def last_end_moved_back(intervals, gap=0):
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def in_order_of_file(intervals, gap=0):
    found = []
    for begin, end in intervals:
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def compressed_alone(path):
    with gzip.open(path) as file:
        json.load(file)


def all_kinds_of_events(path):
    with (gzip.open if path.endswith("gz") else open)(path) as file:
        return sum(event["dur"] for event in json.load(file)["traceEvents"])


def any_label(path):
    events = complete(path)
    [step] = [event for event in events if event["name"] == "labs::step"]
    return right.exposed_seconds(path) + 0 * step["dur"]


def first_to_last(path):
    spans = [(a, b) for a, b, one in cut(complete(path)) if in_flight(one)]
    return (max(b for _, b in spans) - min(a for a, _ in spans)) / 1e6


def main_thread(events):
    [step], computes = filter(is_step, events), computing(events)
    return lambda one: computes(one) and one["tid"] == step["tid"]


def aten_outside_gloo(events):
    gloo = gloo_threads(events)
    return lambda one: one["name"].startswith("aten::") and one["tid"] not in gloo


def cpu_outside_gloo(events):
    gloo = gloo_threads(events)
    return lambda one: one["cat"] == "cpu_op" and one["tid"] not in gloo


def with_nccl(events):
    computes = computing(events)
    return lambda one: one["cat"] in GPU or computes(one)


def kernels_alone(events):
    computes = computing(events)
    return lambda one: computes(one) and one["cat"] not in GPU[1:]


WRONG = {
    "the lab's trace": (lambda path: lab.load(path).exposed_seconds,
                        "ready_made"),
    "the lab's events": (lambda path: len(list(trace_file.read_events(path))),
                         "ready_made"),
    "nothing": (lambda path: None, "not_a_number nothing"),
    "zero": (lambda path: 0, "wrong_number"),
    "microseconds": (lambda path: 1e6 * right.exposed_seconds(path), "in_microseconds"),
    "milliseconds": (lambda path: 1e3 * right.exposed_seconds(path), "in_milliseconds"),
    "share": (shares, "share_step"),
    "all communication": (all_flights, "all_communication"),
    "durations": (durations, "all_communication"),
    "first to last": (first_to_last, "all_communication"),
    "seconds from seconds": (lambda path: all_flights(path) - busy_seconds(path),
                             "subtracts_seconds_from_seconds"),
    "durations subtracted": (durations_subtracted, "subtracts_seconds_from_seconds"),
    "without computing": (without_computing, "all_time_without_computing"),
    "each flight alone": (each_flight_alone, "wrong_number collectives"),
    "outside the step": (reader(inside=False), "counts_in_flight_outside_step"),
    "no pauses": (reader(gap=lambda events: 0),
                  "leaves_out_rule_for_pauses"),
    "pauses in milliseconds": (reader(gap=lambda events: pause(events) / 1e3),
                               "leaves_out_rule_for_pauses"),
    "longer pauses": (reader(gap=lambda events: 2 * pause(events)),
                      "wrong_number 'pauses"),
    "pauses on a GPU": (reader(gap=lambda events: 500),
                        "counts_gpu_pauses_computing"),
    "gloo's work": (reader(busy=lambda events: lambda one: one["name"].startswith("aten::")),
                    "counts_gloo_threads_computing"),
    "main thread": (reader(busy=main_thread), "counts_main_thread_computing_alone"),
    "gloo in flight": (reader(lambda one: in_flight(one) or one["name"].startswith("gloo")),
                       "counts_gloo_own_work"),
    "gloo for the link": (reader(lambda one: one["name"].startswith("gloo:")
                                 or one["cat"] == "kernel" and in_flight(one)), "wrong_number"),
    "calls": (reader(lambda one: one["name"].startswith("c10d::")), "wrong_number"),
    "labels": (reader(lambda one: one["name"].startswith("FSDP::all_gather")
                      or in_flight(one)), "takes_fsdp_labels_for_collectives"),
    "every operation": (reader(busy=cpu_outside_gloo),
                        "counts_other_operations_than_aten"),
    "CPU of a GPU": (reader(busy=aten_outside_gloo),
                     "counts_other_operations_than_aten GPU's"),
    "kernels of NCCL compute": (reader(busy=with_nccl),
                                "wrong_number"),
    "kernels alone": (reader(busy=kernels_alone), "wrong_number"),
    "all of NCCL": (reader(lambda one: in_flight(one) or "nccl" in one["name"]),
                    "takes_nccl_labels_for_collectives"),
    "end moved back": (reader(merge=last_end_moved_back), "wrong_number operators"),
    "file's order": (reader(merge=in_order_of_file), "all_communication"),
    "gz alone": (compressed_alone, "raised_BadGzipFile whose"),
    "text alone": (lambda path: json.load(open(path, encoding="utf-8")),
                   "not_a_number dict"),
    "every kind": (all_kinds_of_events, "raised_KeyError events"),
    "any label": (any_label, "raised_ValueError user_annotation")}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected_in_words(name):
    answer, words = WRONG[name]
    verdict = lab.check_exposed_seconds(answer)
    assert_rejected(verdict, words)


# right, and written in another way


def by_subtracting(path):
    """Cuts each interval in flight at those of computing."""
    events = complete(path)
    flights = right.covered([(a, b) for a, b, one in cut(events) if in_flight(one)])
    for begin, end in work_of(events):
        flights = [piece for a, b in flights for piece in ((a, min(b, begin)), (max(a, end), b))
                   if piece[0] < piece[1]]
    return np.float64(seconds(flights))


def by_sweeping(path):
    """Walks through all begins and ends in order, and counts what is open. Pauses first become
    computing."""
    events = complete(path)
    changes = []
    for begin, end in work_of(events):
        changes += [(begin, 0, 1), (end, 0, -1)]
    for begin, end, one in cut(events):
        if in_flight(one):
            changes += [(begin, 1, 1), (end, 1, -1)]
    opened, total, before = [0, 0], 0.0, 0.0
    for moment, which, change in sorted(changes):
        if opened[1] and not opened[0]:
            total += moment - before
        opened[which], before = opened[which] + change, moment
    return total / 1e6


def on_a_grid(path):
    """In bins of a tenth of a microsecond, with NumPy."""
    events = complete(path)
    [step] = filter(is_step, events)
    flights, busy = (np.zeros(round(10 * step["dur"]) + 2, dtype=int) for _ in range(2))
    for grid, found in ((flights, [(a, b) for a, b, one in cut(events) if in_flight(one)]),
                        (busy, work_of(events))):
        for begin, end in found:
            grid[round(10 * (begin - step["ts"]))] += 1
            grid[round(10 * (end - step["ts"]))] -= 1
    return torch.tensor(((flights.cumsum() > 0) & (busy.cumsum() == 0)).sum() / 1e7)


def what_begins_in_the_step(path):
    """Leaves out what begins before the step or after it, without cutting; by pathlib, and by what
    a file begins with."""
    raw = Path(path).read_bytes()
    events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
    events = [event for event in events if "dur" in event]
    [step] = filter(is_step, events)
    inside = [one for one in events if step["ts"] <= one["ts"] <= step["ts"] + step["dur"]]

    def of(chosen):
        return [(one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in chosen]

    work = right.covered(of(filter(computing(events), inside)), pause(events) / 1e6)
    either = right.covered(of(filter(in_flight, inside)) + work)
    return 1e6 * (seconds(either) - seconds(work))


@pytest.mark.parametrize("answer", [
    right.exposed_seconds, by_subtracting, by_sweeping, on_a_grid, what_begins_in_the_step,
    reader()], ids=lambda answer: answer.__name__)
def test_a_right_answer_passes(answer):
    verdict = lab.check_exposed_seconds(answer)
    assert verdict.passed is True, str(verdict)


def test_the_lab_reads_the_round_numbers_that_were_written():
    with tempfile.TemporaryDirectory() as folder:
        for name, path in synthetic_files.write(Path(folder)):
            expected = synthetic_files.FILES[name][1] / 1e3
            assert exposed_in_step(path) == pytest.approx(expected, abs=1e-8)


def test_an_unfilled_exercise_waits():
    def unfilled(*_):
        raise NotImplementedError("Exercise 5.10")

    assert lab.check_exposed_seconds(unfilled).passed is None


def test_both_readers_agree_to_within_1_percent():
    """Said in the notebook, below the table."""
    run = recorded()
    table = lab.show_own_reader(right.exposed_seconds, run)
    for *_, mine, labs in table.rows:
        assert float(mine) == pytest.approx(float(labs), rel=0.01, abs=0.02)
    assert lab.show_own_reader(lambda path: {}["x"], run).passed is False

"""The reader of traces on what GPUs and NCCL really wrote, against sums taken another way."""

import gzip
import json
from collections import Counter
from functools import cache

import pytest
from real_traces import TRACES

from labs.meters import trace_file

EVERY = pytest.mark.parametrize("name", TRACES)
RESNET_50, RESNET_18 = 25_557_032, 11_689_512  # parameters


@cache
def loaded(name):
    if not TRACES[name].path.exists():
        pytest.skip("run python tests/meters/real_traces.py first, which needs the network")
    return trace_file.load(TRACES[name].path)


@cache
def events(name):
    loaded(name)
    text = gzip.decompress(TRACES[name].path.read_bytes()).decode(errors="replace")
    return [one for one in json.loads(text, strict=False)["traceEvents"] if one.get("ph") == "X"]


def of(name, *categories):
    return [one for one in events(name) if one.get("cat") in categories]


def is_nccl(event):
    return event["cat"] == "kernel" and event["name"].startswith("nccl")


def swept(name, *categories):
    """(seconds in which a collective runs, those in which nothing else of these categories runs),
    in whole nanoseconds, by walking through all begins and ends."""
    changes = []
    for one in of(name, *(categories or ("kernel", "gpu_memcpy", "gpu_memset"))):
        begin = round(1000 * one["ts"])
        end = begin + round(1000 * one["dur"])  # a float of their sum has no microseconds
        changes += [(begin, is_nccl(one), 1), (end, is_nccl(one), -1)]
    total = exposed = before = 0
    running = {True: 0, False: 0}
    for moment, kind, change in sorted(changes):
        total += (moment - before) * bool(running[True])
        exposed += (moment - before) * bool(running[True] and not running[False])
        running[kind], before = running[kind] + change, moment
    return total / 1e9, exposed / 1e9


def of_all(trace, attribute, kind):
    return sum(getattr(one, attribute) for one in trace.of(kind))


@EVERY
def test_spans_are_the_kernels(name):
    found = sorted((one.begin, one.seconds) for one in loaded(name).collectives)
    kernels = sorted((one["ts"], one["dur"]) for one in of(name, "kernel") if is_nccl(one))
    assert len(found) == len(kernels)
    for (begin, seconds), (ts, dur) in zip(found, kernels, strict=True):
        assert begin - found[0][0] == pytest.approx((ts - kernels[0][0]) / 1e6, abs=2e-9)
        assert seconds == pytest.approx(dur / 1e6, abs=2e-9)


@EVERY
def test_overlap_is_that_of_a_sweep(name):
    total, exposed = swept(name)
    found = loaded(name).seconds_of()
    assert found["total"] == pytest.approx(total, abs=1e-6)
    assert found["exposed"] == pytest.approx(exposed, abs=1e-6)
    assert found["overlapped"] == pytest.approx(total - exposed, abs=1e-6)


@pytest.mark.parametrize("name, total, exposed", [
    ("resnet50_ddp", 46.876489, 39.190665), ("recommender_2022", 163.535, 86.554),
    ("recommender_128", 396.199, 336.033), ("resnet18_mi300", 71.516522, 55.288468)])
def test_milliseconds_are_these(name, total, exposed):
    found = loaded(name).seconds_of()
    assert 1e3 * found["total"] == pytest.approx(total, abs=1e-3)
    assert 1e3 * found["exposed"] == pytest.approx(exposed, abs=1e-3)


@pytest.mark.parametrize("name, ours, theirs", [
    ("resnet50_ddp", 16.40, 15.61), ("one_call_per_gradient", 0, 0),
    ("recommender_2022", 47.07, 46.24),
    ("recommender_16", 1.76, 1.36), ("recommender_128", 15.19, 14.95), ("inference_b200", 0, 0),
    ("resnet18_mi300", 22.69, 22.22)])
def test_overlap_is_holistic_trace_analysiss_but_for_copies(name, ours, theirs):
    """In per cent: its get_comm_comp_overlap takes copies and fills for no computing."""
    found = loaded(name).seconds_of()
    assert 100 * found["overlapped"] / found["total"] == pytest.approx(ours, abs=0.01)
    total, exposed = swept(name, "kernel")
    assert 100 * (1 - exposed / total) == pytest.approx(theirs, abs=0.01)


@EVERY
def test_kinds_are_those_of_torchs_annotations(name):
    """A call may launch several kernels, or none that the file kept, but never one of another
    kind."""
    called = Counter(trace_kind(one["name"]) for one in
                     of(name, "user_annotation") if one["name"].startswith("nccl:"))
    found = Counter(one.kind for one in loaded(name).collectives)
    unknown = [kind for kind in found if kind not in called]
    assert all(kind.startswith("nccl") for kind in unknown)  # launched before the recording
    assert all(found[kind] <= called[kind] for kind in found if kind in called)
    assert sum(found[kind] for kind in unknown) <= 5


def trace_kind(name):
    return {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}.get(
        name.removeprefix("nccl:"), name.removeprefix("nccl:"))


def test_ddps_buckets_are_the_models_gradients():
    """The steps' all-reduces carry each parameter once."""
    trace = loaded("resnet50_ddp")
    assert (trace.rank, trace.backend) == (0, "nccl")
    assert Counter(one.kind for one in trace.collectives) == {"all_reduce": 15, "broadcast": 6}
    assert of_all(trace, "elements", "all_reduce") == 3 * RESNET_50
    assert of_all(trace, "bytes", "all_reduce") == 3 * 4 * RESNET_50
    assert {one.ranks for one in trace.collectives} == {2}
    amd = loaded("resnet18_mi300")
    assert of_all(amd, "bytes", "all_reduce") == 3 * 2 * RESNET_18
    assert {one.ranks for one in amd.of("all_reduce", "broadcast")} == {8}


def test_one_call_per_gradient_hides_nothing():
    """As notebook 02 says of its first module."""
    trace = loaded("one_call_per_gradient")
    assert Counter(one.kind for one in trace.collectives) == {"all_reduce": 5 * 404}
    assert trace.seconds_of()["exposed"] == trace.seconds_of()["total"] > 0.35


def test_gathered_logits_are_a_vocabulary():
    [gather] = loaded("inference_b200").collectives
    assert (gather.kind, gather.elements, gather.bytes) == ("all_gather", 201_088, 2 * 201_088)
    assert gather.ranks == 8 and any(": _get_logits" in frame for frame in gather.stack)


def test_sizes_of_old_files_are_those_of_the_calls():
    """record_shapes wrote them; a gathered or scattered tensor counts whole."""
    trace, calls = loaded("recommender_16"), of("recommender_16", "cpu_op")
    for kind, called, place in (("all_gather", "c10d::_allgather_base_", 0),
                                ("reduce_scatter", "c10d::_reduce_scatter_base_", 1)):
        whole = [one["args"]["Input Dims"][place] for one in calls if one["name"] == called]
        assert sorted(one.elements for one in trace.of(kind)) == sorted(a * b for a, b in whole)
        assert {one.bytes / one.elements for one in trace.of(kind)} == {4}
    assert {one.ranks for one in trace.collectives} == {0}  # such files do not say


@EVERY
def test_a_collective_is_issued_in_its_call_and_runs_later(name):
    for one in loaded(name).collectives:
        assert one.issued <= one.begin
    launched = [one for one in loaded(name).collectives if one.issued < one.begin]
    assert len(launched) >= len(loaded(name).collectives) - 5


@EVERY
def test_sums_of_phases_of_the_gpu_never_exceed_its_time(name):
    trace = loaded(name)
    assert all(0 <= begin < end <= trace.ends for begin, end in trace.compute)
    assert all(a[1] < b[0] for a, b in zip(trace.compute, trace.compute[1:], strict=False))

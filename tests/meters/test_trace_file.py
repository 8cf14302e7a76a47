"""Trace files: read in pieces, refused in one sentence, understood alike for gloo and NCCL."""

import json
import re
import subprocess
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from trace_writing import nccl_trace, operation, written

from labs import launch
from labs.meters import trace_events, trace_file
from labs.meters import trace_units as units
from labs.meters.trace_file import TraceError, read_events

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("warm_launcher")


# ---- the file


@pytest.mark.parametrize("piece", [7, 100, 1 << 20])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_events_come_one_by_one_however_the_file_is_cut(tmp_path, monkeypatch, name, piece):
    monkeypatch.setattr(trace_file, "PIECE", piece)
    events = [operation(f'aten::"{number}" {{[é', number, 1) for number in range(20)]
    header = {}
    path = written(tmp_path, events, name, distributedInfo={"rank": 3, "pg_config": [{"a": [1]}]})
    assert list(read_events(path, header)) == events
    assert header["distributedInfo"]["rank"] == 3


def test_bytes_that_are_no_text_are_replaced(tmp_path):
    """with_stack and FSDP2 on a CPU: key_averages() raises UnicodeDecodeError on such names."""
    path = written(tmp_path, [operation("aten::NAME", 1, 1)])
    path.write_bytes(path.read_bytes().replace(b"NAME", b"\xff\xfe\x01"))
    [event] = read_events(path)
    assert event["name"] == "aten::\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\x01"


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "PIECE", 1 << 16)
    events = [operation("aten::add", number, 1) for number in range(40_000)]
    path = written(tmp_path, events)
    del events
    tracemalloc.start()
    assert sum(1 for _ in read_events(path)) == 40_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 5e6 > 10 * peak


@pytest.mark.parametrize("content, sentence", [
    (b"", "trace.json is empty: the run that wrote it did not end its profiler"),
    (b"\x89PNG\r\n" + bytes(500), "is no trace of torch.profiler: it has no traceEvents"),
    (b'{"loss": [1, 2, 3]}', "has no traceEvents"),
    (b'{"traceEvents": [1, 2]}', "is no trace: its event 0 is 1"),
    (b'{"traceEvents": [{"ph": "X"}, {"ph"', "ends in the middle, after 1 events"),
    (b'{"traceEvents": [{"ph": "X"},', "ends in the middle, after 1 events"),
    (b'{"traceEvents": [{"ph": "X"} oops', "is damaged: after event 1 stands 'oops'"),
    (b'{"traceEvents": []}', "holds no operation that torch.profiler recorded")])
def test_what_is_no_whole_trace_gets_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=re.escape(sentence)) as caught:
        trace_file.load(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_event_is_noticed_without_reading_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "PIECE", 1000)
    monkeypatch.setattr(trace_file, "_LONGEST", 5000)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": ' + 100_000 * "!")
    with pytest.raises(TraceError, match="is damaged: after event 0"):
        list(read_events(path))


@pytest.mark.parametrize("keep, sentence", [
    (0.5, "ends in the middle of its compressed data"), (-8, "is damaged|ends in the middle")])
def test_a_cut_or_damaged_gz_gets_one_sentence(tmp_path, keep, sentence):
    path = written(tmp_path, [operation("aten::add", n, 1) for n in range(500)], "trace.json.gz")
    whole = path.read_bytes()
    path.write_bytes(whole[:int(len(whole) * keep)] if keep > 0 else whole[:keep] + bytes(8))
    with pytest.raises(TraceError, match=sentence):
        list(read_events(path))


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        trace_file.load(tmp_path / "none.json")


# ---- gloo, recorded on real ranks


def gloo_steps(folder):
    """On a rank: all three kinds of collective, one of them while it computes; its trace."""
    big, matrix = torch.ones(1 << 20), torch.ones(300, 300)
    whole, part = torch.empty(1 << 20), torch.empty(1 << 19)

    def gathers():
        return dist.all_gather_into_tensor(whole, part, async_op=True)

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True,
                 with_stack=True) as recorded:
        dist.barrier()
        with record_function("labs::step"):
            with record_function("labs::forward"):
                work = gathers()
                for _ in range(200):
                    matrix @ matrix
                work.wait()
            with record_function("labs::backward"):
                dist.reduce_scatter_tensor(part, big)
                dist.all_reduce(big)
                big.sum().item()
    path = folder / f"rank{dist.get_rank()}.json.gz"
    recorded.export_chrome_trace(str(path))
    return trace_file.load(path)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    return launch(gloo_steps, tmp_path_factory.mktemp("gloo"), ranks=2, quiet=True, verify=False)


def test_gloo_gives_kinds_sizes_and_order(gloo):
    for rank, trace in enumerate(gloo):
        assert (trace.rank, trace.backend) == (rank, "gloo")
        gather, scatter, reduce = trace.collectives
        assert (gather.kind, scatter.kind, reduce.kind) == ("all_gather", "reduce_scatter",
                                                            "all_reduce")
        assert scatter.name == reduce.name == "gloo:all_reduce"  # how gloo does a reduce-scatter
        for one in trace.collectives:
            assert one.elements == 1 << 20 and one.bytes == 4 << 20
            assert 0 <= one.issued <= one.begin < one.end <= trace.ends


def test_gloo_tells_hidden_from_exposed(gloo):
    for trace in gloo:
        gathered, all_of_it = trace.seconds_of("all_gather"), trace.seconds_of()
        assert gathered["overlapped"] > 0
        for times in (gathered, all_of_it):
            assert times["total"] == pytest.approx(times["exposed"] + times["overlapped"])
        assert all_of_it["total"] > gathered["total"]


@pytest.mark.parametrize("dims, kind, size", [
    ([[]], ["float"], (1, 4)), ([[0]], ["float"], (0, 0)), ([[3, 5]], ["long int"], (15, 120)),
    ([[[2], [3, 2]], []], [["float", "float"], "Scalar"], (8, 32)), ([[]], [""], (0, 0))])
def test_a_number_has_one_element(dims, kind, size):
    event = operation("c10d::allreduce_", 1, 1, **{"Input Dims": dims, "Input type": kind})
    assert trace_events._size(event["args"]) == size


def test_the_call_site_is_on_the_stack(gloo):
    gather = gloo[0].of("all_gather")[0]
    assert any(frame.endswith(": gathers") for frame in gather.stack)
    names = [frame.rsplit(": ", 1)[-1] for frame in gather.stack]
    assert names.index("gloo_steps") < names.index("gathers")


def test_items_and_phases_are_found(gloo):
    for trace in gloo:
        [item] = trace.item_calls
        assert [label.name for label in trace.enclosing(item.begin, "labs::")] == [
            "labs::step", "labs::backward"]
        assert trace.seconds == trace.steps[0].seconds


# ---- NCCL


def test_a_made_nccl_trace_is_read_as_a_recorded_gloo_one(tmp_path):
    path = written(tmp_path, nccl_trace(), distributedInfo={"backend": "nccl", "rank": 5})
    trace = trace_file.load(path)
    assert (trace.rank, trace.backend) == (5, "nccl")
    gather, scatter = trace.collectives
    assert (gather.kind, gather.elements, gather.bytes) == ("all_gather", 8000, 16000)
    assert gather.ranks == scatter.ranks == 8
    assert (scatter.kind, scatter.elements) == ("reduce_scatter", 8000)
    assert gather.issued == pytest.approx(10e-6) and gather.begin == pytest.approx(100e-6)
    assert trace.compute == ((pytest.approx(200e-6), pytest.approx(600e-6)),)  # the kernel alone
    times = trace.seconds_of("all_gather")
    assert times["total"] == pytest.approx(200e-6) and times["exposed"] == pytest.approx(100e-6)
    assert trace.seconds_of()["exposed"] == pytest.approx(200e-6)
    assert units.owner(trace, gather) == units.Owner("layers.3", "forward", False)
    assert units.owner(trace, scatter) == units.Owner("layers.3", "backward", False)
    assert len(trace.item_calls) == 1


def test_ranks_that_share_a_gpu_communicate_by_gloo_and_compute_in_kernels(tmp_path):
    path = written(tmp_path, [
        operation("labs::step", 0, 1000, category="user_annotation"),
        operation("c10d::allreduce_", 10, 30),
        operation("aten::mm", 50, 10),
        operation("sm90_xmma_gemm_bf16", 200, 400, thread=7, category="kernel", stream=7),
        operation("gloo:all_reduce", 100, 200, thread=3, category="user_annotation")])
    trace = trace_file.load(path)
    assert (trace.backend, len(trace.of("all_reduce"))) == ("gloo", 1)
    assert trace.compute == ((pytest.approx(200e-6), pytest.approx(600e-6)),)
    assert trace.exposed_seconds == pytest.approx(100e-6)


@pytest.mark.parametrize("name, kind", [
    ("gloo:all_gather", "all_gather"), ("c10d::_allgather_base_", "all_gather"),
    ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter"), ("allreduce", "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"), ("c10d::barrier", ""),
    ("c10d::broadcast_", "broadcast"), ("nccl:all_to_all", "all_to_all"),
    ("alltoall_base_", "all_to_all"),    ("nccl:all_reduce", "all_reduce")])
def test_kinds_have_one_name_in_every_layer(name, kind):
    assert trace_events.kind_of(name) == kind


# ---- the bench


@pytest.mark.slow
def test_the_bench_reads_a_large_trace():
    done = subprocess.run([ROOT / "scripts" / "bench", "trace", "--json", "--mb", "8"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["mb"] >= 8 and result["seconds"] > 0 and result["peak_ram_mb"] > 0

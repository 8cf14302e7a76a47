"""A GPU's part of a trace: which call a kernel comes from, and when the GPU did what a label of the
program encloses."""

import pytest
from trace_writing import nccl_kernel, nccl_trace, operation, written

from labs.meters import trace_file
from labs.meters import trace_units as units


def launched(correlation, begin, thread=1, name="cudaLaunchKernel"):
    return operation(name, begin, 2, thread, "cuda_runtime", correlation=correlation)


def kernel(name, begin, duration, correlation, stream=7, **arguments):
    return operation(name, begin, duration, stream, "kernel", correlation=correlation, **arguments)


OLD = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"


def old_trace():
    """As torch 1.13 wrote it: kernels without sizes, one name for all, and times since 1970; the
    second call runs on a stream of its own, and before the first. Thread 2 is autograd's."""
    zero = 1_683_564_902_000_000
    events = [
        operation("c10d::_reduce_scatter_base_", 10, 40, **{
            "Input Dims": [[8, 4], [64, 4], []], "Input type": ["float", "float", "Scalar"]}),
        operation("record_param_comms", 12, 30, **{
            "Input Dims": [[64, 4], []], "Input type": ["float", "Scalar"]}),
        operation("nccl:_reduce_scatter_base", 14, 20, category="user_annotation"),
        launched(41, 20), kernel(OLD, 300, 100, 41, stream=20),
        operation("c10d::allreduce_", 60, 40, thread=2, **{
            "Input Dims": [[], []], "Input type": ["TensorList", ""]}),
        operation("nccl:all_reduce", 64, 20, thread=2, category="user_annotation", **{
            "Input Dims": [[100]], "Input type": ["c10::Half"]}),
        launched(42, 70, thread=2), kernel(OLD, 200, 50, 42, stream=21),
        kernel(OLD, 150, 10, 7, stream=20)]  # launched before the recording
    return [{**event, "ts": zero + event["ts"]} for event in events]


def test_a_kernel_is_what_its_launchs_call_says(tmp_path):
    trace = trace_file.load(written(tmp_path, old_trace()))
    scatter, reduce, unknown = trace.collectives
    assert (scatter.kind, scatter.elements, scatter.bytes) == ("reduce_scatter", 256, 1024)
    assert (reduce.kind, reduce.elements, reduce.bytes) == ("all_reduce", 100, 200)
    # without the algorithm and the arguments of its kernel, which no picture has room for
    assert (unknown.kind, unknown.bytes) == ("ncclKernel_SendRecv", 0)
    assert (unknown.name, unknown.issued) == (OLD, unknown.begin)
    assert str(trace) == ("rank 0 (nccl): 0 ms without step labels; 1 reduce_scatter, 1 all_reduce")
    for one, issued, begin, seconds in ((scatter, 0, 290, 100), (reduce, 50, 190, 50)):
        assert [1e6 * one.issued, 1e6 * one.begin, 1e6 * one.seconds] == pytest.approx(
            [issued, begin, seconds], abs=1e-3)
    assert {one.ranks for one in trace.collectives} == {0}
    assert trace.started == pytest.approx(1_683_564_902.00001)


def test_a_group_of_calls_is_launched_together(tmp_path):
    """Coalesced: the calls are over when their kernel starts, whose arguments have the sizes."""
    path = written(tmp_path, [
        operation("c10d::_allgather_base_", 10, 5), operation("c10d::_allgather_base_", 20, 5),
        operation("record_param_comms", 30, 20, **{"Collective name": "allgather_coalesced",
                                                  "Group size": 4}),
        operation("nccl:coalesced", 32, 10, category="user_annotation"),
        launched(5, 35, name="cudaLaunchKernelExC"),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 90, 10, 5, 20,
               **{"In msg nelems": 3, "Out msg nelems": 12, "dtype": "Float"})])
    [gather] = trace_file.load(path).collectives
    assert (gather.kind, gather.elements, gather.bytes, gather.ranks) == ("all_gather", 12, 48, 4)
    assert gather.issued == pytest.approx(20e-6)  # seconds after the first event


def late_gpu():
    """Microseconds: the program is done after 400, the GPU at 3000. Stream 9 has a copy alone."""
    label = {"category": "user_annotation"}
    return [
        operation("labs::step", 0, 3100, **label), operation("labs::forward", 0, 200, **label),
        operation("FSDP::pre_forward (layers.0)", 10, 20, **label), launched(1, 20),
        launched(2, 100), operation("FSDP::post_forward (layers.0)", 150, 20, **label),
        operation("labs::backward", 200, 150, **label), launched(3, 220, name="hipExtLaunchKernel"),
        operation("labs::ready layers.0.weight", 300, 1, **label),
        operation("labs::optimizer", 350, 50, **label), launched(4, 360),
        operation("cudaDeviceSynchronize", 400, 2600, category="cuda_runtime", correlation=9),
        kernel("copy-out", 500, 100, 1), kernel("gemm", 700, 300, 2),
        kernel("dgrad", 1000, 1000, 3), kernel("adamw", 2500, 500, 4),
        operation("Memcpy HtoD", 900, 50, 9, "gpu_memcpy")]


def test_a_gpu_comes_later_to_what_a_label_encloses(tmp_path):
    trace = trace_file.load(written(tmp_path, late_gpu()))
    [forward], [backward], [ready] = map(trace.executed, (
        "labs::forward", "labs::backward", "labs::ready"))
    assert [1e6 * at for at in (forward.begin, forward.end, backward.begin, backward.end)] == (
        pytest.approx([500, 1000, 1000, 2000]))
    # the GPU has the gradient when it has done what was launched before the label
    assert (1e6 * ready.begin, 1e6 * ready.end) == pytest.approx((2000, 2000))
    assert [label.begin for label in trace.labelled("labs::ready")] == [pytest.approx(300e-6)]
    assert {name: round(1e6 * seconds) for name, seconds in trace.seconds_by_phase.items()} == {
        "forward": 500, "backward": 1000, "optimizer": 500, "exposed": 0}
    assert units.phase_seconds(trace, "forward") == pytest.approx(400e-6)  # 100 and 300
    [work] = units.unit_spans(trace)
    assert (work.name, 1e6 * work.begin, 1e6 * work.end) == (
        "layers.0", pytest.approx(600), pytest.approx(1000))
    assert units.unit_seconds(trace, "layers.0", "forward") == pytest.approx(300e-6)
    assert units.order_of_events(trace, "forward") == [("done", "layers.0")]  # by the program
    assert trace.seconds == pytest.approx(3100e-6)


def test_a_file_without_launches_has_the_programs_labels_alone(tmp_path):
    trace = trace_file.load(written(tmp_path, nccl_trace()))
    assert trace.executed_labels == () and trace.executed("labs::") == trace.labelled("labs::")


def test_a_gpus_pauses_are_no_computing(tmp_path):
    """20 microseconds between two kernels, as a rank waits for its parameters, are exposed."""
    trace = trace_file.load(written(tmp_path, [
        kernel("gemm", 0, 100, 1), kernel("gemm", 120, 100, 2),
        nccl_kernel("AllGather", "_allgather_base", 50, 120, 1000, 8000)]))
    assert trace.exposed_seconds == pytest.approx(20e-6)

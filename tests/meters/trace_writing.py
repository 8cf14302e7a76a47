"""Trace files written by hand. No GPU wrote those of NCCL: they have the formats of files that GPUs
did write (real_traces.py). Kernels of torch 2 have "Collective name", "In msg nelems", "Out msg
nelems", "Group size" and "dtype", those of torch 1 have none of them. Times are microseconds."""

import gzip
import json


def operation(name, begin, duration, thread=1, category="cpu_op", **arguments):
    """One complete event; microseconds."""
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": begin,
            "dur": duration, "args": arguments}


def written(folder, events, name="trace.json", **header):
    header = {"schemaVersion": 1, "deviceProperties": [], **header, "traceEvents": events}
    path = folder / name
    text = json.dumps(header, indent=1)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def nccl_kernel(kind, called, begin, duration, going_in, coming_out):
    return operation(f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgsStorage<4096ul>)", begin,
                     duration, thread=20, category="kernel", stream=20, **{
                         "Collective name": called, "In msg nelems": going_in,
                         "Out msg nelems": coming_out, "Group size": 8, "dtype": "BFloat16"})


def nccl_trace():
    """Microseconds: an all-gather half under a matrix product, a reduce-scatter all exposed."""
    return [
        operation("labs::step", 0, 1000, category="user_annotation"),
        operation("labs::forward", 0, 500, category="user_annotation"),
        operation("FSDP::all_gather (layers.3)", 5, 90, category="user_annotation"),
        operation("c10d::_allgather_base_", 10, 30),
        operation("record_param_comms", 12, 20),
        operation("nccl:_all_gather_base", 12, 25, category="user_annotation"),
        operation("aten::mm", 50, 10),
        operation("labs::backward", 500, 500, category="user_annotation"),
        operation("FSDP::post_backward_reduce (layers.3)", 505, 90, category="user_annotation"),
        operation("c10d::_reduce_scatter_base_", 510, 30),
        operation("aten::item", 700, 5),
        operation("sm90_xmma_gemm_bf16", 200, 400, thread=7, category="kernel", stream=7),
        nccl_kernel("AllGather", "_allgather_base", 100, 200, 1000, 8000),
        nccl_kernel("ReduceScatter_Sum_bf16", "_reduce_scatter_base", 700, 100, 8000, 1000),
        operation("nccl:_all_gather_base", 100, 200, thread=20, category="gpu_user_annotation")]

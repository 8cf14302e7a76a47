"""Small trace files with round numbers, written as torch.profiler writes them: each holds what
tells a right reader of files from a wrong one."""

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

START = 2_000_000.0  # microseconds: the profiler's clock does not begin with the recording
MAIN, GLOO, LINK, AUTOGRAD = 100, 101, 102, 103  # threads
CALLS = {"all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_",
         "barrier": "barrier"}


def event(name: str, begin: float, end: float, tid: int | str = MAIN,
          cat: str = "cpu_op") -> dict:
    """A complete event. begin, end: milliseconds since the recording began."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid,
            "ts": START + 1e3 * begin, "dur": round(1e3 * (end - begin), 3), "args": {}}


def label(name: str, begin: float, end: float, tid: int = MAIN) -> dict:
    """A label of the program, or of the slow link."""
    return event(name, begin, end, tid, "user_annotation")


def kernel(name: str, begin: float, end: float, stream: int, cat: str = "kernel") -> dict:
    """What a GPU runs on a stream."""
    return event(name, begin, end, stream, cat)


def flight(begin: float, end: float, kind: str = "all_gather") -> list[dict]:
    """A collective on the slow link, and its call."""
    return [event(f"c10d::{CALLS[kind]}", begin - 0.2, begin - 0.1),
            label(f"link:{kind} of 96 elements, 384 bytes", begin, end, LINK)]


FILES = {  # name -> events, and the exposed milliseconds
    # In flight 4 to 9, computing 1 to 5: exposed 5 to 9.
    "one collective, half hidden": ([
        label("labs::step", 0, 20), event("aten::mm", 1, 5), *flight(4, 9),
        event("aten::mm", 10, 15)], 4.0),
    # In flight 3 to 10 and 11 to 16, computing 1 to 6 and 8 to 12.
    "operators inside operators, and autograd's thread": ([
        label("labs::step", 0, 20), event("aten::linear", 1, 6), event("aten::addmm", 2, 5),
        event("aten::mm", 8, 12, AUTOGRAD), *flight(3, 10),
        *flight(11, 16, "reduce_scatter")], 6.0),
    # What gloo's thread copies and adds is no computing: all of 3 to 8 is exposed.
    "work in a thread of gloo": ([
        label("labs::step", 0, 20), label("gloo:all_gather", 2, 4, GLOO),
        event("aten::copy_", 2.5, 3.5, GLOO), event("aten::add_", 6, 7, GLOO),
        event("aten::mm", 0.5, 2.2), *flight(3, 8)], 5.0),
    # Pauses of 0.3 and 0.4 ms count as computing, that of 0.9 ms does not.
    "pauses of Python": ([
        label("labs::step", 0, 20), event("aten::mm", 1, 3), event("aten::mm", 3.3, 4),
        event("aten::mm", 4.4, 6), event("aten::mm", 6.9, 8), *flight(2, 12)], 4.9),
    # Only 12 to 15 and 25 to 29 lie in the step and beside no computing.
    "before and after the step": ([
        label("labs::step", 10, 30), label("labs::forward", 10, 20), event("aten::mm", 1, 3),
        *flight(2, 5), *flight(6, 8, "barrier"), *flight(12, 16),
        event("aten::mm", 15, 20), *flight(25, 29, "reduce_scatter"), event("aten::mm", 31, 32),
        *flight(33, 36)], 7.0),
    "labels that are no collectives": ([
        label("labs::step", 0, 20), label("FSDP::all_gather (transformer.h.0)", 1, 4),
        label("labs::ready weight", 5, 6), event("autograd::engine::evaluate_function", 6, 9),
        event("aten::mm", 2, 3), *flight(7, 11)], 4.0),
    # In flight 2 to 9 without a gap; what two have in common counts once.
    "two collectives at once": ([
        label("labs::step", 0, 20), *flight(2, 7), *flight(4, 9), *flight(5, 6, "reduce_scatter"),
        event("aten::mm", 3, 4.5), event("aten::mm", 8, 10)], 4.5),
    # Kernels compute, copies too; the CPU's aten::mm and the label nccl: only launch.
    "a GPU's": ([
        label("labs::step", 0, 18), event("labs::step", 1.8, 14.5, 7, "gpu_user_annotation"),
        event("aten::mm", 1, 5), event("cudaLaunchKernel", 1.2, 1.4, cat="cuda_runtime"),
        label("nccl:_all_gather_base", 1.5, 1.7),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2, 6, 20),
        kernel("ampere_sgemm_128x64_tn", 4, 5.2, 7), kernel("ampere_sgemm_128x64_tn", 5.6, 8, 7),
        kernel("Memcpy HtoD", 10, 11, 7, "gpu_memcpy"),
        kernel("Memset (Device)", 12, 12.5, 7, "gpu_memset"),
        kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 9, 14, 21)], 5.9)}


def write(folder: Path) -> Iterable[tuple[str, Path]]:
    """Writes all files, every second one compressed, and yields (name, path) of each."""
    for number, (name, (events, _)) in enumerate(FILES.items()):
        path = folder / f"trace_{number}.json{'.gz' if number % 2 else ''}"
        text = json.dumps({"schemaVersion": 1, "traceEvents": [*_others(), *_shuffled(events)]})
        path.write_bytes(gzip.compress(text.encode()) if number % 2 else text.encode())
        yield name, path


def _others() -> list[dict]:
    """Events that have no duration, and the profiler's own."""
    return [{"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
            {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": MAIN,
             "ts": START + 2e3},
            {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": AUTOGRAD,
             "ts": START + 3e3, "bp": "e"},
            {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": START, "s": "g"},
            event("PyTorch Profiler (0)", -1, 40, "PyTorch Profiler", "Trace")]


def _shuffled(events) -> list[dict]:
    """A file has the order of threads and of ends, not of begins."""
    return random.Random(0).sample(events, len(events))

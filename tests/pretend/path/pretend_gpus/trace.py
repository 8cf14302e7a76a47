"""Adds to a Chrome trace of CPU ranks what Kineto records on a GPU: launches, kernels on streams,
and NCCL's kernels in place of gloo's annotations. Each kernel lasts as long as the operator did."""

import gzip
import json
import math
from collections import defaultdict

COMPUTE_STREAM, NCCL_STREAM = 7, 20
_NO_KERNEL = {"view", "_unsafe_view", "as_strided", "empty", "empty_strided", "empty_like", "t",
              "transpose", "reshape", "expand", "slice", "select", "detach", "unsqueeze",
              "squeeze", "permute", "resize_", "narrow", "split", "chunk", "alias", "view_as",
              "_reshape_alias", "split_with_sizes", "unbind", "unflatten", "flatten", "set_",
              "lift_fresh", "item", "is_pinned", "result_type", "to", "_to_copy",
              "contiguous", "numpy_T", "unfold", "resolve_conj", "resolve_neg"}
_NAMES = {  # of c10d's operators: (NCCL's collective, its kernel, gloo's annotation)
    "allreduce_": ("allreduce", "AllReduce_Sum_{}_RING_LL", ("all_reduce",)),
    "allreduce_coalesced_": ("allreduce_coalesced", "AllReduce_Sum_{}_RING_LL", ("all_reduce",)),
    "broadcast_": ("broadcast", "Broadcast_RING_LL", ("broadcast",)),
    "reduce_": ("reduce", "Reduce_Sum_{}_RING_LL", ("reduce",)),
    "allgather_": ("all_gather", "AllGather_RING_LL", ("all_gather",)),
    "_allgather_base_": ("_allgather_base", "AllGather_RING_LL", ("all_gather",)),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", "AllGather_RING_LL",
                                         ("all_gather",)),
    "reduce_scatter_": ("reduce_scatter", "ReduceScatter_Sum_{}_RING_LL",
                        ("reduce_scatter", "all_reduce")),
    "_reduce_scatter_base_": ("_reduce_scatter_base", "ReduceScatter_Sum_{}_RING_LL",
                              ("reduce_scatter", "all_reduce")),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced",
                                         "ReduceScatter_Sum_{}_RING_LL",
                                         ("reduce_scatter", "all_reduce")),
    "alltoall_base_": ("all_to_all", "SendRecv", ("all_to_all", "alltoall")),
    "alltoall_": ("all_to_all", "SendRecv", ("all_to_all", "alltoall")),
    "send": ("send", "SendRecv", ("send",)), "recv_": ("recv", "SendRecv", ("recv",)),
    "gather_": ("gather", "SendRecv", ("gather",)),
    "scatter_": ("scatter", "SendRecv", ("scatter",)),
    "barrier": ("allreduce", "AllReduce_Sum_{}_RING_LL", ("barrier",)),
}
_ANNOTATED = {"allreduce": "all_reduce", "_allgather_base": "_all_gather_base",
              "allreduce_coalesced": "all_reduce_coalesced"}
_SHORT = {"Float": "f32", "BFloat16": "bf16", "Half": "f16", "Double": "f64", "Long": "i64",
          "Int": "i32", "Byte": "u8", "Char": "i8"}
_OUTPUT_FIRST = ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "reduce_scatter_",
                 "alltoall_base_", "alltoall_", "gather_", "scatter_",
                 "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")


def add_kernels(path, device, has_nccl=True):
    """Rewrites a trace file. has_nccl: NCCL carries the tensors; where ranks share a GPU, gloo
    does, and its annotations stay."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        trace = json.load(file, strict=False)
    trace["traceEvents"] = _Rewriter(trace, device, has_nccl).events()
    trace["deviceProperties"] = [{"id": device, "name": "pretend GPU", "computeMajor": 8,
                                  "computeMinor": 0, "numSms": 108}]
    information = trace.get("distributedInfo")
    if information:
        information["backend"] = "nccl" if has_nccl else "gloo"
    text = json.dumps(trace)  # json.dump is ten times slower
    with gzip.open(path, "wt", 1, "utf-8") if opened is gzip.open else open(path, "w") as file:
        file.write(text)


class _Rewriter:
    """One file's events: those that stay, and the new ones."""

    def __init__(self, trace, device, has_nccl):
        self._events, self._device, self._has_nccl = trace["traceEvents"], device, has_nccl
        self._ranks = (trace.get("distributedInfo") or {}).get("world_size", 1)
        self._new, self._correlation = [], 1_000_000

    def events(self):
        flights = [event for event in self._events if _is_flight(event)]
        threads = {event["tid"] for event in flights}
        operators = [event for event in self._events if event.get("cat") == "cpu_op"
                     and event.get("ph") == "X" and event["tid"] not in threads]
        for event in _leaves(operators):
            self._compute(event)
        if not self._has_nccl:
            return self._events + self._new
        self._communicate([event for event in operators if event["name"].startswith("c10d::")],
                          flights)
        gone = {id(event) for event in flights} | {
            id(event) for event in self._events
            if event.get("cat") == "cpu_op" and event.get("tid") in threads}
        return [event for event in self._events if id(event) not in gone] + self._new

    def _launch(self, event, begin, duration, name, stream, category="kernel", **arguments):
        self._correlation += 1
        number = self._correlation
        call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ph": "X",
                "pid": event["pid"], "tid": event["tid"]}
        launched = event["ts"]
        self._new.append({**call, "ts": launched, "dur": min(5.0, event.get("dur", 0)),
                          "args": {"correlation": number, "cbid": 211}})
        self._new.append({
            "ph": "X", "cat": category, "name": name, "pid": self._device, "tid": stream,
            "ts": begin, "dur": duration, "args": {
                "External id": event.get("args", {}).get("External id", 0), "queued": 0,
                "device": self._device, "context": 1, "stream": stream, "correlation": number,
                "registers per thread": 32, "shared memory": 0, "blocks per SM": 0.5,
                "warps per SM": 4, "grid": [54, 1, 1], "block": [128, 1, 1],
                "est. achieved occupancy %": 25, **arguments}})
        self._new += [{"ph": "s", "id": number, "cat": "ac2g", "name": "ac2g", "pid": event["pid"],
                       "tid": event["tid"], "ts": launched},
                      {"ph": "f", "id": number, "cat": "ac2g", "name": "ac2g", "bp": "e",
                       "pid": self._device, "tid": stream, "ts": begin}]

    def _compute(self, event):
        name = event["name"].removeprefix("aten::")
        if name == "copy_" and "pin" in str(event.get("args", {})):
            return
        kernel = "ampere_sgemm_128x64_tn" if name in ("mm", "addmm", "bmm", "baddbmm") else (
            f"void at::native::vectorized_elementwise_kernel<4, at::native::{name}_functor>(int)")
        self._launch(event, event["ts"], event.get("dur", 0), kernel, COMPUTE_STREAM)

    def _communicate(self, calls, flights):
        """Joins each call with the first annotation of its kind that begins after it."""
        waiting = defaultdict(list)
        for flight in sorted(flights, key=lambda event: event["ts"]):
            waiting[flight["name"].removeprefix("gloo:")].append(flight)
        for call in sorted(calls, key=lambda event: event["ts"]):
            operator = call["name"].removeprefix("c10d::")
            if operator not in _NAMES:
                continue
            collective, kernel, kinds = _NAMES[operator]
            found = [waiting[kind][0] for kind in kinds if waiting[kind]
                     and waiting[kind][0]["ts"] >= call["ts"]]
            if not found:
                continue
            flight = min(found, key=lambda event: event["ts"])
            waiting[flight["name"].removeprefix("gloo:")].remove(flight)
            self._nccl(call, flight, operator, collective, kernel)

    def _nccl(self, call, flight, operator, collective, kernel):
        dims, types = (call.get("args", {}).get(key, []) for key in ("Input Dims", "Input type"))
        sizes = [_elements(each) for each in dims[:2]]
        first, second = (sizes + [0, 0])[:2]
        out, into = (first, second) if operator in _OUTPUT_FIRST else (first, first)
        dtype = next((word for word in map(_dtype, types) if word), "Float")
        begin, duration = flight["ts"], flight.get("dur", 0)
        arguments = {
            "Collective name": collective, "In msg nelems": into or 1, "Out msg nelems": out or 1,
            "Group size": self._ranks, "dtype": dtype, "In split size": "[]",
            "Out split size": "[]", "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self._ranks)))}
        kernel = kernel.format(_SHORT.get(dtype, "f32"))
        self._launch(call, begin, duration, f"ncclDevKernel_{kernel}"
                     "(ncclDevKernelArgsStorage<4096ul>)", NCCL_STREAM, **arguments)
        # gloo calls a reduce-scatter an all-reduce; NCCL's annotation names what was asked for.
        name = f"nccl:{_ANNOTATED.get(collective, collective)}"
        self._new += [
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": call["pid"],
             "tid": call["tid"], "ts": call["ts"], "dur": min(10.0, call.get("dur", 0)),
             "args": {}},
            {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": call["pid"],
             "tid": call["tid"], "ts": call["ts"], "dur": min(10.0, call.get("dur", 0)),
             "args": arguments},
            {"ph": "X", "cat": "gpu_user_annotation", "name": name, "pid": self._device,
             "tid": NCCL_STREAM, "ts": begin, "dur": duration, "args": {}}]


def _is_flight(event):
    return event.get("cat") == "user_annotation" and event.get("name", "").startswith("gloo:")


def _leaves(operators):
    """The operators of aten that contain no other and run a kernel on a GPU."""
    threads = defaultdict(list)
    for event in operators:
        if event["name"].startswith("aten::"):
            threads[event["tid"]].append(event)
    for events in threads.values():
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        kernels = [event for event in events
                   if event["name"].removeprefix("aten::") not in _NO_KERNEL]
        for event, after in zip(kernels, [*kernels[1:], None], strict=True):
            if after is None or after["ts"] >= event["ts"] + event.get("dur", 0):
                yield event


def _elements(dims):
    if dims and isinstance(dims[0], list):
        return sum(map(_elements, dims))
    return math.prod(dims) if dims else 0


def _dtype(name):
    if isinstance(name, list):
        return next((word for word in map(_dtype, name) if word), "")
    found = str(name).removeprefix("c10::").strip().title().replace(" ", "")
    found = {"Bfloat16": "BFloat16", "Longint": "Long", "UnsignedChar": "Byte"}.get(found, found)
    return found if found in _SHORT else ""

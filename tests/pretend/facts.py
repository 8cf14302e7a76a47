"""What a process finds on the pretend node, as JSON: `facts.py one`, or with torchrun
`facts.py ranks FOLDER`. test_pretend_node.py says what each of it must be."""

import io
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

KB = 1024
SIZE = 300 * KB  # floats


def words(call) -> str:
    """The error that call() raises."""
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# one process


def devices() -> dict:
    before = torch.cuda.is_initialized()
    properties = torch.cuda.get_device_properties(1)
    return {"before": before, "available": torch.cuda.is_available(),
            "count": torch.cuda.device_count(), "name": torch.cuda.get_device_name(1),
            "total": properties.total_memory, "capability": torch.cuda.get_device_capability(),
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "peers": [torch.cuda.can_device_access_peer(0, 1),
                      torch.cuda.can_device_access_peer(0, 0)],
            "accelerator": str(torch.accelerator.current_accelerator()),
            "third": words(lambda: torch.cuda.get_device_name(2)),
            "nccl": torch.distributed.is_nccl_available()}


def tensors() -> dict:
    there = torch.ones(3, device="cuda")
    here = there.cpu()
    made = {"there": there, "sum": there + 1, "like": torch.zeros_like(there), "here": here,
            "back": here.to("cuda"), "second": torch.ones(3, device="cuda:1"),
            "module": torch.nn.Linear(2, 2).to("cuda").weight,
            "in a block": in_a_block(), "dtype": there.to(torch.float16)}
    here.add_(5)  # copies do not share what they hold
    file = io.BytesIO()
    torch.save(there, file)
    return {"devices": {name: str(one.device) for name, one in made.items()},
            "is_cuda": [there.is_cuda, here.is_cuda], "values": made["back"].tolist(),
            "stays": there.to("cuda").data_ptr() == there.data_ptr(),
            "file": "cuda:0" in str(file.getvalue()),
            "autocast": str(autocast(there).dtype)}


def in_a_block():
    with torch.device("cuda"):
        return torch.rand(2)


def autocast(tensor):
    with torch.autocast("cuda", torch.bfloat16):
        return tensor.unsqueeze(0) @ tensor.unsqueeze(1)


def streams_and_events() -> dict:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        inside = torch.cuda.current_stream() == side
        begin.record()
        time.sleep(0.05)
        end.record()
    side.wait_stream(main)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(int(0.02 * 1.41e9))
    slept = time.perf_counter() - began
    return {"inside": inside, "outside": torch.cuda.current_stream() == main, "slept": slept,
            "milliseconds": begin.elapsed_time(end), "query": end.query(),
            "untimed": words(lambda: torch.cuda.Event().elapsed_time(end))}


def random_numbers() -> dict:
    torch.cuda.manual_seed(7)
    first, state = torch.rand(4, device="cuda"), torch.cuda.get_rng_state()
    second = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    again = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(7)
    return {"seed": torch.equal(first, torch.rand(4, device="cuda")),
            "state": torch.equal(second, again) and not torch.equal(first, second)}


def memory() -> dict:
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.ones(SIZE, device="cuda")
    brief = torch.ones(2 * SIZE, device="cuda")
    del brief
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    stats, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
    found = {"held": held - start, "peak": peak - start, "other": torch.cuda.memory_allocated(1),
             "reserved": torch.cuda.memory_reserved(), "used": total - free,
             "stats": stats["allocated_bytes.all.peak"] == peak}
    on_host = kept.cpu()
    pinned = on_host.pin_memory()
    found["on host"] = torch.cuda.memory_allocated() - start - found["held"]
    found["pinned"] = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    found["is pinned"] = [pinned.is_pinned(), on_host.is_pinned(), str(pinned.device)]
    del kept, on_host, pinned
    torch.cuda.empty_cache()
    return {**found, "after": torch.cuda.memory_allocated() - start,
            "backward": peak_of_backward()}


def peak_of_backward() -> int:
    """Autograd's thread allocates, too: the gradient of the input, and the product's temporary."""
    value = torch.ones(SIZE, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    (value * 2).sum().backward()
    return torch.cuda.max_memory_allocated() - start


def errors() -> dict:
    values = torch.ones(3, device="cuda")
    too_far = torch.tensor([7], device="cuda")
    found = {"position": words(lambda: values[too_far]), "number": words(lambda: values[7]),
             "larger": words(lambda: torch.empty(10**14, dtype=torch.uint8, device="cuda")),
             "fraction": words(lambda: torch.cuda.set_per_process_memory_fraction(1.5))}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1e8 / total)
    return {**found, "limit": words(lambda: torch.ones(10**8, device="cuda").shape),
            "below": words(lambda: tuple(torch.ones(1000, device="cuda").shape))}


def profiled() -> dict:
    from torch.profiler import ProfilerActivity, profile

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both, profile_memory=True) as found:
        left, right = (torch.ones(64, 64, device="cuda") for _ in range(2))
        left @ right
    tree = list(found.profiler.kineto_results.experimental_event_tree())
    devices = set()
    while tree:
        event = tree.pop()
        if "Allocation" in str(event.tag):
            devices.add(str(event.extra_fields.device))
        tree += event.children
    return {"devices": sorted(devices), **kernels(found)}


def kernels(profiled) -> dict:
    """What the exported trace says of a GPU: names of kernels, their streams, launches joined."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel"]
    launches = {event["args"]["correlation"] for event in events
                if event.get("cat") == "cuda_runtime"}
    return {"kernels": sorted({event["name"] for event in found}),
            "streams": sorted({event["args"]["stream"] for event in found}),
            "joined": all(event["args"]["correlation"] in launches for event in found),
            "gloo": [event["name"] for event in events if "gloo" in event.get("name", "")]}


def fake_tensors() -> dict:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("cuda"):
        weight = torch.ones(4, 4, requires_grad=True)
        (weight @ torch.ones(4)).sum().backward()
        found = [str(weight.device), str(weight.grad.device)]
    with FakeTensorMode():
        found.append(str(torch.ones(1).device))
    return {"devices": found}


def sizes() -> dict:
    from labs.training.presets import preset

    found = preset()
    return {"name": found.name, "layers": found.layers, "hidden": found.hidden,
            "laptop": preset("laptop").hidden}


# ranks of torchrun


def ranks() -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    found = {"backend": dist.get_backend(), "sums": collectives(), "trace": traced()}
    mesh = init_device_mesh("cuda", (2,))
    model = fully_shard(torch.nn.Linear(8, 8).to("cuda"), mesh=mesh)
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    with torch.no_grad():
        model.weight.uniform_()  # a random operator on a DTensor
    group = dist.new_group(backend="nccl")
    return {**found, "drawn": 0 < model.weight.to_local().std().item() < 1,
            "shard": [str(model.weight.device), tuple(model.weight.to_local().shape)],
            "group": dist.get_backend(group), "another's": words(on_rank_0s_gpu)}


def collectives() -> list:
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    mine = torch.full((2,), dist.get_rank() + 1.0, device="cuda")
    total, whole = mine.clone(), torch.empty(4, device="cuda")
    dist.all_reduce(total)
    gather(whole, mine)
    part = torch.empty(2, device="cuda")
    scatter(part, whole)
    return [total.tolist(), whole.tolist(), part.tolist(), str(part.device)]


def traced() -> dict:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        collectives()
    return kernels(found)


def on_rank_0s_gpu():
    """As NCCL, only when the other rank's GPU is met: rank 0 uses its own."""
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2, device="cuda:0"))


def one() -> dict:
    """Every fact of one process; the limit comes last."""
    return {function.__name__: function() for function in (
        devices, tensors, streams_and_events, random_numbers, memory, profiled, fake_tensors, sizes,
        errors)}


if __name__ == "__main__":
    if sys.argv[1] == "one":
        print(json.dumps(one()))
    else:
        result = ranks()
        Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()

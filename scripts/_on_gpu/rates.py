"""What this machine's first GPU really does: products, copies, launched kernels, AdamW, attention.
Data sheets print peaks; what a step takes is predicted from rates such as these."""

import argparse
import json
import sys
import time

import torch
from _bench.memory_measured import in_fresh_process
from torch.nn import functional as F

from labs.workers import cuda

TERA, GIGA = 1e12, 1e9
LAUNCHES = 20_000


def seconds(work, times: int = 10) -> float:
    """The GPU's seconds for one call, of several after three that do not count."""
    for _ in range(3):
        work()
    return cuda.seconds(lambda: [work() for _ in range(times)]) / times


def products(sides=(1024, 2048, 4096, 8192)) -> dict:
    """Name -> (seconds, TFLOP/s) of square matrix products."""
    found = {}
    for dtype, tf32 in ((torch.bfloat16, False), (torch.float16, False), (torch.float32, False),
                        (torch.float32, True)):
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        for side in sides:
            a, b = (torch.randn(side, side, dtype=dtype, device="cuda") for _ in range(2))
            took = seconds(lambda a=a, b=b: a @ b)
            found[f"matmul {dtype} tf32={tf32} {side}"] = took, 2 * side**3 / took / TERA
    return found


def copies(elements=2**30) -> dict:
    """Name -> GB/s, bytes read and bytes written both counted where the GPU does both."""
    source = torch.empty(elements, device="cuda")
    target = torch.empty_like(source)
    both = 2 * source.nbytes / GIGA
    found = {"copy, read+written GB/s": both / seconds(lambda: target.copy_(source)),
             "add, read+written GB/s": both / seconds(lambda: torch.add(source, 1, out=target))}
    there = torch.empty(elements // 4, device="cuda")
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.empty(elements // 4, device="cpu")
        here = here.pin_memory() if pinned else here
        found[f"h2d {name} GB/s"] = here.nbytes / GIGA / seconds(
            lambda here=here: there.copy_(here, non_blocking=True), 3)
        found[f"d2h {name} GB/s"] = here.nbytes / GIGA / seconds(
            lambda here=here: here.copy_(there, non_blocking=True), 3)
    return found


def launches() -> dict:
    """Microseconds from one small kernel to the next: Python, torch and the driver."""
    one = torch.zeros(1, device="cuda")
    return {"us per launched small kernel":
            1e6 * clocked(lambda: [one.add_(1) for _ in range(LAUNCHES)]) / LAUNCHES}


def clocked(work) -> float:
    """Seconds of the CPU's clock until the GPU has done it: launching may take longer."""
    cuda.synchronize()
    begin = time.perf_counter()
    work()
    cuda.synchronize()
    return time.perf_counter() - begin


def optimizers(elements=2**24) -> dict:
    """AdamW in its three ways, on 16 large tensors and on 300 small ones."""
    found = {}
    for size, count, unit, per, name in ((elements, 16, 1e9, 16 * elements, "s per 1e9 parameters"),
                                         (1000, 300, 1e6, 300, "us per small tensor")):
        parameters = [torch.zeros(size, device="cuda", requires_grad=True)
                      for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for way in ({"foreach": True}, {"fused": True}, {"foreach": False}):
            optimizer = torch.optim.AdamW(parameters, **way)
            optimizer.step()
            found[f"AdamW {way}: {name}"] = unit * clocked(
                lambda step=optimizer.step: [step() for _ in range(5)]) / 5 / per
    return found


def attention(tokens=2048) -> dict:
    """Seconds of forward and backward of 4 x 16 heads, 64 wide."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        heads = torch.randn(4, 16, tokens, 64, dtype=dtype, device="cuda", requires_grad=True)
        found[f"attention fwd+bwd {dtype} 4x16x{tokens}x64 s"] = seconds(
            lambda q=heads: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
            .backward(), 5)
    return found


def measured(small: bool) -> dict:
    """In a process of its own: all of it, by name."""
    if small:
        return {**products((32,)), **copies(2**12), **launches(), **optimizers(2**10),
                **attention(32)}
    return {**products(), **copies(), **launches(), **optimizers(), **attention()}


def main(arguments: list) -> int:
    parser = argparse.ArgumentParser(prog="python -m _on_gpu.rates", description=__doc__)
    parser.add_argument("out", help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="small sizes")
    options = parser.parse_args(arguments)
    found = in_fresh_process(measured, options.small)
    with open(options.out, "w") as file:
        json.dump(found, file, indent=1)
    for name, value in found.items():
        print(f"{name:55s}", *(f"{one:.4g}" for one in (value if isinstance(value, tuple) else
                                                        (value,))))
    return 0


if __name__ == "__main__":
    # under its own name, so that other processes can unpickle its functions
    from _on_gpu import rates

    sys.exit(rates.main(sys.argv[1:]))

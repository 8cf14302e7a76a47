"""What one GPU computes and what its host starts: the rate of a large product, and the seconds from
one small kernel to the next. `scripts/plan --calibrate` reads both."""

from _preflight import ranks
from _preflight.found import Found, ok, stop

SIDES = {"cuda": 8192, "cpu": 1024}  # of the square matrices
LAUNCHES = {"cuda": 20_000, "cpu": 2_000}
_PRODUCTS = 10


def kernels() -> Found:
    """On one rank, on the first GPU, or on the CPU where there is none."""
    results, failure = ranks.tried(_measure, 1)
    if results is None:
        return stop("no product was computed", failure)
    [found] = results
    value = (f"{found['flops'] / 1e12:.3g} TFLOP/s in products of {found['side']:,} x "
             f"{found['side']:,} in {found['dtype']}, {1e6 * found['launch_s']:.3g} us from one "
             "small kernel to the next")
    if not found["gpu"]:
        value += " (on the CPU: says nothing about a GPU)"
    return ok(value, **found)


def _measure() -> dict:
    """On a rank: FLOP/s of the products, seconds of a launch, and of which GPU."""
    import torch

    from labs.meters import throughput
    from labs.workers import cuda, devices

    device = devices.device()
    is_gpu = device.type == "cuda"
    # Before Ampere there are no fast products in bf16.
    dtype = torch.float16 if is_gpu and cuda.capability() < (8, 0) else torch.bfloat16
    side, launches = SIDES[device.type], LAUNCHES[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    one = torch.zeros(1, device=device)

    def products():
        for _ in range(_PRODUCTS):
            a @ b

    def small():
        for _ in range(launches):
            one.add_(1)

    products()  # the first ones choose a kernel and raise the clock
    seconds = throughput.timed(products) / _PRODUCTS
    return {"gpu": cuda.name() if is_gpu else "", "bytes": cuda.total_memory() if is_gpu else 0,
            "dtype": str(dtype).removeprefix("torch."), "side": side,
            "flops": 2 * side**3 / seconds, "launch_s": throughput.timed(small) / launches}

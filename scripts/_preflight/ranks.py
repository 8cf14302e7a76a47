"""Real ranks: an all-reduce whose result is checked, and its bandwidth."""

import statistics
from functools import partial

from _preflight.found import Found, none, note, ok, stop
from labs.words import listed

SIZES = (1_000_000, 16_000_000, 256_000_000)  # bytes
HANG = 30  # seconds in which nothing moves
LEAST_SHARE = 0.5  # of what the table of GPUs says; below it something is wrong
_NO_PEERS = {"NCCL_P2P_DISABLE": "1"}


def all_reduce() -> Found:
    """An all-reduce on as many ranks as this machine's preset has, through the launcher."""
    from labs.training.presets import preset
    from labs.workers import devices

    ranks = preset().ranks
    plan = devices.plan(ranks)
    where = (f"{ranks} ranks on {'GPUs' if plan.device == 'cuda' else 'the CPU'}, "
             f"{'NCCL' if plan.library == 'nccl' else 'gloo'}")
    results, failure = tried(_reduce, ranks)
    if results is not None:
        return _judged(results, ranks, where)
    if plan.library != "nccl":
        return stop(where, f"Ranks cannot meet here. {failure}")
    results, _ = tried(_reduce, ranks, _NO_PEERS)
    if results is None:
        return stop(where, f"Ranks cannot meet, without GPUs reading each other's memory neither. "
                           f"{failure}")
    return stop(where, "GPUs cannot read each other's memory, though the driver says so: export "
                       "NCCL_P2P_DISABLE=1 and start again; all-reduces will be slower.",
                environment=_NO_PEERS)


def tried(function, ranks, environment=None):
    """(what `function` returned on each rank, "") or (None, why it failed)."""
    from labs import launch
    from labs.workers.failures import LaunchError

    try:
        return launch(function, ranks=ranks, quiet=True, hang_after=HANG, timeout=2 * HANG,
                      environment=environment or {}), ""
    except LaunchError as error:
        return None, str(error).strip().splitlines()[0]


def _reduce() -> list[float]:
    """On a rank: the sum of 0, 1, ... over the ranks, at both ends of a tensor of 4 MB."""
    import torch
    import torch.distributed as dist

    from labs.workers import devices

    tensor = torch.full((1_000_000,), float(dist.get_rank()), device=devices.device())
    dist.all_reduce(tensor)
    return [tensor[0].item(), tensor[-1].item()]


def _judged(results, ranks, where) -> Found:
    want = ranks * (ranks - 1) / 2
    wrong = [rank for rank, got in enumerate(results) if got != [want, want]]
    if wrong:
        return stop(where, f"The sum of 0 to {ranks - 1} is {want:g}, and rank {wrong[0]} got "
                           f"{listed(f'{end:g}' for end in results[wrong[0]])} at its tensor's "
                           "ends: this machine computes or copies wrongly, rent another one.",
                    wrong=wrong)
    return ok(f"{where}: the sum is right, started and ended in {results.seconds:.1f} s",
              ranks=ranks, seconds=results.seconds)


def bandwidth() -> Found:
    """Bus bandwidth of an all-reduce, as nccl-tests counts it: bytes · 2(N-1)/N / seconds."""
    from labs.training.presets import preset
    from labs.workers import devices

    ranks = preset().ranks
    if devices.are_shared(ranks):
        return none("ranks share one GPU: nothing is sent between GPUs")
    results, failure = tried(_measure, ranks)
    if results is None:
        return stop("no all-reduce came to its end", failure)
    found = [max(rank[number] for rank in results) for number in range(len(SIZES))]
    rates = {size: bus_bandwidth(size, seconds, ranks)
             for size, seconds in zip(SIZES, found, strict=True)}
    value = ", ".join(f"{rate / 1e9:.3g} GB/s at {size // 10**6} MB"
                      for size, rate in rates.items())
    if not devices.gpus():
        return ok(f"{value} (gloo on the CPU: says nothing about a GPU)", busbw=rates)
    return _compared(value, rates)


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Bytes per second of an all-reduce of `size` bytes, in nccl-tests' convention."""
    from labs.predictions.communication import traffic

    return traffic.all_reduce(size, ranks) / seconds


def _compared(value, rates) -> Found:
    from labs.fsdp.node_run import find_card

    card, ranks = find_card()
    wanted = card.busbw or card.nvlink or card.pcie
    measured = rates[SIZES[-1]]
    value += f"; {card.name}'s table has {wanted / 1e9:.0f} GB/s"
    if measured < LEAST_SHARE * wanted:
        return note(value, "Less than half of it: look at the row of links, and whether other "
                           "programs run; communication will look slower than on other nodes.",
                    busbw=rates, table=wanted)
    return ok(value, busbw=rates, table=wanted)


def _measure() -> list[float]:
    """On a rank: median seconds of an all-reduce of each size."""
    import torch
    import torch.distributed as dist

    from labs.meters import throughput
    from labs.workers import devices

    steps = {str(size): partial(dist.all_reduce, torch.ones(size // 4, device=devices.device()))
             for size in SIZES}
    return [statistics.median(seconds)
            for seconds in throughput.seconds_per_step(steps, rounds=5).values()]

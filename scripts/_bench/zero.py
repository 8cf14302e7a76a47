"""Throughput and peak memory of the solution's ZeRO stages beside those of the real libraries."""

import statistics

import torch
from _build.definitions import definitions

from _bench.progress import done, say
from labs.meters import memory, throughput
from labs.training import strategies
from labs.training.presets import preset
from labs.workers.launcher import launch
from labs.zero_stages import measuring

RANKS = (2, 4)
ROUNDS = 15
TRIES = 3  # of each peak: what a thread of gloo frees may go unseen
PAIRS = {
    "zero1": ("ZeroRedundancyOptimizer", "DeepSpeed 1"),
    "zero2": ("FSDP2 no reshard", "DeepSpeed 2"),
    "zero3": ("FSDP2", "DeepSpeed 3"),
    "zero3 prefetch": ("FSDP2", "DeepSpeed 3"),  # a layer more in memory, as FSDP2 has it
}


def run(arguments) -> dict:
    """By world size: ours over theirs, in throughput (more is better) and in bytes of the peak of a
    step (less is better), with the preset's batch and with one sequence per rank."""
    rounds, found = arguments.rounds or ROUNDS, {}
    for ranks in arguments.ranks or RANKS:
        size = preset("laptop", ranks=ranks)
        variants = _variants(size)
        say(f"{len(variants)} strategies take turns on {ranks} ranks, {rounds} rounds")
        seconds = _race(variants, size, rounds)
        peaks = {batch: _peaks(variants, preset("laptop", ranks=ranks, batch=batch), min(
            TRIES, rounds)) for batch in (size.batch, 1)}
        found[str(ranks)] = _result(size, seconds, peaks)
    done()
    return {"rounds": rounds, **{key: {ranks: one[key] for ranks, one in found.items()}
                                 for key in next(iter(found.values()))}}


def _variants(size) -> dict:
    solution = definitions("03_zero_stages", PRESET=size)
    found = {"zero1": solution.zero1, "zero2": solution.zero2, "zero3": solution.zero3,
             "zero3 prefetch": solution.zero3_prefetch}
    found |= {"ZeroRedundancyOptimizer": strategies.zero_redundancy,
              "FSDP2 no reshard": strategies.fsdp2_no_reshard, "FSDP2": strategies.fsdp2}
    if strategies.has_deepspeed():
        found |= {f"DeepSpeed {stage}": getattr(strategies, f"deepspeed{stage}")
                  for stage in (1, 2, 3)}
    return found


def _race(variants, size, rounds) -> dict:
    """Strategy -> seconds per step of each round; the slowest rank sets the pace."""
    def work():
        torch.set_num_threads(1)
        batch = measuring.batches(size, 1)[0]
        steps = {name: _step(*measuring.build(strategy, size), batch)
                 for name, strategy in variants.items()}
        return throughput.seconds_per_step(steps, rounds)

    results = launch(work, ranks=size.ranks, quiet=True, verify=False, device="cpu", hang_after=120)
    return {name: [max(times) for times in zip(*(r[name] for r in results), strict=True)]
            for name in variants}


def _step(module, optimizer, batch):
    def step():
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _peaks(variants, size, tries) -> dict:
    """Strategy -> bytes at the peak of a step. All ranks of this model hold the same, but for what
    gloo's threads happen to hold at that moment: the least of them is the strategy's own."""
    say(f"memory on {size.ranks} ranks, {size.batch} sequences each, {tries} times")

    def work():
        torch.set_num_threads(1)
        return {name: _peak(strategy, size, tries) for name, strategy in variants.items()}

    results = launch(work, ranks=size.ranks, quiet=True, verify=False, device="cpu", hang_after=120)
    return {name: min(result[name] for result in results) for name in variants}


def _peak(strategy, size, tries) -> int:
    batches = measuring.batches(size, 2)
    return memory.leanest([memory.record(lambda: measuring.build(strategy, size), batches)
                           for _ in range(tries)]).step_peak.total


def _result(size, seconds, peaks) -> dict:
    pairs = [(ours, theirs) for ours, all_theirs in PAIRS.items() for theirs in all_theirs
             if theirs in seconds]
    least, most = min(peaks), max(peaks)
    return {
        "model": str(size),
        "ratios": {_name(*pair): _ratio(seconds, *pair) for pair in pairs},
        "peaks": {_name(*pair): _share(peaks[most], *pair) for pair in pairs},
        "peaks_batch_1": {_name(*pair): _share(peaks[least], *pair) for pair in pairs},
        "tokens_per_s": {name: size.tokens / statistics.median(times)
                         for name, times in seconds.items()},
        "peak_bytes": peaks[most],
        "peak_bytes_batch_1": peaks[least],
    }


def _name(ours, theirs) -> str:
    return f"{ours}/{'DeepSpeed' if theirs.startswith('DeepSpeed') else theirs}"


def _ratio(seconds, ours, theirs) -> float:
    """Throughput of ours over theirs: the median of the rounds' own ratios."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def _share(peaks, ours, theirs) -> float:
    return peaks[ours] / peaks[theirs]


def table(result) -> str:
    """The result for a terminal."""
    lines = [f"{result['rounds']} rounds, the strategies take turns; medians"]
    for ranks, ratios in result["ratios"].items():
        lines += ["", result["model"][ranks],
                  f"{'ours / theirs':32s} {'throughput':>10} {'peak':>7} {'peak, batch 1':>14}"]
        lines += [f"{pair:32s} {ratio:>9.2f}x {result['peaks'][ranks][pair]:>6.2f}x "
                  f"{result['peaks_batch_1'][ranks][pair]:>13.2f}x"
                  for pair, ratio in ratios.items()]
        lines += [f"  {name:30s} {rate:>10,.0f} tokens/s"
                  for name, rate in result["tokens_per_s"][ranks].items()]
    return "\n".join(lines)

"""Throughput and peak memory of the solution's ZeRO stages, compared with the real libraries."""

import statistics

from _build.definitions import definitions

from _bench.progress import done, say
from labs.checks.comparison import compare
from labs.training import strategies
from labs.training.presets import preset

RANKS = (2, 4)
ROUNDS = 15
TRIES = 3  # of each peak: the profiler sometimes misses frees on gloo's threads
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
        variants, tries = _variants(size), min(TRIES, rounds)
        say(f"{len(variants)} strategies take turns on {ranks} ranks, {rounds} rounds")
        # on the CPU, where the peak is exact and a machine with GPUs gives the same table
        measured = compare(variants, size, tries=tries, rounds=rounds, device="cpu",
                           quiet=True)
        say(f"memory on {ranks} ranks with one sequence each, {tries} times")
        small = compare(variants, preset("laptop", ranks=ranks, batch=1), tries=tries,
                        device="cpu", quiet=True)
        seconds = {name: result.rounds for name, result in measured.results.items()}
        found[str(ranks)] = _result(size, seconds, _peaks(measured), _peaks(small))
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


def _peaks(comparison) -> dict[str, float]:
    """Strategy -> bytes at the peak of a step."""
    return {name: result.report.step_peak.total for name, result in comparison.results.items()}


def _result(size, seconds, peaks, peaks_batch_1) -> dict:
    pairs = [(ours, theirs) for ours, all_theirs in PAIRS.items() for theirs in all_theirs
             if theirs in seconds]
    return {
        "model": str(size),
        "ratios": {_name(*pair): _ratio(seconds, *pair) for pair in pairs},
        "peaks": {_name(*pair): _share(peaks, *pair) for pair in pairs},
        "peaks_batch_1": {_name(*pair): _share(peaks_batch_1, *pair) for pair in pairs},
        "tokens_per_s": {name: size.tokens / statistics.median(times)
                         for name, times in seconds.items()},
        "peak_bytes": peaks,
        "peak_bytes_batch_1": peaks_batch_1,
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

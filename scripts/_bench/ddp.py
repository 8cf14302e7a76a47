"""Throughput of the solution's data-parallel modules, as a share of torch DDP's."""

import statistics

from _build.definitions import definitions

from _bench.progress import done, say
from labs.checks import comparison
from labs.manual_ddp.variants import as_strategy
from labs.training.presets import preset
from labs.training.strategies.torch_strategies import torch_ddp

RANKS = (2,)
ROUNDS = 31


def run(arguments) -> dict:
    """Throughput of each variant, and its ratio to torch DDP's, for the first world size given."""
    ranks = (arguments.ranks or RANKS)[0]
    size = preset("laptop", ranks=ranks)
    solution = definitions("02_manual_ddp", PRESET=size)
    variants = {
        "one call per parameter": solution.ManualDDP,
        "bucketed, after backward": solution.bucketed,
        "bucketed, overlapped": solution.overlapped,
        "torch DDP": lambda model: torch_ddp(model, size.cap_bytes),
        "torch DDP, default buckets": torch_ddp,
    }
    rounds = arguments.rounds or ROUNDS
    say(f"{len(variants)} variants take turns on {ranks} ranks, {rounds} rounds")
    chosen = {name: as_strategy(wrap) for name, wrap in variants.items()}
    compared = comparison.compare(chosen, size, measure_memory=False, rounds=rounds, repeat=2,
                                  quiet=True)
    done()
    seconds = {name: found.rounds for name, found in compared.results.items()}
    ratios = {name: statistics.median(theirs / ours for ours, theirs in
                                      zip(times, seconds["torch DDP"], strict=True))
              for name, times in seconds.items()}
    return {"ranks": ranks, "model": str(size), "rounds": rounds,
            "tokens_per_s": {name: size.tokens / statistics.median(times)
                             for name, times in seconds.items()},
            "throughput_ratio_to_torch_ddp": ratios}


def table(result) -> str:
    """The result for a terminal."""
    lines = [result["model"], f"{result['rounds']} rounds, the variants take turns; medians",
             f"{'variant':28s} {'tokens/s':>10} {'of torch DDP':>13}"]
    for name, rate in result["tokens_per_s"].items():
        lines.append(f"{name:28s} {rate:>10,.0f} "
                     f"{result['throughput_ratio_to_torch_ddp'][name]:>12.2f}x")
    return "\n".join(lines)

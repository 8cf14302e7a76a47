"""The CUDA half of scripts/bench memory, into a file; it fails if our prediction is far off."""

import argparse
import json
import sys
from dataclasses import replace

from _bench import __main__ as bench
from _bench import memory, memory_cases

FAR_OFF = 10.0  # per cent, of the dry run's worst case
CASES = 8  # of 24: as many as there are minutes for


def main(arguments: list) -> int:
    parser = argparse.ArgumentParser(prog="python -m _on_gpu.bench_memory", description=__doc__)
    parser.add_argument("out", help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="3 cases, of the CPU's sizes")
    options = parser.parse_args(arguments)
    cases = str(3 if options.small else CASES)
    result = memory.run(bench.check(["memory", "--device", "cuda", "--cases", cases]),
                        small_grid if options.small else memory_cases.grid)
    with open(options.out, "w") as file:
        json.dump(result, file, indent=1)
    print(memory.table(result))
    # cuBLAS's workspaces alone are larger than the small models: nothing to judge there
    return int(not options.small and result["methods"]["dry run"]["worst_pct"] > FAR_OFF)


def small_grid(large: bool) -> list[memory_cases.Case]:
    """The GPU's cases with the CPU's sizes and 64 tokens. They say so themselves, because other
    processes build them."""
    return [replace(case, large=False, sequence=64) for case in memory_cases.grid(large)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

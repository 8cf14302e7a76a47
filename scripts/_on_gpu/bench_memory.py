"""The CUDA half of scripts/bench memory, into a file; it fails if our prediction is far off."""

import argparse
import json
import sys

from _bench import __main__ as bench
from _bench import memory, memory_cases

FAR_OFF = 10.0  # per cent, of the dry run's worst case


def main(arguments: list) -> int:
    parser = argparse.ArgumentParser(prog="python -m _on_gpu.bench_memory", description=__doc__)
    parser.add_argument("out", help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="3 cases, of the CPU's sizes")
    options = parser.parse_args(arguments)
    if options.small:
        memory_cases.LARGE.update(memory_cases.SIZES)
    cases = ["--cases", "3"] if options.small else []
    result = memory.run(bench.check(["memory", "--device", "cuda", *cases]))
    with open(options.out, "w") as file:
        json.dump(result, file, indent=1)
    print(memory.table(result))
    return int(result["methods"]["dry run"]["worst_pct"] > FAR_OFF)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

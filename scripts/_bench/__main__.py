"""Command line of scripts/bench."""

import argparse
import contextlib
import importlib
import json
import os
import platform
import sys

from _arguments import positive

BENCHES = {
    "launch": "launching ranks: labs.launch beside torch.multiprocessing.spawn and accelerate",
    "ddp": "the solution's data-parallel modules beside torch's DDP, on CPU ranks",
    "zero": "the solution's ZeRO stages beside torch's and DeepSpeed's: throughput and peak memory",
    "faults": "what goes wrong on ranks, through labs.launch, spawn, accelerate and elastic",
    "memory": "the peak of a training step: predicted, by us and by others, and measured",
    "kinds": "the dry run on jobs of many kinds: predicted or refused, and measured",
    "explorer": "the memory explorer: from a slider's move to its drawing",
    "trace": "reading a trace of 100 MB: seconds, and memory at its peak",
    "steptime": "the model of a step's time on published runs that it was not fitted to",
    "gpu-runs": "the planner on public runs on real GPUs: seconds, memory, what fits, the choice",
    "pipeline": "simulated pipeline schedules on published bubble rates",
    "soak": "500 launches with faults mixed in, in one kernel: what grows",
}


def main() -> int:
    arguments = check(sys.argv[1:])
    bench = importlib.import_module("_bench." + arguments.bench.replace("-", "_"))
    with _only_json_on_stdout(arguments.json) as out:
        result = bench.run(arguments)
        result["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
        print(json.dumps(result) if arguments.json else bench.table(result), file=out)
    return 0


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    listed = "\n".join(f"  {name:10s}{what}" for name, what in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure one thing, interleaved with what it is compared with, in one run.",
        epilog=f"benches:\n{listed}\n\nOnly ratios measured in one run can be compared; "
               "these machines' seconds drift.\n\n"
               "gpu-runs also asks accelerate, and where they are installed in .venv:\n"
               "  DeepSpeed     pip install 'data-parallel-workbook[third-party]'\n"
               "  mlsysim       pip install mlsysim==0.3.0\n"
               "  llm-analysis  pip install --no-deps llm-analysis==0.2.2 fire termcolor")
    parser.add_argument("bench", choices=list(BENCHES))
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    count = positive(int)
    parser.add_argument("--rounds", type=count, help="turns of each variant (default: the bench's)")
    parser.add_argument("--ranks", type=count, nargs="+", help="world sizes (default: the bench's)")
    memory = parser.add_argument_group("of the bench memory")
    memory.add_argument("--only", nargs="+", help="cases whose name contains one of these; "
                                                  "dryrun_70b_1024, dryrun_8b_8")
    memory.add_argument("--cases", type=count, help="that many cases, spread over the grid")
    memory.add_argument("--device", choices=["cpu", "cuda"],
                        help="real ranks on the CPU, or one GPU (default: a GPU, if any)")
    parser.add_argument("--mb", type=positive(float),
                        help="of the bench trace: size of the file (100)")
    parser.add_argument("--rows", metavar="FILE",
                        help="of the bench steptime: published runs, a JSON file like "
                             "labs/predictions/step_time/published_runs.json (default: that one); "
                             "of pipeline: a CSV or JSON file like "
                             "labs/predictions/pipelines/zero_bubble_table_9.csv (that one); of "
                             "gpu-runs: a folder like labs/predictions/gpu_runs/rows (that one)")
    parser.add_argument("--held-out", action="store_true",
                        help="of gpu-runs: also predict nanotron's rows of each model with "
                             "constants fitted to its other models, and rows of other code bases "
                             "as if those were not known")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _only_json_on_stdout(wanted):
    """With --json, what anything else prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    if wanted:
        sys.stdout.flush()
        os.dup2(2, 1)  # of ranks and other processes
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield out
    out.flush()


if __name__ == "__main__":
    sys.exit(main())

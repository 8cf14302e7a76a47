"""The parts of scripts/on-gpu: what each runs, and how long it may take."""

import sys
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# name: also of its log. what: one line for people. command: its arguments after Python's name;
# {out} is the folder of the results. seconds: what it takes; up to bench-memory measured on an H200
# (experiments/reference/h200), after it estimated for 8 A100. limit: seconds after which it is
# ended; wide, because a T4's machine has few cores. needs: modules without which it is skipped.
# small: more arguments with --small.
Part = namedtuple("Part", "name what command seconds limit needs small")


def _part(name, what, command, seconds, needs=(), small=(), limit=None):
    return Part(name, what, tuple(command), seconds, limit or 3 * seconds + 120, tuple(needs),
                tuple(small))


def _solution(name, seconds, limit=None):
    """seconds: predicted for 8 A100, until a reference run on such a node says better."""
    return _part(name, f"solutions/{name}.py as a script", [f"solutions/{name}.py"], seconds,
                 limit=limit)


PARTS = (
    _part("machine", "the GPUs, their links, and the versions of everything",
          ["-m", "_unattended.machine", "{out}/machine.json"], 10),
    _part("rates", "what one GPU does, beside its data sheet: products, copies, AdamW",
          ["-m", "_on_gpu.rates", "{out}/rates.json"], 20, small=["--small"]),
    _part("faults", "the launcher's faults on NCCL: what goes wrong on ranks, and what is left",
          ["-m", "_on_gpu.launcher_faults", "{out}/faults.json"], 45, small=["--small"]),
    _part("one-rank", "one rank of 8 in a fake process group, for 1B, 7B and 8B: predicted, "
                      "measured", ["-m", "_on_gpu.one_rank", "{out}/one_rank.json"], 105,
          small=["--small"]),
    _part("gpu-tests", "the tests marked gpu that take seconds",
          ["-m", "_on_gpu.gpu_tests", "{out}/gpu_tests.xml"], 70, ["pytest"], ["--small"]),
    _part("bench-memory", "scripts/bench memory on CUDA, 8 cases: predicted peaks, measured ones",
          ["-m", "_on_gpu.bench_memory", "{out}/bench_memory.json"], 135, small=["--small"]),
    # the longest: if it hangs, half of the half hour is left for the others
    _solution("04_fsdp", 900, limit=1000),
    _solution("01_memory_math", 60), _solution("03_zero_stages", 180),
    _solution("02_manual_ddp", 120), _solution("00_start_here", 60),
    _solution("05_fsdp_profiling", 180), _solution("06_scaling", 280),
    _solution("07a_tensor_parallel", 105), _solution("07b_pipeline_parallel", 90),
    _solution("07c_sharding_in_jax", 30), _solution("07d_sharded_muon", 15),
    _solution("08_surviving_failure", 240), _solution("09_mixture_of_experts", 90),
    _part("long-gpu-tests", "the tests marked gpu that take minutes: every check of every solution",
          ["-m", "_on_gpu.gpu_tests", "{out}/long_gpu_tests.xml", "--long"], 600, ["pytest"],
          ["--small"]),
)


def command(part: Part, out: Path, small: bool) -> list:
    """The part's command line."""
    rest = [argument.replace("{out}", str(out)) for argument in part.command]
    return [sys.executable, *rest, *(part.small if small else ())]

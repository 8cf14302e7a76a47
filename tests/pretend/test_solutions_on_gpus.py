"""Every solution on the pretend node, with one GPU that its ranks share, through gloo, and with
several, through NCCL: what it prints, where its ranks run.

Checks are not run, and what is repeated is done once (`pretend_gpus/quick.py`): other tests do it.
The node has no Jupyter, as a rented one may not.
The last test says which lines that only a GPU reaches are run by nothing here.
"""

import atexit
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import _notebooks
import leaks
import psutil
import pytest
from pretend import node
from pretend.cells import END

sys.path += node.PATH
import gpu_lines  # noqa: E402

SOLUTIONS = {_notebooks.number(path.stem): path
             for path in _notebooks.paths(node.ROOT / "solutions")}
# How many several are: 2, or 8 where that takes few CPU seconds. To run a solution with both showed
# nothing more: noted line by line, with one GPU and with this number it runs every line of a GPU's
# that it runs with any (with 2, the four ranks of 00 share GPUs, as with one). With 8, each rank
# takes its time on the same cores: 04 and 06 took about 100 CPU seconds more.
SEVERAL = {"00": 8, "01": 8}
RUNS = [(number, gpus) for number in SOLUTIONS for gpus in (1, SEVERAL.get(number, 2))]
NCCL, GLOO = "cpu:gloo,cuda:nccl", "gloo"
# What runs on the CPU all the same, and why: number of GPUs -> launches.
ON_CPU = {
    "00": {1: 6},  # the ring, because gloo cannot send from a GPU that ranks share
    "03": {1: 1, 2: 1},  # the bytes that gloo puts on the wire
    # state dicts: gloo cannot gather a DTensor of GPUs (pytorch 132471); a slowed node's ranks
    "04": {1: 5, 2: 1},
    "06": {1: 1},  # finetune.py: Accelerate wants a GPU for each rank
    # ring attention, which sends, on the ranks that share GPUs; its memory, and that of three ways,
    # only with several GPUs
    "07a": {1: 4, 2: 8}}
SAYS = {
    # with no Jupyter: a picture, a launch's output, a failure's account, a guess beside its result
    "00": ["GPU 0: {name}", "I compute on cuda:{last}", "{reason}", "rank 0 │ I am one of",
           "MB sent by each rank to all-reduce 12 MB", "launch raised RanksStuck: deadlock",
           "your guess: 60", "✓ Exercise 0.1", "✓ Exercise 0.5"],
    "01": ["{ranks} ranks"],
    "02": ["{preset}: {ranks} ranks, GPT-2"],
    "03": ["{preset}: {ranks} ranks, GPT-2"],
    "04": ["{preset}: {ranks} ranks, GPT-2"],
    "05": ["{preset}: {ranks} ranks, GPT-2", "rank 0 ({backend})"],
    # a job by torchrun and one by Accelerate, and what they were
    "06": ["16 steps on 2 ranks, loss", "exit code 0 after", "{accelerate}: ", "the library says",
           "Nothing reduced: each rank", "GPT-2 on one GPU of this machine", "README.md: "],
    "07a": ["4 ranks: 2.83 MB", "{context_parallel}"],
    "07b": ["launch raised RanksStuck", "one_f_one_b, on 4 ranks: ",
            "torch's ScheduleZBVZeroBubble"],
    "07c": ["losses without the sum of y: "],
    "07d": ["✓ Exercise 7.13", "shards of the mean: [0.0, 2.0] [4.0, 6.0]"],
    "08": ["the largest difference of a loss is 0;", "3 kills while it saved, 0 lost",
           "2 restarts; exit code 0", "50 of 50 losses are equal to the last bit",
           "cannot be shown here. The pretend node has no hosts.",
           "parameters in the end are equal"]}
REASONS = {1: "4 ranks share 1 GPU with gloo", 8: "GPU per rank with NCCL (8 found)"}
HTML = re.compile(r"<(div|svg|table|p|span)\b")
NBYTES = {"04": 1.5e7}  # of each GPU's memory, for the labs that fill it
WRITES = {"06", "08"}  # scripts and their results, into the folder where it runs
# Tests that run more of the GPU's lines: (pretend GPUs, arguments of pytest)
PARTS = [
    (0, ["tests/workers/test_nccl.py", "tests/meters/test_trace_gpu.py",
         "tests/meters/test_host_copies.py", "tests/meters/test_memory_on_gpu.py",
         "tests/fsdp/test_node.py",
         "-k", "nccl or trace_gpu or host_copies or on_gpu or too_much_of_the_host"]),
    (2, ["-m", "gpu", "tests/workers/test_cuda.py", "tests/memory_math/test_pictures.py",
         "-k", "cuda or rank_states"])]
# Part of a line that nothing here runs -> why
NOT_RUN = {
    '"gpu_memcpy", "gpu_memset") and not _is_flight': "of a file: tests of 5.10's wrong answers"}


@dataclass(frozen=True)
class Run:
    """What one solution did. ended: whether it came to its end; launches: (rank, ranks, device,
    backend) -> how often; left: what is there after the process."""

    ended: bool
    printed: str
    errors: str
    launches: Counter
    left: list[str]


def run(number: str, gpus: int) -> Run:
    """Runs a solution on the pretend node, with those that have GPUs of the same kind and write
    nothing where they run."""
    nbytes, writes = NBYTES.get(number), number in WRITES
    return _run_all(tuple(other for other in SOLUTIONS if NBYTES.get(other) == nbytes
                          and (other in WRITES) == writes and (other, gpus) in RUNS),
                    gpus, nbytes, writes)[number]


@functools.cache
def _run_all(numbers, gpus, nbytes, writes) -> dict[str, Run]:
    """Runs solutions in one process; its temporary files are in a directory of their own."""
    with tempfile.TemporaryDirectory() as folder:
        solutions = [SOLUTIONS[number] for number in numbers]
        ranks, here = Path(folder, "ranks"), Path(folder, "here")
        ranks.touch()
        here.mkdir()
        done = subprocess.run(
            [sys.executable, node.HERE / "cells.py", *solutions], capture_output=True, text=True,
            timeout=900, cwd=here if writes else node.ROOT, env=node.environment(
                gpus, nbytes=nbytes, TMPDIR=folder, PRETEND_QUICK="1",
                PRETEND_NO_JUPYTER="1", PRETEND_RANKS=str(ranks), PRETEND_LINES=_notes(),
                MPLBACKEND="agg"))
        leaks.until(lambda: not _processes(folder), 5)
        left = _processes(folder) + [str(path) for path in Path(folder).glob("pymp-*")]
        assert done.returncode == 0, done.stderr[-3000:]
        return {number: Run(f"{END} {SOLUTIONS[number]} True" in done.stdout, *parts,
                            _launches(lines), left)
                for number, *parts, lines in zip(numbers, _parts(done.stdout),
                                                 _parts(done.stderr), _parts(ranks.read_text()),
                                                 strict=True)}


def _parts(text) -> list[str]:
    """What each solution has left in a text in which a line ends what is a solution's."""
    *parts, rest = re.split(rf"^{END} .*\n", text, flags=re.MULTILINE)
    return [*parts[:-1], parts[-1] + rest]


@functools.cache
def _notes() -> str:
    """The directory in which all that is run here notes which of the GPU's lines it ran."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _processes(folder) -> list[str]:
    """The processes that were started with this directory for temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == folder:
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found


def _launches(lines: str) -> Counter:
    found = Counter(tuple(line.split()) for line in lines.splitlines())
    return Counter({(int(rank), int(ranks), device, backend): times
                    for (rank, ranks, device, backend), times in found.items()})


@pytest.mark.slow
@pytest.mark.parametrize(("number", "gpus"), RUNS)
def test_solution_runs_on_the_pretend_node(number, gpus):
    done = run(number, gpus)
    assert done.ended, done.errors[-3000:]
    said = done.errors + done.printed
    at = said.find("Traceback")
    assert at < 0, said[max(0, at - 500):at + 3000]
    assert "✗ Exercise" not in done.printed and "cannot be judged" not in done.printed
    assert not HTML.search(done.printed)
    assert done.left == []
    words = {"name": "Tesla T4" if gpus == 1 else "A100-SXM4-80GB", "last": gpus - 1,
             "reason": REASONS.get(gpus), "preset": "one-gpu" if gpus == 1 else "node",
             "ranks": max(2, gpus), "backend": GLOO if gpus == 1 else "nccl",
             "context_parallel": "context_parallel on 2 ranks, cuda with "
                                 f"{GLOO if gpus == 1 else 'nccl'}",
             "accelerate": ("DistributedType.NO, world size 1" if gpus == 1 else
                            f"DistributedType.FSDP, world size {gpus}")}
    for line in SAYS.get(number, ()):
        assert line.format(**words) in done.printed
    _assert_on_gpus(done.launches, gpus, ON_CPU.get(number, {}).get(gpus, 0))


def _assert_on_gpus(launches, gpus, on_cpu):
    """Each rank has the GPU of its number, or shares one; NCCL where it has it for itself."""
    assert launches
    cpu = sum(times for (rank, _, device, _), times in launches.items()
              if device == "cpu" and rank == 0)
    assert cpu == on_cpu
    for rank, ranks, device, backend in launches:
        if device != "cpu":
            assert device == f"cuda:{rank % gpus}"
            assert backend == (NCCL if ranks <= gpus else GLOO)
    assert {rank for rank, *_ in launches} >= set(range(gpus))


@pytest.mark.gate  # what runs on the node needs minutes; a name that has moved shows at once
def test_what_is_cut_short_exists():
    from pretend_gpus import quick

    tables = [*quick.ALWAYS_LEFT_OUT.items(), *quick.LEFT_OUT.items(), *quick.CONSTANTS.items()]
    assert not [f"{module} has no {name}" for module, names in tables for name in names
                if not hasattr(import_module(module), name)]


@pytest.mark.slow
@pytest.mark.timeout(3000)  # by itself it runs all of the above
def test_every_line_that_only_a_gpu_reaches_is_run():
    for number, gpus in RUNS:
        run(number, gpus)
    for gpus, arguments in PARTS:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=node.ROOT,
                              capture_output=True, text=True, timeout=400,
                              env=node.environment(gpus, PRETEND_LINES=_notes()))
        assert done.returncode == 0, done.stdout[-3000:]
    found, lines = gpu_lines.noted(_notes()), gpu_lines.all_lines()
    missing = [f"{name}:{line}  {text}" for name, numbers in lines.items()
               for line, text in _texts(name, numbers - found.get(name, set()))
               if not any(part in text for part in NOT_RUN)]
    assert not missing, (
        f"{len(missing)} of {sum(map(len, lines.values()))} lines that only a GPU reaches are run "
        "by no test: run them on the pretend node, in a test that PARTS names, or say in NOT_RUN "
        "why that cannot be.\n" + "\n".join(missing))


def _texts(name, numbers) -> list[tuple[int, str]]:
    lines = (node.ROOT / name).read_text().splitlines()
    return [(number, lines[number - 1].strip()) for number in sorted(numbers)]


def test_a_module_is_patched_also_where_its_lines_are_noted(tmp_path):
    names = ["labs.fsdp.memory_limits", "labs.workers.cuda", "labs.faults.slow_rank"]
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from importlib.util import find_spec; "
         "print([find_spec(name).loader.exec_module.__module__ for name in sys.argv[1:]])", *names],
        capture_output=True, text=True, cwd=node.ROOT,
        env=node.environment(2, PRETEND_QUICK="1", PRETEND_LINES=str(tmp_path)))
    assert done.stdout == "['pretend_gpus', 'gpu_lines', 'pretend_gpus']\n", done.stderr

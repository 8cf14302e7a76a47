"""Exercise 5.11: profile_fsdp.py, started on ranks as torchrun does it: which steps its traces
have, with which labels and stacks."""

import gzip
import json
import re
from pathlib import Path

from labs.checks.scripts import forked, run_end
from labs.checks.scripts.files import waits_for
from labs.checks.verdicts import Wrong, check
from labs.words import counted, listed
from labs.workers import processes
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

RANKS = 2
SMALL = {"batch": 1, "layers": 2, "hidden": 16}
LABELS = ("forward", "backward", "optimizer")
# None of them is the script's own default; in the second, steps follow those that are recorded.
CASES = ({"steps": 5, "wait": 2, "warmup": 2, "active": 1},
         {"steps": 8, "wait": 1, "warmup": 1, "active": 3})
_STEP = re.compile(r"ProfilerStep#(\d+)$")
_SCHEDULE = ("torch.profiler.schedule(wait=…, warmup=…, active=…, repeat=1), and profiler.step() "
             "at the end of each step.")
_HINTS = {"is not defined": "Is each name that you use made above its use, or imported?",
          "No such file": "options.traces is a folder, which is there already."}


@check("5.11", _HINTS)
def check_profile_fsdp(script: str = "profile_fsdp.py"):
    """Each of 2 ranks must write one trace of the active steps alone, with the labels of each step,
    FSDP's collectives and Python's stacks, train in every step, and fail where a rank raises."""
    if waits := waits_for("5.11", script):
        return waits
    for numbers in CASES:
        when = " ".join(f"--{name} {number}" for name, number in numbers.items())
        with status(when), processes.temporary_folder() as folder:
            run = forked.run(script, (*forked.options(numbers | SMALL), "--traces", str(folder)),
                             RANKS, option=None, shared=folder)
            _judge(run, when, numbers, Path(folder))
    with status("2 ranks, of which one fails"), processes.temporary_folder() as folder:
        run_end.judge_failure(forked.run(
            script, (*forked.options(CASES[0] | SMALL), "--traces", str(folder)), RANKS,
            FAILING_RANK, option=None, shared=folder))
    return ("each rank's trace has the active steps and no other, with the labels, FSDP's "
            "collectives and the lines that called them; when a rank fails, the job fails")


def _judge(run, when, numbers, folder):
    # A profiler without a schedule keeps the stacks of all steps, and of the imports in them, and
    # writes them for longer than a run may take.
    if run.code is None and min(run.batches) >= numbers["steps"]:
        raise Wrong(f"{when}: all batches were trained on, but after {run.seconds:.0f} s the "
                    "traces were not written yet: more than the active steps was recorded",
                    _SCHEDULE, code="wrong_steps")
    run_end.judge_end(run, when)
    for rank, record in enumerate(run.records):
        if len(record.steps) != numbers["steps"]:
            raise Wrong(f"{when}: rank {rank} took {counted(len(record.steps), 'optimizer step')}",
                        "All batches are trained on, whether a step is recorded or not.",
                        code="wrong_count")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if len(files) != RANKS:
        raise Wrong(f"{when}: {counted(len(files), 'file')} in the folder of --traces, and there "
                    f"are {RANKS} ranks" + (f": {listed([path.name for path in files])}"
                                            if files else ""),
                    "on_trace_ready is called when the active steps are over; each rank's file "
                    "needs a name of its own, and repeat=1 ends after the first.",
                    code="wrong_files")
    for path in files:
        _judge_trace(f"{when}: {path.name}", _events(path, when), numbers, Path(run.script).name)


def _events(path, when) -> list[dict]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt") as file:
            return json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError):
        raise Wrong(f"{when}: {path.name} is no trace", "profiler.export_chrome_trace(path) writes "
                    "one; a path that ends in .gz is compressed.", code="unreadable_file") from None


def _judge_trace(what, events, numbers, script):
    spans = [event for event in events if event.get("ph") == "X"]
    found = sorted({int(step[1]) for span in spans
                    if (step := _STEP.match(span.get("name", "")))})
    first = numbers["wait"] + numbers["warmup"]
    wanted = list(range(first, first + numbers["active"]))
    # Invariant: the active steps and no other. Catches a profiler without a schedule, which
    # records all steps, and one whose step() is never called.
    if found != wanted:
        raise Wrong(f"{what} has " + (f"steps {listed(found)}" if found else "no step's mark")
                    + f"; the active ones are {listed(wanted)}", _SCHEDULE, code="wrong_steps")
    for label in LABELS:
        often = sum(span.get("name") == label and span.get("cat") == "user_annotation"
                    for span in spans)
        if often != len(wanted):
            raise Wrong(f"{what} has the label {label!r} {often} times in "
                        f"{counted(len(wanted), 'step')}",
                        f'with record_function("{label}"): once in each step.',
                        code="missing_label")
    if not any("all_gather" in span.get("name", "") for span in spans):
        raise Wrong(f"{what} has no all-gather", "The activities include the CPU's.",
                    code="missing_collective")
    # Invariant: stacks name the student's own file. Catches with_stack left out.
    if not any(span.get("cat") == "python_function" and script in span.get("name", "")
               for span in spans):
        raise Wrong(f"{what} has no stack: nothing says which line of {script} called",
                    "with_stack=True", code="no_stacks")

"""Exercise 0.5: a script that starts its own ranks, run as a terminal would run it."""

import re

import torch

from labs.checks.job_end import judge_failed_job, judge_left
from labs.checks.numbers import Cause, judge_number
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.start_here import scripts
from labs.words import named_ranks
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

_MEET = ("init_process_group waits until world_size ranks have come: all ranks give the same "
         "world_size and the same place to meet, and each its own rank.")
_HINTS = {
    "bootstrapping phase": "Each rank imports the script again: what starts ranks stands below "
                           'if __name__ == "__main__":.',
    "EADDRINUSE": "Another program listens at this port: choose a free one.",
    "ddress already in use": "Another program listens at this port: choose a free one.",
    "positional argument": "mp.spawn(work, args=(a,), nprocs=N) calls work(rank, a).",
    "Can't get attribute": "mp.spawn imports the script again and looks the function up there: "
                           "define it at the left margin.",
    "Can't pickle": "mp.spawn sends the function by its name: define it at the left margin.",
    "environment variable": "Without a place to meet, torch asks for MASTER_ADDR and MASTER_PORT: "
                            "give init_method.",
    "Default process group has not been initialized": "Call dist.init_process_group first, on "
                                                      "every rank.",
    "Connection closed by peer": "A rank had ended while another waited for it: all ranks call the "
                                 "same collectives, also `if rank == 0`."}


@check("0.5")
def check_script(script: str):
    """`python script.py N` must start N ranks, print the sum of what they drew, and end: with an
    exit code other than 0 where a rank fails, without a process left behind, and next to another
    run of the same script."""
    if not isinstance(script, str):
        raise Wrong(f"the script is {kind_of(script)}, not a text",
                    'Write script = HEAD + """...""".', code="wrong_type")
    try:
        compile(script, "script.py", "exec")
    except SyntaxError as error:
        raise Wrong(f"the script is not Python: line {error.lineno}: {error.msg}",
                    "The text between the quotes is a file of its own.",
                    code="not_python") from None
    with status("2 and 3 ranks at the same time"):
        two, three, same = scripts.run_two_at_once(script)
    # One port or file for two runs: the second fails, or disturbs the first.
    if same:
        raise Wrong(f"two runs at the same time meet at the same place, {same}",
                    "Let each run choose its own: a free port, or a file in a folder that tempfile "
                    "made. The ranks get it as an argument.", code="same_meeting_place")
    for run in filter(None, (two, three)):
        _judge_run(run)
    # A rank raises when it has joined: catches a script that hides the failure, or waits for ever.
    with status("2 ranks, of which one fails"):
        judge_failed_job(scripts.run_failing(script), FAILING_RANK, "script",
                         "mp.spawn raises where a rank raised: let it. Processes that you "
                         "start and join yourself have an exitcode each.",
                         "the others wait for it", "mp.spawn with join=True ends the others.")
    return ("the right sum on 2 and on 3 ranks, also at the same time; where a rank fails, the "
            "script fails; nothing is left behind")


def _judge_run(run):
    when = f"`python script.py {run.ranks}`"
    if run.code is None:
        joined = f"{len(run.joined)} of {run.ranks} ranks had joined a process group"
        raise Wrong(f"{when} had not ended after {run.seconds:.0f} s; "
                    + (joined if len(run.joined) < run.ranks else "; ".join(run.waiting) or joined),
                    _MEET if len(run.joined) < run.ranks else
                    "Do all ranks call the same collectives, and end afterwards?",
                    code="ranks_never_meet" if len(run.joined) < run.ranks else "not_ended")
    if run.code:
        raise _failed(when, run)
    # Ranks are processes that meet: catches one process that computes everything itself.
    if len(run.joined) != run.ranks or run.world_sizes != {run.ranks}:
        raise Wrong(f"{when}: {len(run.joined)} of {run.ranks} ranks joined a process group of "
                    f"{run.ranks}", _MEET if run.joined else
                    "Each rank calls dist.init_process_group before it communicates.",
                    code="wrong_world_size")
    # The ranks communicate: catches rank 0 that draws all numbers itself.
    silent = sorted(run.joined - run.communicated)
    if silent:
        raise Wrong(f"{when}: {named_ranks(silent)} called no collective",
                    "Each rank knows its own number only; dist.all_reduce(total) sums them.",
                    code="missing_collective")
    judge_left(run, when, "script")  # before what it printed, which may be missing because of it
    _judge_printed(run, when)


def _failed(when, run) -> Wrong:
    said = [line for line in run.errors.splitlines() if line.strip()]
    hint = next((hint for words, hint in _HINTS.items() if words in run.errors), "")
    last = [line.strip() for line in said if re.match(r"\s*(\w+\.)*\w*(Error|Exception)\b", line)]
    return Wrong(f"{when} ended with exit code {run.code}"
                 + (f": {(last or said)[-1].strip()}" if said else ""), hint, code="run_failed")


def _judge_printed(run, when):
    printed = [number for number in map(_as_float, run.output.splitlines()) if number is not None]
    # By generators of its own: the caller's random state stays as it is.
    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()
             for rank in range(run.ranks)]
    once = "Rank 0 prints the sum, as one number on a line of its own."
    if not printed:
        raise Wrong(f"{when} printed no number on a line of its own", once, code="nothing_printed")
    causes = [Cause("not_summed", drawn[0], "what rank 0 drew, nothing came from the others",
                    "Sum over the ranks."),
              Cause("same_seed", drawn[0] * run.ranks,
                    f"{run.ranks} times what rank 0 drew: all ranks drew the same",
                    "The seed is the rank."),
              Cause("averaged", sum(drawn) / run.ranks, "the mean over the ranks",
                    "all_reduce sums.")]
    judge_number(printed[0], sum(drawn), causes, f"{when} printed", hint="Seed with the rank, draw "
                 "torch.rand(1), sum.", source="the sum over ranks is", rel_tol=0, abs_tol=1e-4)
    if len(printed) > 1:
        raise Wrong(f"{when} printed {len(printed)} numbers", once, code="several_printed")


def _as_float(line) -> float | None:
    try:
        return float(line)
    except ValueError:
        return None


@shows("Script")
def run_script(script: str, ranks: int = 2) -> scripts.Run:
    """Runs a script as `python script.py RANKS` in a terminal would: what it printed, and its exit
    code."""
    with scripts.written(script) as folder, status(f"{ranks} ranks at work"):
        with scripts.ended(scripts.Running(folder, ranks)) as running:
            return running.finish()

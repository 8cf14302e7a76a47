"""What is asked of every run of a training script: that it ends, that rank 0 alone prints and
writes, and that the job fails when a rank does."""

import os
import signal
from collections.abc import Iterator

from labs.checks.job_end import SAME_CALLS, judge_failed_job, judge_left, left_alone
from labs.checks.scripts.forked import Run
from labs.checks.verdicts import Wrong
from labs.words import listed, named_ranks
from labs.workers import worker
from labs.workers.programs import FAILING_RANK


def judge_end(run: Run, when: str) -> None:
    """Raises Wrong unless the run ended by itself, with exit code 0, without processes left, and
    after optimizer steps of every rank."""
    if run.code is None:
        raise Wrong(f"{when}: not done after {run.seconds:.0f} s, and nothing moved: "
                    + "; ".join(_where(run)), SAME_CALLS, code="never_ends")
    if run.code:
        rank, record = _first_failure(run)
        if record is None or record.error is None:
            raise Wrong(f"{when}: rank {rank} ended with exit code {run.codes[rank]}"
                        + _last_line(run.output[rank]), code="rank_failed")
        kind, message, line = record.error
        if kind == "NotImplementedError" and message.startswith("Exercise"):
            raise NotImplementedError(message)
        where = f"{when}: rank {rank}, line {line} of {run.script}"
        # Invariant: no rank ends while another one still needs it.
        ended = [other for other, code in enumerate(run.codes) if code == 0]
        if ended and _follows(run, rank):
            raise left_alone(where, run.waiting[rank], ended, SAME_CALLS)
        raise Wrong(f"{where}: {kind}: {message}", code=f"raised_{kind}")
    judge_left(run, when, "job")
    for rank, record in enumerate(run.records):
        if record is None or not record.steps:
            raise Wrong(f"{when}: rank {rank} ended without an optimizer step",
                        "Each rank trains: only what is printed and written is rank 0's alone.",
                        code="missing_step")


def _where(run) -> Iterator[str]:
    for rank, code in enumerate(run.codes):
        batches = f"rank {rank} had trained on {run.batches[rank]} batches and "
        # A rank that was stopped has the code of the signal.
        yield batches + (run.waiting[rank] or "had called no collective"
                         if code is None or code < 0 else "ended")


def _first_failure(run):
    """(rank, record) of the rank that failed by itself; others lost their connection to it."""
    failed = [rank for rank, code in enumerate(run.codes) if code]
    rank = ([rank for rank in failed if not _follows(run, rank)] or failed)[0]
    return rank, run.records[rank]


def _follows(run, rank) -> bool:
    # A rank that fails closes its connections, and the others then fail with "Connection closed" or
    # are ended with SIGTERM. gloo aborts a process whose sizes do not match: it leaves no record.
    record = run.records[rank]
    if record is None or record.error is None:
        return run.codes[rank] == -signal.SIGTERM
    return worker.lost_connection(record.error[1])


def _last_line(output) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f": {lines[-1].strip()[:200]}" if lines else ""


def judge_writer(run: Run, when: str) -> None:
    """Raises Wrong unless rank 0 alone printed and wrote. If all ranks write one
    file, the last one wins."""
    writers = [rank for rank, record in enumerate(run.records)
               if run.metrics_path in record.written]
    # Invariant: rank 0 alone writes and prints. LOCAL_RANK 0 exists on each host, so it writes
    # twice.
    if writers != [0]:
        who = f"{named_ranks(writers)} wrote" if writers else "no rank wrote"
        others = run.records[0].written
        hint = (f"It wrote {os.path.basename(others[0])!r}: the file's name is "
                f"options.{run.option[2:]}."
                if others and not writers else "dist.get_rank() says which rank this is: "
                "LOCAL_RANK is 0 once on each host.")
        raise Wrong(f"{when}: {who} the file of {run.option}, and it must be rank 0 alone", hint,
                    code="wrong_writer")
    judge_speaker(run, when)


def judge_speaker(run: Run, when: str) -> None:
    """Raises Wrong where a rank other than 0 printed."""
    speakers = [rank for rank, output in enumerate(run.output) if rank and printed(output)]
    if speakers:
        raise Wrong(f"{when}: {named_ranks(speakers)} printed too: "
                    f"{printed(run.output[speakers[0]])[0][:80]!r}", "Print on rank 0 alone.",
                    code="printed_too_often")


def printed(output: str) -> list[str]:
    """Lines of a rank's output that are no library's warning."""
    return [line for line in output.splitlines() if line.strip() and "Warning" not in line
            and "warn" not in line and not line.startswith(("[", " "))]


def judge_metrics(run: Run, when: str, names: tuple[str, ...]) -> None:
    """Raises Wrong unless rank 0 alone wrote a number for each of these names of each step."""
    judge_writer(run, when)
    steps = run.metrics.get("steps") if isinstance(run.metrics, dict) else None
    if not isinstance(steps, list) or run.metrics.get("ranks") != run.ranks:
        raise Wrong(f"{when}: the file of --metrics is not JSON of "
                    f'{{"ranks": {run.ranks}, "steps": [...]}}', code="unreadable_file")
    taken = len(run.records[0].steps)
    if len(steps) != taken:
        raise Wrong(f"{when}: the file of --metrics has {len(steps)} steps, and there were {taken}",
                    code="wrong_count")
    for number, step in enumerate(steps):
        missing = [name for name in names if not isinstance(step, dict)
                   or not isinstance(step.get(name), int | float)]
        if missing:
            raise Wrong(f"{when}, step {number}: the file of --metrics has no number for "
                        f"{listed(missing)}", f"Each step is a dict with {listed(names)}.",
                        code="missing_keys")


def judge_failure(run: Run) -> None:
    """Raises Wrong unless the job failed because its rank FAILING_RANK did."""
    hint = "Let an exception end the script, or raise it again."
    judge_failed_job(run, FAILING_RANK, "job", hint, "; ".join(_where(run)), hint)
    # The job may have failed only because another rank lost its connection to this one.
    if run.codes[FAILING_RANK] == 0:
        raise Wrong(f"rank {FAILING_RANK} of {run.ranks} raised an exception, and its exit code "
                    "was 0: another rank's failure ended the job", hint, code="failure_hidden")

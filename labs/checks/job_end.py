"""What checks of whole scripts share: how a job must end in which a rank failed."""

from typing import Protocol

from labs.checks.verdicts import Wrong
from labs.words import named_ranks

SAME_CALLS = ("All ranks call the same collectives equally often: with the same number of batches, "
              "and no collective in `if rank == 0`.")


class EndedJob(Protocol):
    """A job that has ended or was stopped. code: its exit code, None where it was stopped. seconds:
    how long it ran. left: how many of its processes were still there after its end."""

    ranks: int
    code: int | None
    seconds: float
    left: int


def judge_failed_job(job: EndedJob, rank: int, what: str, hint: str, waiting: str,
                     waiting_hint: str) -> None:
    """Raises Wrong unless a job one of whose ranks raised has ended by itself, with an exit code
    other than 0, and without processes left. what: "script" or "job", in the messages. hint: to an
    exit code of 0. waiting: what it did instead of ending, with a hint of its own."""
    when = f"rank {rank} of {job.ranks} raised an exception"
    # What started the job, a shell, Slurm or CI, knows nothing but its exit code.
    if job.code == 0:
        raise Wrong(f"{when}, and the {what}'s exit code was 0, as if all had gone well", hint,
                    code="failure_hidden")
    # Invariant: a job ends when one of its ranks has failed. Catches ranks that wait in a
    # collective for the failed one until the group's timeout, 30 minutes on gloo.
    if job.code is None:
        raise Wrong(f"{when}, and the {what} had not ended after {job.seconds:.0f} s: {waiting}",
                    waiting_hint, code="hangs_after_failure")
    judge_left(job, when, what)


def left_alone(where: str, called: str, ended: list[int], hint: str) -> Wrong:
    """What to raise where a rank has lost its connection to ranks that have `ended` with exit code
    0: its error speaks of a crash, and there was none. where: names the rank and its line. called:
    that it "had last called" a collective, "" where that is unknown."""
    return Wrong(f"{where}, waited for other ranks, and {named_ranks(ended)} had ended"
                 + (f"; it {called}" if called else ""), hint, code="left_alone")


def judge_left(job: EndedJob, when: str, what: str) -> None:
    """Raises Wrong where processes were left behind. when: the beginning of the message."""
    # Invariant: the job's processes are gone when it has ended. Catches ranks without a parent,
    # which keep cores, memory and GPUs.
    if job.left:
        raise Wrong(f"{when}, and when the {what} had ended, {job.left} of its processes still ran",
                    "Wait for all that is started, before the script ends: mp.spawn waits for its "
                    "ranks.", code="processes_left")

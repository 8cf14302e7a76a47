"""A run on GPUs that was measured, and its job and plan as the planner takes them."""

from dataclasses import dataclass

from labs.predictions.plans.job import Job, Plan


class Unreadable(Exception):
    """A row that is no job of the planner's; says in one sentence which field is why."""


BAD_ROW = (Unreadable, KeyError, TypeError, ValueError, ZeroDivisionError)
"""What a row raises that cannot be read: one of them does not keep the others from being read."""


def why(error: Exception) -> str:
    """The reason in a sentence."""
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]}"
    return str(error) if isinstance(error, Unreadable) else f"it cannot be read: {error}"


@dataclass(frozen=True)
class GpuRun:
    """A row of a folder of runs.

    id: of the row. source: the file that it is from. kind: what it is a row of, such as "TP and
    PP". seconds: of a step, or None; memory: bytes at the peak of a rank of `stage`, or None. ran:
    whether it ran, None where it failed for another reason than memory.
    job, plan: None where the planner cannot be asked, and `refused` says why.
    """

    id: str
    source: str
    kind: str
    seconds: float | None = None
    memory: float | None = None
    ran: bool | None = True
    stage: int = 0
    job: Job | None = None
    plan: Plan | None = None
    refused: str = ""

    @property
    def gpus(self) -> int:
        """GPUs of the run; 0 where it is not known as a job."""
        return self.plan.gpus if self.plan else 0

"""What a student of notebook 07b calls or subclasses."""

from labs.predictions.pipelines.legality import require_legal
from labs.predictions.pipelines.schedule import IllegalSchedule, Schedule


def why_illegal(lists: list, micro_batches: int, chunks: int = 1) -> str:
    """Which action of a schedule can never run, and why; or that it is legal."""
    try:
        require_legal(Schedule.from_lists(lists, micro_batches, chunks))
    except IllegalSchedule as error:
        return str(error)
    return "the schedule is legal"

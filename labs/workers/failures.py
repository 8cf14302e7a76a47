"""What `launch` raises: the outcomes of all ranks in one message."""

from collections.abc import Iterable

from labs.words import named_ranks
from labs.workers import notebook_cells
from labs.workers.launch_error import LaunchError, Stopped
from labs.workers.outcomes import Kind, Outcome, describe, root_cause, summary

_last = None


class RankFailed(LaunchError):
    """A rank raised, left or was killed.

    rank: the one that caused the failure. cause: its exception, or None. outcomes: one per rank.
    traceback: the whole traceback on that rank, as text.
    """

    def __init__(self, root: Outcome, outcomes: list[Outcome]):
        self.rank, self.cause, self.outcomes = root.rank, root.error, outcomes
        self.traceback = root.traceback
        headline = f"{named_ranks([root.rank])} {describe(root)}"
        super().__init__("\n".join([headline, *root.call_chain(), *summary(outcomes, root),
                                    *_what_to_do(root)]))
        self.__cause__ = root.error


class OutOfMemory(RankFailed):
    """A rank wanted more memory than its `memory_limit`, or than the machine has.

    asked, held, allowed: bytes, as in `memory.OOMInfo`, of the rank that failed first; None where
    unknown. oom_by_rank: a map from each rank that ran out to its OOMInfo.
    """

    def __init__(self, root: Outcome, outcomes: list[Outcome]):
        super().__init__(root, outcomes)
        self.oom_by_rank = {o.rank: o.oom for o in outcomes if o.oom}
        self.asked, self.held = root.oom.asked, root.oom.held
        self.allowed = root.oom.allowed


class RanksStuck(LaunchError):
    """Ranks wait for one another and can never continue, or are not in the same collective.
    outcomes: one per rank. code: "collectives_differ", "deadlock", "no_progress", "silent" or
    "timed_out"."""

    def __init__(self, reason: str, outcomes: list[Outcome], advice: str = "", *, code: str):
        self.outcomes, self.code = outcomes, code
        lines = [f"{reason}; all ranks were stopped", *summary(outcomes),
                 advice or _advice(outcomes)]
        super().__init__("\n".join(line for line in lines if line))


class Interrupted(Stopped):
    """The student interrupted a launch; outcomes says where each rank was."""

    def __init__(self, outcomes: list[Outcome]):
        self.outcomes = outcomes
        super().__init__("\n".join(["interrupted; all ranks were stopped", *summary(outcomes)]))


def _what_to_do(root) -> list[str]:
    """Where a rank lacked what another cell defines, or met a gap that is not filled in yet."""
    if root.error_type == "NameError":
        return [said] if (said := notebook_cells.what_to_run(root.message)) else []
    if root.error_type != "NotImplementedError" or not root.message.startswith("Exercise "):
        return []
    left = root.place.left_below_code if root.place else ""
    return [f"{left}." if left else f"{root.message} is waiting for your code: fill it in first."]


def failure(outcomes: Iterable[Outcome]) -> RankFailed:
    """The exception for a launch in which a rank failed or died."""
    root = root_cause(outcomes)
    return (OutOfMemory if root.oom else RankFailed)(root, outcomes)


def remember(error: LaunchError) -> LaunchError:
    """Keeps the newest failure for `last_failure`, and returns it to be raised."""
    global _last
    _last = error
    return error


def last_failure() -> LaunchError | None:
    """The newest RankFailed or RanksStuck: its `.traceback` and `.outcomes` hold everything."""
    return _last


def _advice(outcomes) -> str:
    """What a student should look for, by where the ranks stand."""
    waiting = [o for o in outcomes if o.kind is Kind.WAITING]
    if not waiting or any(o.kind is Kind.SUSPENDED for o in outcomes):
        return ""  # a suspended rank is reason enough, and none of the student's code
    first = waiting[0]
    left = [o.rank for o in outcomes if o.kind is Kind.RETURNED and o.issued is not None
            and first.number is not None and o.issued < first.number]
    if left:
        return (f"{named_ranks(left)} never joined {first.collective}: every rank must call every "
                "collective.")
    if len({(o.collective, o.number) for o in waiting}) > 1:
        return "They are in different collectives: all must call the same ones, in the same order."
    calls = {o.collective.partition(" ")[0] for o in waiting}
    if calls == {"send"}:
        return ("Each waits until another rank receives: let one of them receive first, or send "
                "with isend.")
    if calls == {"recv"}:
        return "Each waits for a message that no rank has sent: one of them must send first."
    if len(waiting) == len(outcomes):
        return "Every rank must call every collective with tensors of the same shape and dtype."
    return "Every rank must call every collective, in the same order and with the same shapes."

"""The rules by which a launch is given up, and when the caller reports that nothing happens."""

import time
from collections.abc import Sequence

from labs.workers import outcomes
from labs.workers.outcomes import Kind, Outcome
from labs.workers.rank_handle import RankHandle

CONFIRM_DEADLOCK = 1.0  # seconds that a deadlock must last before it is called one
START_TIMEOUT = 60.0  # seconds that ranks may take to meet
STALL_NOTICE = 30.0  # seconds without a sign of progress until the student reads where ranks are


def first_failure(handles: Sequence[RankHandle]) -> Outcome | None:
    """The outcome that made the launch fail, or None. Returns None during a short grace period:
    peers' connection errors often arrive before the exception or the death that caused them."""
    root = outcomes.root_cause([handle.outcome for handle in handles if handle.settled])
    if root is None or all(handle.settled for handle in handles):
        return root
    grace = 0.5 if root.kind is Kind.LOST_CONNECTION or root.kind.is_death else 0.1
    return root if time.time() - root.failed_at > grace else None


def stuck_reason(handles: Sequence[RankHandle], hang_after: float) -> str | None:
    """Why the ranks will not continue, as a sentence, or None while they may. hang_after: seconds
    that a rank may wait in one collective."""
    now = time.monotonic()
    running = [handle for handle in handles if not handle.settled]
    for handle in running:
        waited = now - handle.changed
        if not handle.progress.waiting:
            continue
        is_joining = handle.progress.collective == "init_process_group"
        limit = max(hang_after, START_TIMEOUT) if is_joining else hang_after
        if waited > limit:
            return f"no progress in a collective for {limit:g} s"
        if waited > CONFIRM_DEADLOCK and any(
                handle.progress.can_never_be_joined_by(other.progress)
                for other in handles if other.settled):
            return "deadlock"
    limit = max(hang_after, 10)
    silent = [handle.rank for handle in running if now - handle.heard > limit]
    return f"rank {silent[0]} has not answered for {limit:g} s" if silent else None


class StallNotice:
    """When to tell the student where the ranks are: an endless loop looks like honest work, so it
    is reported and not ended."""

    def __init__(self):
        self.after = STALL_NOTICE

    def is_due(self, last_sign: float) -> bool:
        """Whether it is time; each time it takes twice as long. last_sign: monotonic seconds."""
        quiet = time.monotonic() - last_sign
        if quiet < STALL_NOTICE:
            self.after = STALL_NOTICE
        if quiet < self.after:
            return False
        self.after *= 2
        return True

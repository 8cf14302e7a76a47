"""The rules by which a launch is given up, and when the caller reports that nothing happens."""

import time
from collections.abc import Sequence

from labs.words import named_ranks
from labs.workers import outcomes
from labs.workers.outcomes import Kind, Outcome
from labs.workers.rank_handle import RankHandle

CONFIRM_DEADLOCK = 1.0  # seconds that a deadlock must last before it is called one
START_TIMEOUT = 60.0  # seconds that ranks may take to meet
FIRST_SIGN = 600.0  # seconds until a rank must have said something; on a busy machine it imports
STALL_NOTICE = 10.0  # seconds without a sign of progress until the student reads where ranks are


def first_failure(handles: Sequence[RankHandle]) -> Outcome | None:
    """The outcome that made the launch fail, or None. Returns None during a short grace period:
    peers' connection errors often arrive before the exception or the death that caused them, and
    a rank that still works may be about to raise the same error."""
    root = outcomes.root_cause([handle.outcome for handle in handles if handle.settled])
    running = [handle for handle in handles if not handle.settled]
    if root is None or not running:
        return root
    is_clear = root.kind is not Kind.LOST_CONNECTION and not root.kind.is_death
    others_wait = all(handle.position and handle.position["collective"] for handle in running)
    grace = 0.1 if is_clear and others_wait else 0.5
    return root if time.time() - root.failed_at > grace else None


def stuck_reason(handles: Sequence[RankHandle], hang_after: float
                 ) -> tuple[str, str] | None:
    """Why the ranks will not continue, as (code, sentence), or None while they may. hang_after:
    seconds that all ranks may wait while nothing moves.

    A hang is when every rank waits for others, has returned, or is suspended by a signal. While one
    computes, sleeps, reads, imports, waits for a core or says nothing, the others may wait for it
    for as long as it takes.
    """
    running = [handle for handle in handles if not handle.settled]
    if any(handle.settled and handle.outcome.kind.is_failure for handle in handles):
        return None  # that is why the others wait
    for handle in running:
        if (handle.process and not handle.has_spoken
                and time.monotonic() - handle.heard > FIRST_SIGN):
            return "silent", (f"rank {handle.rank} has said nothing since it was started "
                              f"{FIRST_SIGN:g} s ago")
        # A rank that has returned issues nothing more: the collective that the other one waits in
        # can never complete, so there is no need to wait for hang_after.
        if handle.progress.quiet_seconds > CONFIRM_DEADLOCK and any(
                handle.progress.can_never_be_joined_by(other.progress)
                for other in handles if other.settled):
            return "deadlock", "deadlock"
    suspended = [handle.rank for handle in running if handle.suspended_since]
    if running and all(handle.progress.waiting or handle.rank in suspended for handle in running):
        # All at the same time, by the ranks' own clocks: what one said may be old by now.
        since = max(handle.suspended_since or handle.progress.quiet_since or handle.progress.sent
                    for handle in handles)
        if all(_known_until(handle) - since > _limit(handle, hang_after) for handle in running):
            return "no_progress", f"no progress for {hang_after:g} s: {_who_waits(suspended)}"
    return None


def _who_waits(suspended) -> str:
    if not suspended:
        return "every rank waits for others or has returned"
    are = "are" if len(suspended) > 1 else "is"
    return f"{named_ranks(suspended)} {are} suspended, every other rank waits or has returned"


def _known_until(handle) -> float:
    """Up to when it is known what the rank does: monotonic seconds."""
    return time.monotonic() if handle.suspended_since else handle.progress.sent


def _limit(handle, hang_after) -> float:
    progress = handle.progress
    is_joining = progress.collective == "init_process_group" or progress.connecting
    return max(hang_after, START_TIMEOUT) if is_joining else hang_after


def timed_out(handles: Sequence[RankHandle], timeout: float | None) -> bool:
    """Whether the function has run for `timeout` seconds (None: no limit), not counting those in
    which a rank waited for a core, up to twice the limit: a crowded machine makes nothing endless.
    """
    began = [handle.began for handle in handles if handle.began is not None]
    if timeout is None or not began:
        return False
    starved = max(handle.progress.starved for handle in handles)
    return time.monotonic() - min(began) - min(starved, 2 * timeout) > timeout


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

"""When a launch can no longer succeed, and when it is time to say where it is."""

import time

from labs.workers import failures

PROOF = 1.0  # seconds that a deadlock must look certain before it is called one
START = 60.0  # seconds that ranks may take to meet
NEWS = 30.0  # seconds without a sign of progress until the caller is told where the ranks are


def to_blame(members):
    """The outcome that made the launch fail, or None; None too while a rank that may be to blame
    still has time to speak, because victims are often heard first."""
    root = failures.root_cause([m.outcome for m in members if m.settled])
    if root is None or all(m.settled for m in members):
        return root
    patience = 0.5 if root.is_victim or root.kind == "died" else 0.1
    return root if time.time() - root.at > patience else None


def why_stuck(members, hang_after):
    """Why the ranks will not get on, in words, or None while they may."""
    now = time.monotonic()
    running = [m for m in members if not m.settled]
    for member in running:
        waited = now - member.changed
        if not member.progress.waiting:
            continue
        starts = member.progress.call == "init_process_group"
        limit = max(hang_after, START) if starts else hang_after
        if waited > limit:
            return f"no progress in a collective for {limit:g} s"
        if waited > PROOF and any(member.progress.can_never_be_joined_by(other.progress)
                                  for other in members if other.settled):
            return "deadlock"
    patience = max(hang_after, 10)
    silent = [m.rank for m in running if now - m.heard > patience]
    return f"rank {silent[0]} has not answered for {patience:g} s" if silent else None


class Newscaster:
    """Says where the ranks are when nothing has been heard of them for long: an endless loop
    cannot be told from honest work, but it can be pointed at."""

    def __init__(self):
        self.patience = NEWS

    def is_due(self, last_sign: float) -> bool:
        """Whether it is time; each time it takes twice as long. last_sign: monotonic seconds."""
        if time.monotonic() - last_sign < NEWS:
            self.patience = NEWS
        if time.monotonic() - last_sign < self.patience:
            return False
        self.patience *= 2
        return True

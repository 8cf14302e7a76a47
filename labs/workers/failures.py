"""The one place where the outcomes of all ranks become one message."""

import dataclasses
import signal
from dataclasses import dataclass, field

from labs.workers import source_lines
from labs.workers.memory import Shortage

LONGEST, MOST_LINES = 2_000, 20  # characters, lines of one exception's message
_last = None


class LaunchError(RuntimeError):
    """A launch that could not give results. In a notebook it shows its message, and no
    traceback through the launcher. output[r]: all that rank r had printed."""

    output = ()

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class RankFailed(LaunchError):
    """A rank raised, left or was killed.

    rank: the one that failed first. cause: its exception, or None. outcomes: one per rank.
    traceback: the whole traceback on that rank, as text.
    """

    def __init__(self, root, outcomes):
        self.rank, self.cause, self.outcomes = root.rank, root.error, outcomes
        self.traceback = root.traceback
        super().__init__("\n".join([root.headline(), *root.where(), *grouped(outcomes, root)]))
        self.__cause__ = root.error


class OutOfMemory(RankFailed):
    """A rank wanted more memory than its `memory_limit`, or than the machine has.

    asked, held, allowed: bytes, as in `memory.Shortage`, of the rank that failed first; None where
    unknown. shortages: a map from each rank that ran out to its Shortage.
    """

    def __init__(self, root, outcomes):
        super().__init__(root, outcomes)
        self.shortages = {o.rank: o.shortage for o in outcomes if o.shortage}
        self.asked, self.held = root.shortage.asked, root.shortage.held
        self.allowed = root.shortage.allowed


class RanksStuck(LaunchError):
    """Ranks that wait for one another and never get on, or that are not in the same collective.
    outcomes: one per rank."""

    def __init__(self, why, outcomes, advice=""):
        self.outcomes = outcomes
        lines = [f"{why}; all ranks were stopped", *grouped(outcomes), advice or _advice(outcomes)]
        super().__init__("\n".join(line for line in lines if line))


class Interrupted(KeyboardInterrupt):
    """The student interrupted the cell; outcomes says where each rank was."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        super().__init__("\n".join(["interrupted; all ranks were stopped", *grouped(outcomes)]))

    def _render_traceback_(self):
        return [str(self)]


@dataclass
class Outcome:
    """What became of one rank.

    kind: returned, failed, died, waits (in a collective), calls (one that others do not),
    computes, silent or starting.
    call, number: the collective it waits in, from 1; for one that returned, number is how many it
    called. since: seconds. at: when it failed, seconds since the epoch.
    """

    rank: int
    kind: str
    error: BaseException = None
    error_type: str = ""
    message: str = ""
    stack: list = field(default_factory=list)
    traceback: str = ""
    exit_code: int = None
    call: str = ""
    number: int = None
    since: float = 0.0
    at: float = 0.0
    shortage: Shortage = None

    @property
    def is_victim(self) -> bool:
        """Whether this is what another rank's death looks like from here."""
        signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
                 "Connection refused", "Application timeout caused pair closure", "Socket closed",
                 "failed to pass monitoredBarrier", "remote process exited")
        return self.kind == "failed" and any(sign in self.message for sign in signs)

    def headline(self) -> str:
        return f"rank {self.rank} {self.deed()}"

    def deed(self) -> str:
        """What the rank did, as the rest of a sentence that begins with its number."""
        own = source_lines.students(self.stack)
        place = f" at {own[-1]}" if own else ""
        if self.kind == "calls":
            return f"calls {self.call}"
        if self.kind == "failed":
            return _raised(self)
        if self.kind == "died":
            return (f"ran out of memory in C++ code, which gave up: it {self.shortage}"
                    if self.shortage else _died(self.exit_code))
        if self.kind == "silent":
            return f"does not answer: it is blocked in C++ code{place}"
        if self.kind == "waits":
            number = f" (#{self.number})" if self.number else ""
            since = f" for {self.since:.0f} s" if self.since >= 1 else ""
            return f"waits in {self.call}{number}{place}{since}"
        if self.kind == "computes":
            return f"computes{place}"
        return {"returned": "already returned", "starting": "was still starting"}[self.kind]

    def where(self) -> list:
        """The student's own lines that led here, innermost first, with their source."""
        own = [place for place in self.stack if place.is_students][::-1][:4]
        return [f"    {'called at ' if depth else ''}{place}, in {place.function}:  {place.source}"
                for depth, place in enumerate(own)]


def root_cause(outcomes):
    """The outcome to blame: a death (it makes victims of others, and no error of another rank
    causes one), else the exception of the lowest rank that is not a victim. Ranks that raise stay
    alive, so one exception does not cause another; the lowest rank gives the same answer always."""
    def blame(outcome):
        return (outcome.is_victim, outcome.kind != "died", outcome.rank)
    return min((o for o in outcomes if o.kind in ("failed", "died")), key=blame, default=None)


def failure(outcomes) -> RankFailed:
    """The exception for a launch in which a rank failed or died."""
    root = root_cause(outcomes)
    return (OutOfMemory if root.shortage else RankFailed)(root, outcomes)


def remember(error):
    """Keeps the newest failure for `last_failure`, and gives it back to be raised."""
    global _last
    _last = error
    return error


def last_failure():
    """The newest RankFailed or RanksStuck: its `.traceback` and `.outcomes` hold everything."""
    return _last


def _raised(outcome) -> str:
    if outcome.error_type == "SystemExit":
        return f"called sys.exit({outcome.message})"
    if outcome.error_type == "KeyboardInterrupt":
        return "raised KeyboardInterrupt"
    if outcome.is_victim:
        return "lost its connection: another rank had left"
    if outcome.shortage:
        return f"ran out of memory: it {outcome.shortage}"
    message = _bounded(outcome.message.strip())
    if outcome.error_type == "CannotSend":
        return message.removeprefix("it ")
    return f"raised {outcome.error_type}" + (f": {message}" if message else "")


def _bounded(message) -> str:
    lines = message[:LONGEST].splitlines()
    cut = len(message) > LONGEST or len(lines) > MOST_LINES
    return "\n".join(lines[:MOST_LINES]) + " … (all of it: labs.last_failure().traceback)" * cut


def _died(code) -> str:
    if code is None or code >= 0:
        return f"ended its process with exit code {code} before it returned (os._exit?)"
    name = signal.Signals(-code).name
    guess = {"SIGKILL": ", probably because the machine ran out of memory",
             "SIGSEGV": ": a crash in C++ code",
             "SIGBUS": ": a crash in C++ code; /dev/shm may be too small",
             "SIGABRT": ": C++ code gave up; its last words are in the output above"}
    return f"was killed by signal {-code} ({name}){guess.get(name, '')}"


def grouped(outcomes, root=None) -> list:
    """One line per rank, but for `root`; ranks that did the very same share one."""
    groups = {}
    for outcome in outcomes:
        if outcome is not root:
            groups.setdefault(_alike(outcome, root), []).append(outcome)
    return [f"{'rank' if len(group) == 1 else 'ranks'} {_list([o.rank for o in group])} "
            f"{_plural(_deed_of(group, root), len(group))}" for group in groups.values()]


def _alike(outcome, root):
    return _did_the_same(outcome, root) or dataclasses.replace(outcome, rank=0, since=0).deed()


def _did_the_same(outcome, root) -> bool:
    return (root is not None and outcome.kind == root.kind == "failed"
            and (outcome.error_type, _gist(outcome)) == (root.error_type, _gist(root)))


def _gist(outcome):
    return outcome.shortage.asked if outcome.shortage else outcome.message


def _deed_of(group, root) -> str:
    longest = max(group, key=lambda outcome: outcome.since)
    return "did the same" if _did_the_same(longest, root) else longest.deed()


def _list(ranks) -> str:
    if len(ranks) > 8:
        return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]} ({len(ranks)} of them)"
    return ", ".join(map(str, ranks[:-1])) + (" and " if len(ranks) > 1 else "") + str(ranks[-1])


def _plural(deed, count) -> str:
    if count == 1:
        return deed
    for one, many in (("waits in", "wait in"), ("computes", "compute"), ("was ", "were "),
                      ("calls", "call"), ("lost its", "lost their"),
                      ("does not answer: it is", "do not answer: they are"),
                      ("ran out of memory: it", "ran out of memory: each")):
        if deed.startswith(one):
            return many + deed[len(one):]
    return deed


def _advice(outcomes) -> str:
    waiting = [o for o in outcomes if o.kind == "waits"]
    busy = [o.rank for o in outcomes if o.kind in ("computes", "silent")]
    if busy:
        who = f"rank {busy[0]} needs" if len(busy) == 1 else f"ranks {_list(busy)} need"
        return f"If {who} that long, launch(..., hang_after=60) waits longer."
    if not waiting:
        return ""
    left = [o.rank for o in outcomes if o.kind == "returned" and o.number is not None
            and waiting[0].number is not None and o.number < waiting[0].number]
    if left:
        who = f"rank {left[0]}" if len(left) == 1 else f"ranks {_list(left)}"
        return f"{who} never joined {waiting[0].call}: every rank must call every collective."
    if len({(o.call, o.number) for o in waiting}) > 1:
        return "They are in different collectives: all must call the same ones, in the same order."
    if len(waiting) == len(outcomes):
        return "Every rank must call every collective with tensors of the same shape and dtype."
    return "Every rank must call every collective, in the same order and with the same shapes."

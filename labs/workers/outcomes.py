"""How each rank of a launch ended, as data, and as the sentences that report it.

`labs.pictures.outcomes` draws the same data with short labels of its own.
"""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto

from labs.words import counted, named_ranks
from labs.workers import nccl, source_lines
from labs.workers.memory import OOMInfo
from labs.workers.source_lines import Place

MAX_CHARACTERS, MAX_LINES = 2_000, 20  # characters, lines that are shown of one exception's message
WIDEST_LINE = 110  # characters of what is shown of running ranks
_LIKELY_CAUSES = {
    signal.SIGKILL: ", probably because the machine ran out of memory",
    signal.SIGSEGV: ": a crash in C++ code",
    signal.SIGBUS: ": a crash in C++ code; /dev/shm may be too small",
    signal.SIGABRT: ": C++ code gave up; what it said last is in the rank's output",
}
# gloo's words when it aborts, for which torch raises nothing
_WRONG_SIZE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
# what torch's C++ log puts before a message that it raises: rank, time and line differ
_LOGGED = re.compile(r"\[rank\d+\]:\[[A-Z]\d{4} [\d:.]+ \w+\.cpp:\d+\] ")


class Kind(StrEnum):
    """What a rank did last, or is doing."""

    STARTING = auto()  # its function has not begun
    COMPUTING = auto()  # outside of any collective
    WAITING = auto()  # inside a collective
    MISMATCHED = auto()  # about to call a collective that other ranks do not call
    OUT_OF_COLLECTIVES = auto()  # has left the function in which the others still communicate
    UNRESPONSIVE = auto()  # C++ code holds its interpreter
    SUSPENDED = auto()  # a signal has stopped its process
    RETURNED = auto()
    RAISED = auto()
    OUT_OF_MEMORY = auto()
    LOST_CONNECTION = auto()  # raised, because another rank was gone
    CALLED_EXIT = auto()
    CANNOT_SEND = auto()  # returned something that cannot be sent
    # its process ended before it reported anything:
    KILLED = auto()  # by a signal
    PROCESS_EXITED = auto()
    OUT_OF_MEMORY_IN_CPP = auto()

    @property
    def is_death(self) -> bool:
        return self in (Kind.KILLED, Kind.PROCESS_EXITED, Kind.OUT_OF_MEMORY_IN_CPP)

    @property
    def is_failure(self) -> bool:
        return self.is_death or self in (Kind.RAISED, Kind.OUT_OF_MEMORY, Kind.LOST_CONNECTION,
                                         Kind.CALLED_EXIT, Kind.CANNOT_SEND)


@dataclass
class Outcome:
    """How one rank ended.

    message: its exception's, or what its process printed last. collective, number: where it waits,
    or what it is about to call; number counts from 1 in the process group. issued: how many
    collectives a rank that returned had called (None: unknown). seconds: how long it has waited.
    failed_at: seconds since the epoch. stack: outermost first.
    """

    rank: int
    kind: Kind
    error: BaseException | None = None
    error_type: str = ""
    message: str = ""
    stack: list[Place] = field(default_factory=list)
    traceback: str = ""
    exit_code: int | None = None
    collective: str = ""
    number: int | None = None
    issued: int | None = None
    seconds: float = 0.0
    failed_at: float = 0.0
    oom: OOMInfo | None = None

    @property
    def place(self) -> Place | None:
        """The innermost line of the student's on its stack, or of a library if none is theirs."""
        return next(reversed(source_lines.students(self.stack)), None)

    @property
    def sleeps(self) -> bool:
        """Whether a rank outside of any collective is at a line that sleeps."""
        # By the line's text: sleep is a function of C and has no frame of its own.
        return (self.kind is Kind.COMPUTING and self.place is not None
                and re.search(r"\bsleep\(", self.place.source) is not None)

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that killed its process, if one did."""
        return signal.Signals(-self.exit_code) if self.exit_code and self.exit_code < 0 else None

    def call_chain(self) -> list[str]:
        """The student's own lines that led here, innermost first, with their source."""
        own = [place for place in self.stack if place.is_students][::-1][:4]
        return [f"    {'called at ' if depth else ''}{place}, in {place.function}:  {place.source}"
                for depth, place in enumerate(own)]


def root_cause(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome to blame: a death (it makes others lose their connection, and no exception of
    another rank causes one), else the lowest rank's exception that is no lost connection. Ranks
    that raise stay alive, so one exception does not cause another."""
    def blame(outcome):
        return outcome.kind is Kind.LOST_CONNECTION, not outcome.kind.is_death, outcome.rank
    return min((o for o in outcomes if o.kind.is_failure), key=blame, default=None)


# The rest of a sentence that begins with one rank or several: [of one|of several].
_PHRASES = {
    Kind.STARTING: "[was|were] still starting",
    Kind.COMPUTING: "[{does}s|{does}]{place}",
    Kind.WAITING: "[waits|wait] in {collective}{place}{since}",
    Kind.MISMATCHED: "[calls|call] {collective}{place}",
    Kind.OUT_OF_COLLECTIVES:
        "[calls|call] no further collective: [it has|they have] left your function",
    Kind.UNRESPONSIVE:
        "[does not answer: it is|do not answer: they are] blocked in C++ code{place}",
    Kind.SUSPENDED: "[is|are] suspended{place}: a signal (SIGSTOP) has stopped "
                    "[its process|their processes]",
    Kind.RETURNED: "already returned",
    Kind.RAISED: "raised {o.error_type}{message}{hint}",
    Kind.OUT_OF_MEMORY: "ran out of memory: [it|each] {o.oom}",
    Kind.LOST_CONNECTION: "lost [its|their] connection: another rank had left",
    Kind.CALLED_EXIT: "called sys.exit({o.message})",
    Kind.CANNOT_SEND: "{o.message}",
    Kind.KILLED: "[was|were] killed by signal {o.signal.value} ({o.signal.name}){cause}",
    Kind.PROCESS_EXITED: "ended [its process|their processes] with exit code {o.exit_code} before "
                         "[it|they] returned (os._exit?)",
    Kind.OUT_OF_MEMORY_IN_CPP:
        "ran out of memory in C++ code, which gave up: [it|each] {o.oom}",
}

# The same in a line that is rewritten each second.
_PHRASES_NOW = _PHRASES | {
    **{kind: "failed" for kind in Kind if kind.is_failure},
    Kind.STARTING: "[is|are] still starting",
    Kind.RETURNED: "[has|have] returned",
}


def describe(outcome: Outcome, ranks: int = 1, phrases: dict[Kind, str] = _PHRASES) -> str:
    """What `ranks` ranks with this outcome did, as the rest of a sentence that names them."""
    number = f" (#{outcome.number})" if outcome.number else ""
    message = _shortened(_LOGGED.sub("", outcome.message.strip()))
    phrase = re.sub(r"\[(.*?)\|(.*?)\]", r"\2" if ranks > 1 else r"\1", phrases[outcome.kind])
    return phrase.format(
        o=outcome, collective=outcome.collective + number,
        message=f": {message}" if message else "", cause=_cause_of_death(outcome),
        hint=_hint(outcome),
        place=_where(outcome), does="sleep" if outcome.sleeps else "compute",
        since=f" for {outcome.seconds:.0f} s" if outcome.seconds >= 1 else "")


def _where(outcome) -> str:
    """The place, as the end of a sentence. A rank without one, whose stack is known, does our work:
    its function has ended, or has not begun."""
    if outcome.place:
        return f" at {outcome.place}"
    is_outside = outcome.kind is Kind.COMPUTING and outcome.stack
    return ", outside of your function" if is_outside else ""


def _cause_of_death(outcome) -> str:
    """Why a signal killed a rank, as far as that is known: the end of a sentence."""
    if found := _WRONG_SIZE.search(outcome.message):
        return (f": gloo received {int(found[1]):,} bytes where it expected {int(found[2]):,}, so "
                "the ranks are in different collectives, or their tensors differ in shape")
    return nccl.cause(outcome.message) or _LIKELY_CAUSES.get(outcome.signal, "")


def _hint(outcome) -> str:
    """What an error of CUDA or NCCL means, as a line of its own; of all others, nothing."""
    is_theirs = outcome.error_type in ("DistBackendError", "AcceleratorError", "RuntimeError")
    why = nccl.cause(outcome.message) if is_theirs else ""
    return f"\n    That is{why}" if why else ""


def summary(outcomes: Iterable[Outcome], root: Outcome | None = None) -> list[str]:
    """One line for each different outcome, with the ranks that share it; `root` has its own."""
    groups = {}
    for outcome in outcomes:
        if outcome is not root:
            groups.setdefault(_line(outcome, 1, root, seconds=0), []).append(outcome)
    return [f"{named_ranks([outcome.rank for outcome in group])} "
            + _line(max(group, key=lambda outcome: outcome.seconds), len(group), root)
            for group in groups.values()]


def summary_now(outcomes: Iterable[Outcome]) -> str:
    """What running ranks do, on one line: those that others may wait for first, those that do the
    same together. Of more than fits only how many ranks they are."""
    def order(outcome):
        return outcome.kind in (Kind.WAITING, Kind.RETURNED), outcome.rank

    groups = {}
    for outcome in sorted(outcomes, key=order):
        same = replace(outcome, number=None, seconds=0.0)  # these change from second to second
        groups.setdefault(describe(same, 1, _PHRASES_NOW), []).append(same)
    parts, room, left = [], WIDEST_LINE, 0
    for group in groups.values():
        does = describe(group[0], len(group), _PHRASES_NOW)
        part = f"{named_ranks([outcome.rank for outcome in group])} {does}"
        room -= len(part)
        if room < 0 and parts:
            left += len(group)
        else:
            parts.append(part)
    return " · ".join(parts + [counted(left, "other rank")] * bool(left))


def _line(outcome, ranks, root, **changes) -> str:
    """The description; "did the same" where it is that of `root` but for place and sizes."""
    if root is not None and _essence(outcome) == _essence(root) and not root.kind.is_death:
        return "did the same"
    return describe(replace(outcome, **changes), ranks)


def _essence(outcome):
    """What two failures with the same cause share."""
    what = outcome.oom.asked if outcome.oom else _LOGGED.sub("", outcome.message)
    return outcome.kind, outcome.error_type, what


def _shortened(message) -> str:
    lines = message[:MAX_CHARACTERS].splitlines()
    cut = len(message) > MAX_CHARACTERS or len(lines) > MAX_LINES
    return "\n".join(lines[:MAX_LINES]) + " … (all of it: labs.last_failure().traceback)" * cut

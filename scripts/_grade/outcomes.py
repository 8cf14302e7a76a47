"""What may come of an exercise."""

from dataclasses import dataclass

PASSED, WRONG, WAITING, FORGED, NOT_ALLOWED, TIMED_OUT, BROKEN = (
    "passed", "wrong", "waiting", "forged", "not allowed here", "timed out", "no verdict")


@dataclass
class Graded:
    """The outcome of one exercise: one of the words above. sentence: the check's, or what the
    exercise is refused for. sent: bytes that went over the loopback interface of its namespace, as
    its ranks' collectives do: counted outside of it."""

    outcome: str
    sentence: str = ""
    hint: str = ""
    seconds: float = 0.0
    sent: int = 0

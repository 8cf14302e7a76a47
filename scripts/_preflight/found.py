"""What one row of the table says."""

from dataclasses import asdict, dataclass, field

OK, NOTE, STOP, NONE = "ok", "note", "STOP", "-"


@dataclass(frozen=True)
class Found:
    """status: OK, NOTE (it works, but something is to be known), STOP (the workbook will not run
    here) or NONE (there is nothing to look at). value: what is there, in a few words. advice: for
    NOTE and STOP, what to do, one sentence. data: the same as numbers, for --json."""

    status: str
    value: str
    advice: str = ""
    data: dict = field(default_factory=dict)

    def as_json(self) -> dict:
        return asdict(self)


def ok(value: str, **data) -> Found:
    return Found(OK, value, data=data)


def note(value: str, advice: str, **data) -> Found:
    return Found(NOTE, value, advice, data)


def stop(value: str, advice: str, **data) -> Found:
    return Found(STOP, value, advice, data)


def none(value: str, **data) -> Found:
    return Found(NONE, value, data=data)


def worst(value: str, problems: list[tuple[str, str]], **data) -> Found:
    """Returns a row with all `problems`, (status, advice) each: STOP if one of them is, OK without
    any."""
    status = STOP if any(s == STOP for s, _ in problems) else NOTE if problems else OK
    ordered = sorted(problems, key=lambda problem: problem[0] != STOP)
    return Found(status, value, " ".join(advice for _, advice in ordered), data)

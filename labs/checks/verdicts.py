"""What a check says of an exercise: a verdict that draws itself."""

import functools
import html
import inspect
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from labs.checks.records import record
from labs.checks.student_code import (
    TooMuchOutput,
    guarded,
    message_of,
    own_place,
    shortened,
)
from labs.meters.typical_step import NotTypical
from labs.pictures import palette
from labs.pictures.in_scripts import print_in_script
from labs.words import with_article
from labs.workers import devices, notebook_cells, source_lines
from labs.workers.failures import LaunchError, RankFailed
from labs.workers.launcher import time_limit
from labs.workers.output import last_lines
from labs.workers.progress import status

COLOURS = {True: palette.PASSED, False: palette.REJECTED, None: palette.PENDING}
LAUNCH_SECONDS = 120.0  # of one launch in a check or a picture: an answer may hold an endless loop
_AS_BEFORE = "as before"  # of a picture: it leaves the choice of the device alone
NBGRADER = "NBGRADER_EXECUTION"  # set by nbgrader while it validates or grades
SIGNS = {True: "✓", False: "✗", None: "○"}
_LAUNCH_CODES = {"RankFailed": "rank_died", "OutOfMemory": "out_of_memory",
                 "CannotSend": "cannot_send"}
_rejected: dict[str, tuple[str, set[str]]] = {}
"""Name of each check whose last verdict is ✗ -> its exercise, and the names of the answers."""


class Wrong(Exception):
    """Raised inside a check: the invariant that broke, a hint, and the student's line that broke it
    where that is known. A rank's is raised in the caller too.

    code: names what broke for programs and tests, because sentences are for people and change:
    "sum_not_mean". The same mistake has the same code in every exercise.
    """

    def __init__(self, sentence: str, hint: str = "", place: source_lines.Place | None = None, *,
                 code: str):
        super().__init__(sentence, hint, place)
        self.sentence, self.hint, self.place, self.code = sentence, hint, place, code

    def __str__(self):
        return self.sentence

    # The default __reduce__ calls Wrong(*args) in the other process and misses the keyword `code`.
    def __reduce__(self):  # an exception is made again from its positional arguments
        return functools.partial(Wrong, code=self.code), self.args

    def said_of(self, where: str) -> "Wrong":
        """The same, with the words `where` and a colon before its sentence."""
        return Wrong(f"{where}: {self.sentence}", self.hint, self.place, code=self.code)


class NotPassed(Exception):
    """Raised for nbgrader by a check that is not passed: its verdict, without a traceback."""

    def _render_traceback_(self):  # IPython's hook
        return str(self).split("\n")


def kind_of(value) -> str:
    """What a check calls a value that is not of the kind it should be."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(getattr(value, "shape", None), tuple):
        return f"{with_article(type(value).__name__)} of shape {list(value.shape)}"
    return with_article(type(value).__name__)


@dataclass(frozen=True)
class Verdict:
    """What a check says of an exercise. Draws itself in a notebook.

    exercise: its number, or the title of a picture that belongs to no exercise. passed: True,
    False, or None while the exercise waits. printed: what the failing rank printed while it was
    checked. code: of a ✗, what broke (see `Wrong`).
    """

    exercise: str
    passed: bool | None
    sentence: str
    hint: str = ""
    printed: str = ""
    code: str = ""

    def __post_init__(self):
        # a message may hold the repr of something huge
        object.__setattr__(self, "sentence", shortened(self.sentence))

    def __str__(self):
        hint = f"\n  Hint: {self.hint}" if self.hint else ""
        printed = f"\n{self.printed}" if self.printed else ""
        return f"{self._title()}  {self.sentence}{hint}{printed}"

    __repr__ = __str__

    def _title(self) -> str:
        numbered = self.exercise[:1].isdigit()
        return f"{SIGNS[self.passed]} {'Exercise ' * numbered}{self.exercise}"

    def _repr_html_(self):
        return card(COLOURS[self.passed], self._title(), self.sentence, self.hint, self.printed)


def card(colour: str, title: str, sentence: str, hint: str = "", printed: str = "") -> str:
    """HTML with a bar of `colour` at the left; readable on a light and on a dark page."""
    first, *more = sentence.split("\n", 1)
    more, printed = ("".join(f"<div style='font-family:var(--jp-code-font-family,monospace);"
                             f"white-space:pre-wrap;margin-top:4px'>{_html(text)}</div>"
                             for text in texts if text) for texts in (more, [printed]))
    hint = f"<div style='opacity:0.7;margin-top:2px'>{_html(hint)}</div>" if hint else ""
    return (f"<div style='border-left:4px solid {colour};padding:5px 12px;margin:4px 0'>"
            f"<b style='color:{colour}'>{title}</b>&ensp;{_html(first)}{more}{hint}{printed}</div>")


def check(exercise: str, hints: dict[str, str] | None = None,
          device: str | None = "cpu") -> Callable[[Callable], Callable]:
    """Makes a check of a function that returns a sentence when all is well, raises `Wrong` when
    not, and returns a Verdict of its own where it cannot tell. The check returns a Verdict and
    never raises because of the student's code.

    hints: a verdict's code, or a part of a message of torch's or Python's -> the hint to give where
    there is none.
    device: where the check's ranks run: "cpu", where sums are exact enough to be compared and ranks
    start at once; None: on what the machine has. Who calls the check can choose another one:
    lab.check_...(answer, device="cuda").
    """
    def finish(said):
        return said if isinstance(said, Verdict) else Verdict(exercise, True, said)

    return lambda function: _for_nbgrader(_judged(exercise, hints, finish, device, function))


def _for_nbgrader(judged):
    """The check, except that under nbgrader it raises what is no ✓, and prints a ✓: nbgrader gives
    all points for a cell that raises nothing, and warns of a result that is no number. A student
    never meets this."""
    # The variable is read at each call and not at import: nbgrader sets it for its own kernel only.
    @functools.wraps(judged)
    def graded(*answers, **options):
        verdict = judged(*answers, **options)
        if NBGRADER not in os.environ:
            return verdict
        if not verdict.passed:
            raise NotPassed(verdict)
        return print(verdict)

    return graded


def shows(exercise: str) -> Callable[[Callable], Callable]:
    """For pictures made with the student's code: the picture, or a Verdict that says why not.
    exercise: the number of the one whose code is drawn, or the picture's title where it is none's.
    """
    return functools.partial(_judged, exercise, None, lambda picture: picture, _AS_BEFORE)


def _judged(exercise, hints, finish, device, function):
    what = f"exercise {exercise}" if exercise[0].isdigit() else exercise  # a picture's title

    notebook_cells.watch()

    @functools.wraps(function)
    def judged(*answers, **options):
        is_check = device != _AS_BEFORE  # else a picture
        # `device` is an option of every check, not of the function that it wraps: it is taken out
        # before the arguments are compared with the function's signature.
        chosen = devices.on(options.pop("device", device)) if is_check else nullcontext()
        verdicts = [answer for answer in answers if isinstance(answer, Verdict)]
        # Order: what is missing comes before what is wrong, so that an unanswered cell stays
        # neutral.
        if verdicts:
            return verdicts[0]  # of an earlier cell, whose result this one needs
        if old := notebook_cells.old_answer():
            return Verdict(exercise, None, old)
        if any(answer is ... for answer in answers):
            return Verdict(exercise, None, "is waiting for your answer")
        if not _fits(function, answers, options):
            return print_in_script(Verdict(exercise, False, f"{function.__name__} takes "
                                           f"{inspect.signature(function)}",
                                           code="wrong_call"))
        began = time.monotonic()
        try:
            with chosen, status(what), guarded(), time_limit(LAUNCH_SECONDS):
                found = finish(function(*answers, **options))
        except KeyboardInterrupt:
            raise  # the cell ends, and so do those that would follow it
        except NotTypical as error:  # of a picture: the machine's fault, and no student's
            found = Verdict(exercise, None, str(error))
        except BaseException as error:  # sys.exit() too ends in a verdict
            rejected_in = "" if is_check else _rejected_in(exercise, answers)
            if rejected_in and _is_ours(error, answers):
                found = _not_drawn(exercise, error, rejected_in)
            else:
                found = _hinted(verdict_of(exercise, error, answers), hints or {})
        if is_check:
            _rejected.pop(function.__name__, None)
            if found.passed is False:
                _rejected[function.__name__] = exercise, _names(answers)
        record(exercise, found, time.monotonic() - began, function.__name__)
        return print_in_script(found)

    return judged


def _names(answers) -> set[str]:
    """The names of the functions and classes among the answers; lambdas share one, which says
    nothing."""
    return {getattr(answer, "__name__", "") for answer in answers} - {"", "<lambda>"}


def _rejected_in(exercise, answers) -> str:
    """The last exercise whose check rejected what a picture is drawn with; or empty."""
    rejected = [checked for checked, names in _rejected.values()
                if checked == exercise or names & _names(answers)]
    return rejected[-1] if rejected else ""


def _not_drawn(exercise, error, rejected_in) -> Verdict:
    """A wrong answer may return what no picture is prepared for, and break in a line of ours."""
    return Verdict(exercise, False, "this cannot be drawn with what your code returned: "
                                    f"{message_of(error)}",
                   f"The check of exercise {rejected_in} says what is wrong.", code="not_drawn")


def _fits(function, answers, options) -> bool:
    try:
        inspect.signature(function).bind(*answers, **options)
    except TypeError:
        return False
    return True


def _hinted(verdict, hints):
    hint = next((hint for part, hint in hints.items()
                 if part == verdict.code or part in verdict.sentence), "")
    return verdict if verdict.hint or not hint else replace(verdict, hint=hint)


def verdict_of(exercise: str, error: BaseException, answers: tuple = ()) -> Verdict:
    """What a check says where the student's code, or the check itself, raised `error`; raises it
    where no line of the student's is involved. answers: what the check was given: one that cannot
    be called as the check calls it is shown with its signature."""
    cause = error.cause if isinstance(error, RankFailed) and error.cause is not None else error
    if isinstance(cause, NotImplementedError) and str(cause).startswith("Exercise"):
        own = str(cause) == f"Exercise {exercise}"
        return Verdict(exercise, None, ("is waiting for your code" if own else f"waits for {cause}")
                       + _line_to_remove(error))
    # A name of another cell, which has not run: nothing is known of the answer.
    if isinstance(cause, NameError) and (first := notebook_cells.what_to_run(str(cause))):
        return Verdict(exercise, None, f"waits for another cell. {first}")
    if isinstance(cause, Wrong):
        line = f"\n    {cause.place}:  {cause.place.source}" if cause.place else ""
        return Verdict(exercise, False, cause.sentence + line, cause.hint, _printed(error),
                       cause.code)
    # A launch names the rank and the student's line itself (labs/workers/failures.py).
    if isinstance(error, LaunchError):
        return Verdict(exercise, False, str(error), printed=_printed(error), code=_code_of(error))
    if _is_ours(error, answers):
        raise error  # no line of the student's is involved: a mistake of ours must not be hidden
    own = own_place(error)
    if own:
        return Verdict(exercise, False, f"{message_of(error)}\n    {own}, in {own.function}:  "
                                        f"{own.source}", code=_code_of(error))
    signature = _signature_of(error, answers)
    return Verdict(exercise, False, f"{message_of(error)}{signature}",
                   "Keep the first line of what you fill in as it was." * bool(signature),
                   code="wrong_signature" if signature else _code_of(error))


def _code_of(error: BaseException) -> str:
    """The code of what the check itself did not raise: "raised_KeyError" where the student's code
    raised that, on a rank too; else how the launch ended."""
    if isinstance(error, RankFailed) and error.cause is not None:
        error = error.cause
    if isinstance(error, LaunchError):
        code = _LAUNCH_CODES.get(type(error).__name__, "launch_failed")
        return getattr(error, "code", code)
    return f"raised_{type(error).__name__}"


def _line_to_remove(error) -> str:
    """Where the line that raises still stands below code, and is all that waits; or empty."""
    place = (error.outcomes[error.rank].place if isinstance(error, RankFailed) else
             own_place(error))
    left = place.left_below_code if place else ""
    return left and f": {left}"


def _is_ours(error, answers) -> bool:
    """Whether no line of the student's is involved, and no answer that says what it says itself."""
    waits = isinstance(error, NotImplementedError) and str(error).startswith("Exercise")
    return not (waits or isinstance(error, Wrong | LaunchError | TooMuchOutput)
                or own_place(error) or _signature_of(error, answers))


def _signature_of(error, answers) -> str:
    """The signature of the answer whose call failed because its arguments do not fit; or empty."""
    # Python's own message of a call that does not fit: "f() takes 1 positional argument but 2 ..."
    called = re.match(r"(\S+)\(\) (takes|missing|got)", str(error))
    if not isinstance(error, TypeError) or not called:
        return ""
    for answer in answers:
        for function in (answer, getattr(answer, "__init__", None),
                         *getattr(answer, "__dict__", {}).values()):
            if getattr(function, "__qualname__", "") == called[1]:
                return f"\n    yours: {called[1].split('.')[-1]}{inspect.signature(function)}"
    return ""


def _printed(error, most: int = 20) -> str:
    """The last lines that the failing rank printed (rank 0, if it is all of them that failed)."""
    rank = getattr(error, "rank", 0)
    text = error.output[rank] if len(getattr(error, "output", ())) > rank else ""
    return "\n".join(f"rank {rank} │ {line}" for line in last_lines(text, most))


def _html(text):
    """Escaped; a number like 1e-06 is not broken over two lines."""
    text = re.sub(r"(\de)-(\d)", "\\1\N{NON-BREAKING HYPHEN}\\2", html.escape(text))
    return text.replace("\n", "<br>")

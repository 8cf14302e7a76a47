"""What a check says: passed, wrong, waiting, or broken in a line of the student's."""

import ast
import re
from pathlib import Path

import pytest
import torch.distributed as dist

import labs
from labs import launch
from labs.checks import guesses, verdicts
from labs.checks.verdicts import Verdict, Wrong, check, kind_of, shows
from labs.workers import source_lines


@check("9.1")
def check_double(double):
    if double(2) != 4:
        raise Wrong("double(2) is not 4", "Times two.", code="wrong")
    return "doubles"


@check("9.2")
def check_on_ranks(function):
    return f"rank 0 says {launch(function, ranks=2, quiet=True)[0]}"


def unfilled(*_):
    raise NotImplementedError("Exercise 9.1")


def test_passed_wrong_and_waiting():
    assert str(check_double(lambda x: 2 * x)) == "✓ Exercise 9.1  doubles"
    wrong = "✗ Exercise 9.1  double(2) is not 4\n  Hint: Times two."
    assert str(check_double(lambda x: x)) == wrong
    assert str(check_double(unfilled)) == "○ Exercise 9.1  is waiting for your code"
    assert str(check_double(...)) == "○ Exercise 9.1  is waiting for your answer"
    assert "waits for Exercise 9.1" in str(check_on_ranks(unfilled))


def test_a_line_that_still_raises_below_code_is_named():
    def filled(x=1):
        """Twice."""
        doubled = 2 * x
        raise NotImplementedError("Exercise 9.1")
        return doubled

    def with_a_docstring(x):
        """Twice."""
        raise NotImplementedError("Exercise 9.1")

    def given(x):
        doubled = 0
        # your code here
        raise NotImplementedError("Exercise 9.1")
        return doubled

    said = str(check_double(filled))
    assert re.match(r"○ Exercise 9.1  is waiting for your code: test_verdicts.py line \d+ ", said)
    assert said.endswith(" still raises an error, below your code; remove that line")
    assert "waits for Exercise 9.1: test_verdicts.py line" in str(check_on_ranks(filled))
    for waiting in (with_a_docstring, given):
        assert str(check_double(waiting)) == "○ Exercise 9.1  is waiting for your code"


def test_under_nbgrader_what_is_no_pass_raises(monkeypatch, capsys):
    """nbgrader gives all points for a cell that raises nothing, and shows nothing but a number."""
    monkeypatch.setenv(verdicts.NBGRADER, "autograde")
    assert check_double(lambda x: 2 * x) is None
    assert "✓ Exercise 9.1  doubles\n" in capsys.readouterr().out
    for answer, said in ((lambda x: x, "✗ Exercise 9.1"), (..., "○ Exercise 9.1"),
                         (unfilled, "○ Exercise 9.1"), (sorted, "✗ Exercise 9.1")):
        with pytest.raises(verdicts.NotPassed, match=said) as raised:
            check_double(answer)
        assert raised.value._render_traceback_()[0].startswith(said)


def test_the_students_own_error_is_shown_with_its_line():
    def double(x):
        return x + "2"

    verdict = check_double(double)
    assert verdict.passed is False
    assert 'return x + "2"' in str(verdict) and "test_verdicts.py line" in str(verdict)


def test_our_own_mistakes_are_not_hidden(monkeypatch):
    @check("9.3")
    def broken(_):
        raise ZeroDivisionError

    # here the check itself is in a test file, so it counts as the student's; a library's does not
    assert broken(1).passed is False
    monkeypatch.setattr(source_lines.Place, "is_students", False)
    with pytest.raises(ZeroDivisionError):
        broken(1)


@pytest.fixture
def nothing_rejected(monkeypatch):
    monkeypatch.setattr(verdicts, "_rejected", {})


def test_a_picture_of_a_rejected_answer_says_where_to_look(nothing_rejected, monkeypatch):
    """What a wrong answer returns may break in a line of ours: the check has said why. Without its
    word, and after a ✓, the mistake is ours."""
    @check("9.6")
    def check_pair(pair):
        if pair() is None:
            raise Wrong("pair returned nothing", code="wrong")
        return "a pair"

    @shows("9.6")
    def show_pair(pair):
        first, second = pair()
        return first + second

    monkeypatch.setattr(source_lines.Place, "is_students", False)
    with pytest.raises(TypeError):
        show_pair(lambda: None)
    assert check_pair(lambda: None).passed is False
    verdict = show_pair(lambda: None)
    assert verdict.passed is False and "cannot be drawn" in str(verdict), verdict
    assert "NoneType" in str(verdict) and "The check of exercise 9.6 says what" in str(verdict)
    assert check_pair(lambda: (1, 2)).passed and show_pair(lambda: (1, 2)) == 3
    with pytest.raises(TypeError):
        show_pair(lambda: None)


def test_a_picture_with_a_rejected_answer_of_another_exercise_names_that_one(nothing_rejected,
                                                                             monkeypatch):
    @check("9.5")
    def check_any(_):
        raise Wrong("no", code="wrong")

    @check("9.7")
    def check_unit(unit):
        raise Wrong("unit is not 1", code="wrong")

    @shows("9.8")
    def show_units(number, unit):
        return number() / unit()

    def number():
        return 3

    def unit():
        return None

    monkeypatch.setattr(source_lines.Place, "is_students", False)
    check_unit(unit)
    check_any(lambda: None)
    assert "The check of exercise 9.7 says" in str(show_units(number, unit))
    with pytest.raises(TypeError):
        show_units(number, lambda: None)


def test_a_failure_on_a_rank_is_a_verdict(warm_launcher):
    def fails():
        if dist.get_rank() == 1:
            raise ValueError("mine")

    verdict = check_on_ranks(fails)
    assert verdict.passed is False and "rank 1 raised ValueError: mine" in str(verdict)


@pytest.mark.parametrize("body, words", [
    ("while dist.get_rank() == 1: pass", ("not done after 1 s", "rank 1 computes at",
                                          "is there a loop on rank 1 that never ends?")),
    ("while True: print('again')", ("ranks 0 and 1 compute at", "… ", "lines above this one")),
    ("import sys; sys.exit('enough')", ("rank 0 called sys.exit(enough)",)),
    ("import os; os._exit(7)", ("ended its process with exit code 7",)),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", ("killed by signal 15 (SIGTERM)",)),
    ("print('x' * 10**7); raise ValueError", ("raised ValueError", "9,998,000 characters more")),
], ids=["loop", "endless print", "sys.exit", "os._exit", "signal", "a long line"])
def test_what_an_answer_may_do_on_a_rank_ends_in_a_short_verdict(body, words, warm_launcher,
                                                                 monkeypatch):
    monkeypatch.setattr(verdicts, "LAUNCH_SECONDS", 1)
    defined = {"dist": dist}
    exec(compile(f"def answer():\n    {body}\n    return 1", __file__, "exec"), defined)
    verdict = check_on_ranks(defined["answer"])
    assert verdict.passed is False and len(str(verdict)) < 10_000
    assert all(part in str(verdict) for part in words), verdict


def test_a_verdict_passes_through_what_needs_it():
    @shows("9.1")
    def picture(result):
        return f"picture of {result}"

    waiting = check_double(unfilled)
    assert picture(waiting) is waiting and picture(3) == "picture of 3"


def test_html_is_escaped():
    html = Verdict("9.1", False, "a < b", "use <=")._repr_html_()
    assert "a &lt; b" in html and "use &lt;=" in html and "<b" in html


def test_guesses():
    assert repr(labs.guess("9.1", "bytes", 3)) == "your guess, bytes: 3"
    assert guesses.guessed("9.1") == 3
    assert "put a number in place of ..." in repr(labs.guess("9.1", "bytes", ...))
    assert guesses.guessed("9.1") is None
    labs.guess("9.1", "bytes", 4)
    for value, kind in (("ten", "a str"), (float("nan"), "nan"), (True, "a bool"), ([3], "a list")):
        wrong = labs.guess("9.1", "bytes", value)
        assert repr(wrong).startswith("○ no guess yet for bytes: a guess is one number, for example"
                                      f" 1.5, and this is {kind}")
        assert "one number" in wrong._repr_html_() and guesses.guessed("9.1") is None


def test_a_picture_of_no_exercise_is_named_by_its_title():
    @shows("Two ranks")
    def draw(answer):
        raise Wrong("nothing to draw", code="wrong")

    assert str(draw(1)) == "✗ Two ranks  nothing to draw"
    assert "✗ Two ranks" in draw(1)._repr_html_()
    assert str(draw(...)) == "○ Two ranks  is waiting for your answer"


@pytest.mark.parametrize(("value", "words"), [
    (None, "nothing (None)"), ((1, 2), "a tuple of 2"), (1, "an int"), ("", "a str"),
    (type("FSDPThing", (), {})(), "an FSDPThing"), (type("Flat", (), {})(), "a Flat")])
def test_a_value_is_called_by_its_kind(value, words):
    assert kind_of(value) == words


def test_a_verdict_has_a_code_whoever_raises_it():
    """What programs and tests ask for; the sentence is for people. Also from a rank, where it is
    pickled."""
    def fails(x):
        raise KeyError("x")

    def stuck():
        if dist.get_rank() == 0:
            dist.barrier()

    assert check_double(lambda x: x).code == "wrong" and check_double(lambda x: 2 * x).code == ""
    assert check_double(fails).code == "raised_KeyError"
    assert check_double().code == "wrong_call"
    assert check_on_ranks(lambda: fails(1)).code == "raised_KeyError"
    assert check_on_ranks(stuck).code == "deadlock"

    def wrong():
        raise Wrong("no", "hint", code="some_code")

    found = check_on_ranks(wrong)
    assert (found.code, found.sentence, found.hint) == ("some_code", "no", "hint")


def test_every_wrong_in_the_labs_has_a_code():
    without, codes = [], set()
    for path in Path(labs.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Wrong", "Cause",
                                                                              "Mistake"):
                first = node.args[:1] if node.func.id != "Wrong" else []
                code = next((keyword.value for keyword in node.keywords
                             if keyword.arg == "code"), *first or [None])
                if code is None:
                    without.append(f"{path.name}:{node.lineno}")
                elif isinstance(code, ast.Constant):
                    codes.add(code.value)
    assert not without
    assert not [code for code in codes if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", code)]

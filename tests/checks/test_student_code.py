"""Whatever student code does in the kernel, a check ends in a verdict; the stop button works."""

import builtins
import signal
import sys
import threading
import time
from _thread import interrupt_main

import pytest
from notebook_kernel import Kernel

from labs.checks import student_code
from labs.checks.verdicts import Verdict, check, shows
from labs.workers import hang_rules, source_lines


@check("9.1")
def check_call(function, *, times=1):
    for _ in range(times):
        function()
    return "called"


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


class Ends:
    def sys_exit():
        sys.exit(3)

    def plain_exit():
        raise SystemExit

    def generator_exit():
        raise GeneratorExit

    def base_exception():
        raise BaseException("mine")

    def message_that_raises():
        raise Unspeakable

    def recursion():
        Ends.recursion()

    def stop_iteration_inside_a_generator():
        return [next(iter([])) for _ in (x for x in [1])]

    def generator_that_stops():
        return list(next(iter([])) for _ in [1])

    def asks():
        exec(input("code: "))

    def prints_without_end():
        while True:
            print("x" * 1000)

    def prints_without_end_and_catches_all():
        while True:
            try:
                print("y" * 1000)
            except Exception:
                pass

    def writes_to_stderr_without_end():
        while True:
            sys.stderr.write("z" * 10_000)

    def huge_message():
        raise KeyError("k" * 10_000_000)

    def many_lines():
        raise ValueError("line\n" * 100_000)

    def assertion():
        assert 1 == 2


SAID = {"sys_exit": "the code called sys.exit(3)", "plain_exit": "the code called sys.exit()",
        "generator_exit": "GeneratorExit", "base_exception": "BaseException: mine",
        "message_that_raises": "Unspeakable: (its message cannot be shown: ValueError)",
        "recursion": "RecursionError: maximum recursion depth exceeded",
        "stop_iteration_inside_a_generator": "StopIteration",
        "generator_that_stops": "RuntimeError: generator raised StopIteration",
        "asks": "RuntimeError: a check cannot answer input()",
        "prints_without_end": "it printed more than 1,000,000 characters",
        "prints_without_end_and_catches_all": "it printed more than 1,000,000 characters",
        "writes_to_stderr_without_end": "it printed more than 1,000,000 characters",
        "huge_message": "KeyError: 'kkk", "many_lines": "ValueError: line\nline",
        "assertion": "AssertionError"}


@pytest.mark.parametrize("name", SAID)
def test_it_ends_in_a_verdict_with_the_students_line(name, capsys):
    verdict = check_call(vars(Ends)[name])
    printed = capsys.readouterr()
    assert verdict.passed is False and verdict.sentence.startswith(SAID[name])
    assert "test_student_code.py line" in str(verdict) or "characters)" in str(verdict)
    assert len(str(verdict)) < 5000 and len(printed.out) + len(printed.err) < 25_000
    assert builtins.input is not student_code._refuse_input


def test_what_is_said_first_is_shown(capsys):
    verdict = check_call(lambda: print("a" * 20_000))
    printed = capsys.readouterr().out
    assert verdict.passed and printed.startswith("a" * 10_000 + "\n… (a check shows the first 10,0")


def test_few_words_are_shown_as_they_are(capsys):
    check_call(lambda: print("hello"), times=2)
    assert capsys.readouterr().out.startswith("hello\nhello\n✓")


def test_a_picture_is_guarded_too():
    @shows("9.1")
    def draw(function):
        return function()

    assert "sys.exit(3)" in str(draw(Ends.sys_exit))


@pytest.fixture
def nobodys(monkeypatch):
    """No line counts as the student's: the checks of this file are as those of labs."""
    monkeypatch.setattr(source_lines.Place, "is_students", False)


def test_wrong_arguments_are_shown_with_the_signature(nobodys):
    def answer(a, b):
        return a + b

    class Answer:
        def __init__(self, model):
            self.model = model

    verdict = check_call(answer)
    assert "answer() missing 2 required" in str(verdict) and "yours: answer(a, b)" in str(verdict)
    assert "as it was" in verdict.hint
    assert "yours: __init__(self, model)" in str(check_call(Answer))
    assert str(check_call()) == "✗ Exercise 9.1  check_call takes (function, *, times=1)"


def test_a_mistake_of_ours_is_not_hidden(nobodys):
    for function, error in ((Ends.recursion, RecursionError),
                            (Ends.plain_exit, SystemExit)):
        with pytest.raises(error):
            check_call(function)


def interrupted(function, after=0.3):
    """The KeyboardInterrupt that ends a check of `function` when the student stops it."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(after, interrupt_main).start()
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            check_call(function)
    finally:
        signal.signal(signal.SIGINT, old)
    return stopped.value


def test_an_endless_loop_can_be_stopped_and_says_where_it_was():
    def loops():
        while True:
            time.sleep(0.01)

    error = interrupted(loops)
    line, *rest = error._render_traceback_()
    assert line.startswith("interrupted in your code, at test_student_code.py line ")
    assert line.endswith(":  time.sleep(0.01)") and rest[-1].startswith("To continue, run this")


def test_an_endless_loop_is_pointed_at(monkeypatch, capsys):
    monkeypatch.setattr(hang_rules, "STALL_NOTICE", 0.2)

    def loops():
        while True:
            time.sleep(0.01)

    interrupted(loops, after=0.6)
    said = capsys.readouterr().out
    assert "the check is still in your code, at test_student_code.py line" in said


def test_what_takes_long_elsewhere_is_not_pointed_at(monkeypatch, capsys, nobodys):
    monkeypatch.setattr(hang_rules, "STALL_NOTICE", 0.1)

    @check("9.1")
    def check_slowly(function):
        time.sleep(0.3)
        return "done"

    assert check_slowly(1).passed and "still in your code" not in capsys.readouterr().out


def test_a_long_sentence_is_cut():
    assert str(Verdict("9.1", False, "x" * 10**6)).endswith("… (1,000,000 characters)")


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run("import labs.memory_math as lab")
    yield kernel
    kernel.close()


@pytest.mark.slow
@pytest.mark.parametrize("body, said", [
    ("exit()", "the code called sys.exit()"), ("import sys; sys.exit(1)", "sys.exit(1)"),
    ("raise KeyError('k' * 10**7)", "KeyError: 'kkk"), ("input('code')", "cannot answer input()"),
    ("[print('x' * 1000) for _ in iter(int, 1)]", "more than 1,000,000 characters")])
def test_a_cells_check_ends_in_a_verdict_and_the_kernel_lives(kernel, body, said):
    text, error = kernel.run(f"def block_parameters(m):\n    {body}\n"
                             "lab.check_parameters(block_parameters, block_parameters)")
    assert error is None and said in text and len(text) < 20_000
    assert "In [" in text and "line 2" in text
    assert kernel.run("print(6 * 7)") == ("42\n", None)


def test_the_stop_button_ends_a_cells_check_and_says_what_to_run_next(kernel):
    kernel.start("def block_parameters(m):\n    print('runs')\n    while True: pass\n"
                 "lab.check_parameters(block_parameters, block_parameters)\nprint('goes on')")
    kernel.finish(until="runs")
    kernel.manager.interrupt_kernel()
    text, error = kernel.finish(timeout=20)
    line, *rest = error.strip().splitlines()
    assert line.startswith("interrupted in your code, at In [") and "goes on" not in text
    assert line.endswith("line 3:  while True: pass")
    assert [words[:21] for words in rest] == ["The cell was at work ", "To continue, run this",
                                              "defined is still ther"]

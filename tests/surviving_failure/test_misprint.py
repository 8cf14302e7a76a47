"""What the check of exercise 8.8 must reject, and what it must accept."""

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab

right = definitions("08_surviving_failure")
WRONG, RIGHT = {}, {}
# 8.8 misprint


WRONG[lab.check_misprint] = [
    (lambda causes, total: None, "wrong_count nothing"),
    (lambda causes, total: "Faulty GPU", "wrong_count"),
    (lambda causes, total: ("Faulty GPU", 35.3, 126), "unknown_name"),
    (lambda causes, total: (0, 30.1, 126), "wrong_type"),
    (lambda causes, total: ("Software bug", 12.9, 54), "wrong_row"),
    (lambda causes, total: (right.misprint(causes, total)[0], 30.1, 126), "printed"),
    (lambda causes, total: (right.misprint(causes, total)[0],
                            right.misprint(causes, total)[1] / 100, 126), "fraction"),
    (lambda causes, total: (*right.misprint(causes, total)[:2], 148),
     "count_printed"),
    (lambda causes, total: right.misprint(causes, sum(each.count for each in causes)),
     "sum_counts|wrong_row")]
RIGHT[lab.check_misprint] = [
    lambda causes, total: [*right.misprint(causes, total)],
    lambda causes, total: (right.misprint(causes, total)[0],
                           round(right.misprint(causes, total)[1], 1),
                           round(right.misprint(causes, total)[2]))]
CASES = [pytest.param(check, answer, words, id=f"{check.__name__}-{at}")
         for check, answers in WRONG.items() for at, (answer, words) in enumerate(answers)]


@pytest.mark.parametrize(("check", "answer", "words"), CASES)
def test_wrong_answers(check, answer, words):
    verdict = check(answer)
    print(verdict)
    assert_rejected(verdict, words)


@pytest.mark.parametrize(("check", "answer"), [(check, answer) for check, answers in RIGHT.items()
                                               for answer in answers])
def test_right_answers(check, answer):
    assert check(answer).passed


@pytest.mark.parametrize(("check", "exercise"), [
    (lab.check_misprint, "8.8")])
def test_unfilled(check, exercise):
    assert_waits(check, exercise)

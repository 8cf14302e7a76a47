"""What the check of exercise 8.8 must reject, and what it must accept."""

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab

right = definitions("08_surviving_failure")
# 8.8 misprint


def off_by_more_than(least):
    """The first row that is off by more percent than rounding alone explains, and then some."""
    def misprint(causes, total):
        found = [cause for cause in causes
                 if abs(100 * cause.count / total - cause.percent) > least]
        row = found[0] if found else causes[0]
        return row.name, round(100 * row.count / total, 1), row.percent * total / 100
    return misprint


WRONG = [
    (off_by_more_than(0.2), "wrong_row"),
    (off_by_more_than(0.5), "wrong_row"),
    (off_by_more_than(0.01), "wrong_row"),
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
RIGHT = [
    off_by_more_than(0.0501),
    lambda causes, total: [*right.misprint(causes, total)],
    lambda causes, total: (right.misprint(causes, total)[0],
                           round(right.misprint(causes, total)[1], 1),
                           round(right.misprint(causes, total)[2]))]
@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_misprint(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_misprint(answer)
    assert verdict.passed is True, str(verdict)


def test_unfilled():
    assert_waits(lab.check_misprint, "8.8")

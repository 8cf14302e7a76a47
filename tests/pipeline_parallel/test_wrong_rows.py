"""What the check of exercise 7.22 must reject, and what it must accept."""

import pytest
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab

WRONG, RIGHT = {}, {}


# 7.22: wrong_rows


def right_rows(rows):
    return {number: row.gpus // (row.tensor * row.context * row.pipeline)
            for number, row in enumerate(rows)
            if row.gpus != row.tensor * row.context * row.pipeline * row.data}


WRONG[lab.check_wrong_rows] = [
    ((lambda rows: None,), "wrong_type dictionary"),
    ((lambda rows: {},), "missing_entry"),
    ((lambda rows: {2: 8},), "extra_entry without"),
    ((lambda rows: {1: 128, 2: 8},), "extra_entry"),
    ((lambda rows: [2],), "not_a_dictionary|wrong_type"),
    ((lambda rows: {number + 1: size for number, size in right_rows(rows).items()},),
     "missing_entry"),
    ((lambda rows: {number: rows[number].data for number in right_rows(rows)},),
     "wrong_number"),
    ((lambda rows: {number: size * rows[number].context
                    for number, size in right_rows(rows).items()},),
     "wrong_number"),
    ((lambda rows: {number: row.gpus // row.tensor // row.pipeline for number, row in
                    enumerate(rows) if row.gpus != row.tensor * row.pipeline * row.data},),
     "wrong_number")]
RIGHT[lab.check_wrong_rows] = [
    (right_rows,), (lambda rows: {n: float(size) for n, size in right_rows(rows).items()},)]


@pytest.mark.parametrize(("check", "answers", "words"), [
    (check, answers, words) for check, cases in WRONG.items() for answers, words in cases])
def test_wrong(check, answers, words):
    assert_rejected(check(*answers), words)


@pytest.mark.parametrize(("check", "answers"), [
    (check, answers) for check, cases in RIGHT.items() for answers in cases])
def test_right(check, answers):
    verdict = check(*answers)
    assert verdict.passed is True, str(verdict)


def test_what_is_not_filled_in_waits():
    assert_waits(lab.check_wrong_rows, "7.22")

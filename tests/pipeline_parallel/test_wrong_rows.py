"""What the check of exercise 7.22 must reject, and what it must accept."""

import pytest
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab

# 7.22: wrong_rows


def right_rows(rows):
    return {number: row.gpus // (row.tensor * row.context * row.pipeline)
            for number, row in enumerate(rows)
            if row.gpus != row.tensor * row.context * row.pipeline * row.data}


WRONG = [
    ((lambda rows: None,), "wrong_type dictionary"),
    ((lambda rows: {},), "missing_entry"),
    ((lambda rows: {2: 8},), "extra_entry without"),
    ((lambda rows: {1: 128, 2: 8},), "extra_entry"),
    ((lambda rows: [2],), "not_a_dictionary|wrong_type"),
    ((lambda rows: dict(list(right_rows(rows).items())[:1]),), "missing_entry two"),
    ((lambda rows: dict(list(right_rows(rows).items())[-1:]),), "missing_entry two"),
    ((lambda rows: {n: size for n, size in right_rows(rows).items() if size > rows[n].data},),
     "missing_entry"),
    ((lambda rows: {number + 1: size for number, size in right_rows(rows).items()},),
     "missing_entry"),
    ((lambda rows: {number: rows[number].data for number in right_rows(rows)},),
     "wrong_number"),
    ((lambda rows: {number: size * rows[number].context
                    for number, size in right_rows(rows).items()},),
     "wrong_number"),
    ((lambda rows: {number: row.gpus // row.tensor // row.pipeline for number, row in
                    enumerate(rows) if row.gpus != row.tensor * row.pipeline * row.data},),
     "wrong_number"),
    ((lambda rows: {rows[n]: size for n, size in right_rows(rows).items()},), "not_a_number key"),
    ((lambda rows: {n: str(size) for n, size in right_rows(rows).items()},), "not_a_number size"),
    ((lambda rows: {n: None for n in range(len(rows))},), "not_a_number size")]
RIGHT = [
    (right_rows,), (lambda rows: {n: float(size) for n, size in right_rows(rows).items()},)]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_wrong_rows(*answers), expected)


@pytest.mark.parametrize("answers", RIGHT)
def test_right(answers):
    verdict = lab.check_wrong_rows(*answers)
    assert verdict.passed is True, str(verdict)


def test_what_is_not_filled_in_waits():
    assert_waits(lab.check_wrong_rows, "7.22")

"""What notebook 07b draws of the schedules of exercises 7.14 to 7.17."""

import pytest

import labs
import labs.pipeline_parallel as lab
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.pipeline_parallel import B, F, W
from labs.predictions.pipelines import schedules as known

LEGAL = [[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]]


def as_lists(schedule):
    return [[{"F": F, "B": B, "W": W}[action.kind](action.micro_batch,
                                                  action.stage // len(schedule.ranks))
             for action in actions] for actions in schedule.ranks]


def gpipe(ranks, micro_batches):
    return as_lists(known.gpipe(ranks, micro_batches))


def one_f_one_b(ranks, micro_batches):
    return as_lists(known.one_f_one_b(ranks, micro_batches))


def interleaved(ranks, micro_batches, chunks):
    return as_lists(known.interleaved(ranks, micro_batches, chunks))


def zb_h1(ranks, micro_batches):
    return as_lists(known.zb_h1(ranks, micro_batches))


def test_a_schedule_that_is_written_down():
    picture = lab.show_schedule(LEGAL, micro_batches=2)
    assert isinstance(picture, Picture) and str(picture).startswith("schedule: 9 slots, bubble 33")
    assert lab.why_illegal(LEGAL, micro_batches=2) == "the schedule is legal"


@pytest.mark.parametrize("lists, words", [
    (LEGAL[::-1], "wait in a cycle"), (LEGAL[:1], "rank 0 never runs|there is no|waits"),
    ([[F]], "is no action")])
def test_an_illegal_one_is_explained(lists, words):
    found = lab.show_schedule(lists, micro_batches=3)
    assert found.passed is False
    assert lab.why_illegal(lists, micro_batches=3) in str(found)


def test_schedules_beside_their_formulas_and_guesses():
    labs.guess("7.14", "bubble", 25)
    labs.guess("7.15", "peak", 5)
    try:
        picture = lab.show_schedules(gpipe, one_f_one_b, interleaved, ranks=4, micro_batches=8,
                                     activation_gb=2.0)
        other = lab.show_schedules(gpipe, ranks=2, micro_batches=2)
    finally:
        labs.guess("7.14", "bubble", ...), labs.guess("7.15", "peak", ...)
    first, second, third = str(picture).splitlines()
    assert "(formula 27.3%, your guess 25.0%), at most 16 GB (formula 16)" in first
    assert "1F1B: 33 slots" in second and "at most 8 GB (formula 8)" in second
    assert "1F1B-I: 28.5 slots" in third and "at most 11 GB" in third
    assert [one.guessed_peak for one in picture.data] == [None, 10, None]
    assert "your guess" not in str(other)  # it is of 4 ranks and 8 micro-batches


def test_a_schedule_of_ones_own_has_no_formula():
    def mine(ranks, micro_batches):
        return gpipe(ranks, micro_batches)

    assert str(lab.show_schedules(mine, ranks=2, micro_batches=2)).startswith("mine: 9 slots")


def test_pictures_wait_and_say_what_is_illegal():
    def unfilled(ranks, micro_batches):
        raise NotImplementedError("Exercise 7.15")

    def half(ranks, micro_batches):
        return [[F(0)]] * ranks

    assert lab.show_schedules(gpipe, unfilled, ranks=2, micro_batches=2).passed is None
    assert "half(2, 2): rank 0 never runs B(0)" in str(
        lab.show_schedules(half, ranks=2, micro_batches=2))


def test_the_second_zero_bubble_schedule_has_none_by_the_clock_of_one_rank():
    first, second = str(lab.show_zb_h2(zb_h1, ranks=4, micro_batches=8)).splitlines()
    assert first.startswith("ZB-H1: 27 slots")
    assert "24 slots by the clock of one rank (27 by the cluster's), bubble 0.0%" in second


def test_the_published_bubbles_of_a_model():
    table = lab.show_published_bubbles("6.2B")
    assert isinstance(table, Table) and len(table.rows) == 12
    by_name = {(row[0], row[2]): row[3:] for row in table.rows}
    assert by_name["ZB-H2", 24] == ("0.0698", "0.0698", "0.1003", "0.0665")
    assert by_name["1F1B", 64][:2] == ("0.1091", "0.1091")

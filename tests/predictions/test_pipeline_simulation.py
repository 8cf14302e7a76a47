"""The known schedules, simulated, against their closed forms."""

import pytest

from labs.predictions.pipelines import (
    CLUSTER,
    KINDS,
    RANK,
    Action,
    B,
    F,
    IllegalSchedule,
    Schedule,
    Timeline,
    Times,
    W,
    first_illegal,
)
from labs.predictions.pipelines.simulate import simulate

RANKS = [1, 2, 3, 4, 5, 8]
MICRO_BATCHES = [1, 2, 3, 4, 5, 8, 12, 16, 24]
TIMES = [Times(), Times(1.0, 1.3, 0.6), Times(1.7, 1.0, 0.9)]
CASES = [(name, p, m, v) for name in KINDS for p in RANKS for m in MICRO_BATCHES
         for v in ([1, 2, 3] if name == "1F1B-I" else [1])
         if name != "1F1B-I" or m % p == 0]


@pytest.mark.parametrize("name", KINDS)
def test_every_known_schedule_is_legal_and_takes_as_long_as_its_formula_says(name):
    kind = KINDS[name]
    for _, p, m, v in (case for case in CASES if case[0] == name):
        schedule = kind.build(p, m, v)
        assert first_illegal(schedule) is None, (p, m, v)
        for times in TIMES:
            timeline = simulate(schedule, times.chunked(v))
            clocks = [RANK] if name == "ZB-H2" else [RANK, CLUSTER]
            for clock in clocks:
                assert timeline.length(clock) == pytest.approx(kind.length(p, m, v, times))
                assert timeline.bubble(clock) == pytest.approx(kind.bubble(p, m, v, times),
                                                               abs=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_activations_at_the_peak_are_those_of_the_formula(name):
    kind = KINDS[name]
    for _, p, m, v in (case for case in CASES if case[0] == name):
        timeline = simulate(kind.build(p, m, v))
        assert timeline.peaks() == [kind.peak(p, m, v, rank) for rank in range(p)], (p, m, v)
        assert timeline.peak_bytes(10.0) == pytest.approx([10 * n for n in timeline.peaks()])


def test_the_textbooks_shares():
    """(p - 1)/m of the ideal time, (p - 1)/(m + p - 1) of the whole, a v-th of that interleaved."""
    assert KINDS["1F1B"].bubble_of_ideal(4, 8) == pytest.approx(3 / 8)
    assert KINDS["GPipe"].bubble(4, 8) == pytest.approx(3 / 11)
    assert KINDS["1F1B-I"].bubble_of_ideal(4, 8, 2) == pytest.approx(3 / 16)
    assert KINDS["ZB-H1"].lost(4, 8, 1, 3, 2, 1) == 3 * (3 + 2 - 1)
    assert KINDS["ZB-H2"].lost(4, 8, 1, 3, 2, 1) == 3 * (3 + 2 - 2 * 1)


def test_the_two_clocks_differ_where_the_last_rank_starts_late_and_ends_late():
    timeline = simulate(KINDS["ZB-H2"].build(4, 12, 1))
    assert (timeline.length(RANK), timeline.length(CLUSTER)) == (36, 39)
    assert timeline.bubble(RANK) == 0 and timeline.bubble(CLUSTER) == pytest.approx(1 / 13)


def spans(timeline, rank):
    return [(span.action.kind, span.begin, span.end) for span in timeline.spans[rank]]


def test_a_transfer_delays_who_receives_and_not_who_sends():
    schedule = Schedule.from_lists([[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]], 2)
    timeline = simulate(schedule, Times(1, 1, 1, transfer=[0.5, 0.25]))
    assert spans(timeline, 0)[:2] == [("F", 0, 1), ("F", 1, 2)]
    assert spans(timeline, 1)[:2] == [("F", 1.5, 2.5), ("B", 2.5, 4.5)]
    assert spans(timeline, 0)[2] == ("B", 4.75, 6.75)


def test_two_stages_of_one_rank_send_nothing():
    schedule = Schedule.from_lists([[F(0), F(0, 1), B(0, 1), B(0)]], 1, 2)
    assert simulate(schedule, Times(transfer=9)).makespan == 6


def test_times_by_stage():
    schedule = Schedule.from_lists([[F(0), B(0)], [F(0), B(0), W(0)]], 1)
    timeline = simulate(schedule, Times(F=[1, 2], B=[3, 4], W=[5, 6]))
    assert spans(timeline, 1) == [("F", 1, 3), ("B", 3, 7), ("W", 7, 13)]
    assert spans(timeline, 0) == [("F", 0, 1), ("B", 7, 15)]
    assert timeline.bubble() == pytest.approx(1 - (9 + 12) / 2 / 15)


def test_bytes_of_uneven_stages_and_what_only_a_part_of_them_keeps():
    schedule = Schedule.from_lists([[F(0), F(1), B(0), B(1)],
                                    [F(0), B(0), F(1), B(1), W(0), W(1)]], 2)
    timeline = simulate(schedule)
    assert timeline.peaks() == [2, 2]
    assert timeline.peak_bytes([100, 10]) == [200, 20]
    # when F(1) begins, all but a quarter of micro-batch 0 is free
    assert timeline.peak_bytes([100, 10], kept_for_weights=0.25) == [200, 12.5]


def test_a_measured_timeline_answers_the_same_questions():
    actions = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0)]
    measured = [(1, actions[2], 12.0, 14.0), (0, actions[0], 10.0, 11.0),
                (1, actions[1], 11.0, 12.0), (0, actions[3], 14.0, 16.0)]
    timeline = Timeline.from_measured(measured)
    assert spans(timeline, 1) == [("F", 1, 2), ("B", 2, 4)]
    assert timeline.makespan == 6 and timeline.longest_rank_span == 6
    assert timeline.bubble() == pytest.approx(1 - 3 / 6) and timeline.peaks() == [1, 1]


def test_an_illegal_schedule_is_not_simulated():
    with pytest.raises(IllegalSchedule, match="rank 0 never runs B"):
        simulate(Schedule.from_lists([[F(0)]], 1))


def test_megatrons_order_needs_a_multiple_of_the_ranks():
    with pytest.raises(ValueError, match="6 micro-batches are not a multiple of 4 ranks"):
        KINDS["1F1B-I"].build(4, 6, 2)

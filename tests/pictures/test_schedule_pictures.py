"""The pictures of pipeline schedules: what they say, and that they draw whatever is simulated or
measured."""

import pytest
from matplotlib.patches import Rectangle

from labs.pictures import palette
from labs.pictures.schedules import DrawnSchedule, timelines
from labs.predictions.pipelines import KINDS, RANK, Action, Timeline, Times
from labs.predictions.pipelines.simulate import simulate


def drawn(name, p=4, m=8, v=1, **options):
    kind = KINDS[name]
    peaks = [kind.peak(p, m, v, rank) / v for rank in range(p)]
    return DrawnSchedule(name, simulate(kind.build(p, m, v), Times().chunked(v)),
                         bubble=kind.bubble(p, m, v), peaks=peaks, **options)


def boxes(ax, colour):
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)
            and palette.PHASES.get(colour, colour) == _hex(patch.get_facecolor())]


def _hex(rgba):
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in rgba[:3])


def test_the_words_have_bubble_and_peak_beside_their_formulas():
    picture = timelines([drawn("GPipe"), drawn("1F1B-I", v=2, guessed_bubble=0.2)])
    first, second = str(picture).splitlines()
    assert first == ("GPipe: 33 slots, bubble 27.3% (formula 27.3%), at most 8 micro-batches "
                     "(formula 8) on a rank")
    assert "28.5 slots, bubble 15.8% (formula 15.8%, your guess 20.0%)" in second
    assert "at most 5.5 micro-batches (formula 5.5)" in second


def test_each_action_has_a_box_with_its_number_on_one_time_axis():
    picture = timelines([drawn("1F1B"), drawn("ZB-H1")])
    above, below = picture.figure.axes[0], picture.figure.axes[2]
    assert len(boxes(above, "forward")) == len(boxes(above, "backward")) == 32
    assert len(boxes(below, palette.BUCKETS[1])) == 32  # W
    assert above.get_xlim() == below.get_xlim() == (0, 33)
    numbers = [text.get_text() for text in above.texts]
    assert sorted(numbers) == sorted(str(i) for i in range(8) for _ in range(8))


def test_zb_h2_is_drawn_by_the_clock_of_one_rank():
    text = str(timelines([drawn("ZB-H2", clock=RANK)]))
    assert "24 slots by the clock of one rank (27 by the cluster's), bubble 0.0%" in text


def test_a_measured_timeline_below_the_simulated_one_has_its_axis():
    simulated = simulate(KINDS["1F1B"].build(2, 3, 1), Times(0.01, 0.01, 0.01))
    measured = Timeline.from_measured([
        (rank, span.action, 100 + 2 * span.begin, 100 + 2 * span.end)
        for rank, spans in enumerate(simulated.spans) for span in spans])
    picture = timelines([
        DrawnSchedule("simulated", simulated, "seconds", held=[4e6 / 1e6, 2], held_unit="MB"),
        DrawnSchedule("measured", measured, "seconds", held=[4.5, 2.2], held_unit="MB",
                      peaks=[4, 2], guessed_peak=5)])
    assert "simulated: 120 milliseconds" in str(picture)
    assert "measured: 240 milliseconds" in str(picture) and "at most 4.5 MB (formula 4)" in str(
        picture)
    assert picture.figure.axes[0].get_xlim() == pytest.approx((0, 240))
    assert picture.figure.axes[2].get_xlim() == picture.figure.axes[0].get_xlim()
    assert picture.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("schedule", [
    drawn("1F1B", 1, 1), drawn("GPipe", 8, 64), drawn("1F1B-I", 2, 4, 4), drawn("ZB-H1", 3, 2)],
    ids=lambda schedule: schedule.title)
def test_any_size_can_be_drawn(schedule):
    timelines([schedule]).figure.draw_without_rendering()


def test_ranks_that_ran_nothing_yet():
    timeline = Timeline.from_measured([(2, Action("F", 0, 2), 1.0, 2.0)])
    assert timeline.peaks() == [0, 0, 1]
    assert "1e+03" not in str(timelines([DrawnSchedule("part", timeline, "seconds")]))

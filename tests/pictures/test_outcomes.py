"""What became of each rank, drawn from outcomes as the launcher gives them."""

import pytest
from drawn import on_the_sheet

from labs.pictures import outcomes
from labs.workers.failures import RankFailed, RanksStuck
from labs.workers.outcomes import Kind, Outcome
from labs.workers.source_lines import Place

HERE = Place(__file__, 1, "train")


def stuck(*found):
    return RanksStuck("deadlock", list(found), code="deadlock")


def test_lanes_of_a_deadlock():
    error = stuck(Outcome(0, Kind.RETURNED, issued=2),
                  Outcome(1, Kind.WAITING, collective="all_reduce", number=3, stack=[HERE]),
                  Outcome(2, Kind.COMPUTING, stack=[HERE]))
    picture = outcomes.draw_failure(error, guessed=0)
    assert [(lane.done, lane.label) for lane in picture.data] == [
        (2, "returned"), (2, "waits in all_reduce (#3)"), (None, "computes")]
    assert "rank 0 it is" in picture.text
    on_the_sheet(picture)


def test_lanes_of_a_failure():
    error = ValueError("a long story " * 30)
    root = Outcome(0, Kind.RAISED, error, "ValueError", str(error), [HERE])
    picture = outcomes.draw_failure(RankFailed(root, [root, Outcome(1, Kind.KILLED, exit_code=-9),
                                                 Outcome(2, Kind.UNRESPONSIVE)]))
    assert [lane.label for lane in picture.data] == [
        "raised ValueError", "was killed by signal 9", "does not answer"]
    on_the_sheet(picture)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_a_short_label(kind):
    outcome = Outcome(0, kind, error_type="ValueError", message="3", exit_code=-9, number=1,
                      collective="broadcast of float32 [2]")
    assert 0 < len(outcomes.label(outcome)) < 40
    assert "{" not in outcomes.label(outcome)


@pytest.mark.parametrize("guessed, words", [
    (2, "You guessed rank 2; the missing one is rank 0."), (None, "")])
def test_a_guess_is_compared(guessed, words):
    error = stuck(Outcome(0, Kind.RETURNED, issued=0),
                  Outcome(1, Kind.WAITING, collective="barrier", number=1))
    assert outcomes.draw_failure(error, guessed).text.endswith(words or "every collective.")


def test_long_past_is_cut_short():
    error = stuck(Outcome(0, Kind.RETURNED, issued=1000),
                  Outcome(1, Kind.WAITING, collective="all_reduce", number=1001, stack=[HERE]))
    on_the_sheet(outcomes.draw_failure(error))


def test_every_rank_returned():
    picture = outcomes.draw_success([1, list(range(1000))])
    assert picture.text.startswith("rank 0 returned 1")
    on_the_sheet(picture)


@pytest.mark.parametrize(("line", "shown"), [
    ("dist.all_reduce(x)  # sums `x` over all ranks", "dist.all_reduce(x)"),
    ("print('#1')", "print('#1')"), ("# a comment", "# a comment"), ("f(a,  # first", "f(a,")])
def test_a_line_of_code_stands_without_its_comment(tmp_path, line, shown):
    file = tmp_path / "train.py"
    file.write_text(f"{line}\n")
    picture = outcomes.draw_failure(stuck(Outcome(
        0, Kind.WAITING, collective="barrier", number=1, stack=[Place(str(file), 1, "train")])))
    assert shown in [text.get_text() for text in picture.figure.axes[0].texts]
    on_the_sheet(picture)


def test_a_call_with_arguments_is_not_cut(tmp_path):
    file = tmp_path / "In [48]"
    file.write_text("dist.broadcast(total, src=1)\n")
    picture = outcomes.draw_failure(stuck(Outcome(
        1, Kind.MISMATCHED, collective="broadcast of float32 [1] with root 1", number=1,
        stack=[Place(str(file), 1, "train")])))
    texts = [text.get_text() for text in picture.figure.axes[0].texts]
    assert "dist.broadcast(total, src=1)" in texts
    on_the_sheet(picture)

"""A pipeline schedule as data: how it is written, and what makes it illegal."""

import pytest

from labs.predictions.pipelines import Action, B, F, IllegalSchedule, Schedule, W, first_illegal

LEGAL = [[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]]
SPLIT = [[F(0), F(1), B(0), B(1), W(0), W(1)], [F(0), B(0), F(1), B(1), W(0), W(1)]]
CHUNKS = [[F(0), F(0, 1), B(0, 1), B(0)], [F(0), F(0, 1), B(0, 1), B(0)]]


def sentence(lists, micro_batches=2, chunks=1):
    return first_illegal(Schedule.from_lists(lists, micro_batches, chunks))


@pytest.mark.parametrize("lists, micro_batches, chunks", [
    (LEGAL, 2, 1), (SPLIT, 2, 1), (CHUNKS, 1, 2), ([[F(0), B(0)]], 1, 1),
    ([[F(0), F(0, 1), B(0, 1), B(0)]], 1, 2),
    ([[F(0), None, F(1), B(0), "", B(1)], ["1F0", Action("B", 0, 1), F(1), B(1)]], 2, 1),
    ([[F(0), F(1), B(0), B(1)], [F(0), B(0), W(0), F(1), B(1)]], 2, 1)])
def test_a_legal_schedule(lists, micro_batches, chunks):
    assert sentence(lists, micro_batches, chunks) is None
    schedule = Schedule.from_lists(lists, micro_batches, chunks)
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_a_stage_follows_from_the_rank_and_the_chunk():
    schedule = Schedule.from_lists(CHUNKS, 1, 2)
    assert schedule.to_text() == "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0"
    assert [schedule.rank_of(stage) for stage in range(schedule.stages)] == [0, 1, 0, 1]
    assert schedule.name(Action("F", 0, 2)) == "F(0, chunk=1)"


def test_the_text_says_which_backward_is_split():
    assert Schedule.from_lists(SPLIT, 2).to_text().splitlines()[1] == "1F0,1I0,1F1,1I1,1W0,1W1"
    assert Schedule.from_text("0F0,,0I0,0W0").ranks[0][2] == Action("W", 0, 0)


@pytest.mark.parametrize("lists, words", [
    ([[B(0), F(0), F(1), B(1)], LEGAL[1]],
     "rank 0, B(0) at index 0 of its list: the backward of micro-batch 0 comes before its own "
     "forward, F(0)"),
    ([LEGAL[0], [B(0), F(1), B(1)]], "comes without its own forward"),
    ([LEGAL[0], [F(0), W(0), B(0), F(1), B(1)]], "the gradient of the weights of micro-batch 0 "
     "comes before its own backward, B(0)"),
    ([[F(0), B(0)], LEGAL[1]], "rank 1, F(1) at index 2 of its list waits for the output of stage "
     "0, but rank 0 never runs F(1)"),
    ([LEGAL[0], [F(0), F(1), B(1)]], "rank 0, B(0) at index 2 of its list waits for the gradient "
     "of stage 1, but rank 1 never runs B(0)"),
    ([LEGAL[0], []], "rank 1 never runs B(0)"),
    ([[], []], "rank 0 never runs F(0), the forward of micro-batch 0"),
    ([LEGAL[0], [F(0), B(0)]], "rank 1 never runs B(1)"),
    ([[F(0), F(1), B(0)], LEGAL[1]], "rank 0 never runs B(1), the backward of micro-batch 1"),
    ([[F(0), F(0), F(1), B(0), B(1)], LEGAL[1]], "the same action is already in the list"),
    ([[F(0), F(1), Action("F", 0, 1)], LEGAL[1]], "rank 0, F(0) at index 2 of its list: stage 1 is "
     "on rank 1"),
    ([[*LEGAL[0], F(2)], LEGAL[1]], "there is no micro-batch 2; the last one is 1"),
    ([[F(-1), *LEGAL[0]], LEGAL[1]], "there is no micro-batch -1"),
    ([[*LEGAL[0], F(0, 1)], LEGAL[1]], "there is no chunk 1; each rank has 1 chunk"),
    ([[F(0, -1), *LEGAL[0]], LEGAL[1]], "there is no chunk -1"),
    ([[F(0), F(1), B(1), B(0)], [F(0), B(0), F(1), B(1)]], None),
    ([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]],
     "rank 0, B(0) at index 1 of its list: the ranks wait in a cycle: rank 0's B(0) waits for "
     "B(0) of rank 1; rank 1's F(1) waits for F(1) of rank 0; each of these comes later"),
])
def test_the_first_illegal_action_gets_one_sentence(lists, words):
    found = sentence(lists)
    assert found is words or words in found and "\n" not in found


def test_the_earliest_illegal_action_is_named():
    assert sentence([[F(0), F(1), B(0), B(0), B(1)], [B(0), F(0)]]).startswith("rank 1, B(0)")


def test_only_the_ranks_of_the_circle_are_named():
    """Ranks 0 and 1 wait for those of the circle; 2 and 3 are in it."""
    first = [F(0), F(1), B(0), B(1)]
    found = sentence([first, first, [F(0), B(0), F(1), B(1)], first])
    assert found.startswith("rank 2, B(0) at index 1") and "rank 3's F(1)" in found
    assert "rank 0" not in found and "rank 1'" not in found


def test_one_rank_can_wait_for_itself():
    found = sentence([[F(0, 1), F(0), B(0, 1), B(0)]], 1, 2)
    assert found == ("rank 0, F(0, chunk=1) at index 0 of its list: rank 0's F(0, chunk=1) waits "
                     "for F(0) of rank 0, which comes later in the same list")


@pytest.mark.parametrize("lists, words", [
    (None, "not NoneType"), ([], "not something empty"), ({0: []}, "not dict"),
    ([F(0)], "rank 0 has no list"),
    ([[F(0)], None], "rank 1 has no list of actions, but None"), (["F"], "no list of actions"),
    ([[F(0), 7]], "rank 0, index 1 of its list: 7 is no action"), ([[F]], "is no action"),
    ([["F0"]], "'F0' is no action")])
def test_what_is_not_made_of_actions(lists, words):
    with pytest.raises(IllegalSchedule) as error:
        Schedule.from_lists(lists, 1)
    assert words in str(error.value)


@pytest.mark.parametrize("text, words", [
    ("", "no action in the text"), ("0F0,0X0", "'0X0' is no action"),
    ("0F0,0I0", "rank 0: 0I0 is the gradient of the input only, but 0W0 never follows"),
    ("0F0,0B0,0W0", "rank 0: 0B0 is the whole backward, but 0W0 is listed, too; write 0I0")])
def test_a_text_that_is_no_schedule(text, words):
    with pytest.raises(IllegalSchedule) as error:
        Schedule.from_text(text)
    assert words in str(error.value)


@pytest.mark.parametrize("value", [1.5, "0", None])
def test_a_micro_batch_is_a_whole_number(value):
    with pytest.raises(TypeError, match="must be a whole number"):
        F(value)

"""The ring step by step: what is said of a step is what happened in it, for wrong rings, too."""

import pytest
from drawn import on_the_sheet

from labs.pictures import ring
from labs.pictures.collectives import State
from labs.pictures.ring import Received


def all_reduce(ranks):
    """The states of a ring all-reduce, as its definition has them."""
    held = [[(piece + 1) * 10 ** (ranks - 1 - rank) for piece in range(ranks)]
            for rank in range(ranks)]
    states = [State("before", held)]
    for step in range(2 * (ranks - 1)):
        adds, new = step < ranks - 1, [list(row) for row in held]
        for rank in range(ranks):
            piece = (rank - step) % ranks
            own = new[(rank + 1) % ranks][piece] if adds else 0
            new[(rank + 1) % ranks][piece] = held[rank][piece] + own
        held = new
        states.append(State(f"step {step + 1}: {'add' if adds else 'copy'}", held))
    return states


def words(picture):
    return [text.get_text() for text in picture.figure.axes[0].texts]


def test_a_step_says_who_sends_what_to_whom():
    states = all_reduce(3)
    assert [ring.sentence(states, number) for number in (1, 2, 3)] == [
        "Rank 0 sends piece 0 to rank 1, rank 1 piece 1 to rank 2, rank 2 piece 2 to rank 0.",
        "Rank 0 sends piece 2 to rank 1, rank 1 piece 0 to rank 2, rank 2 piece 1 to rank 0.",
        "Rank 0 sends piece 1 to rank 1, rank 1 piece 2 to rank 2, rank 2 piece 0 to rank 0."]
    assert states[-1].held == [[111, 222, 333]] * 3
    picture = ring.ring_step(states, 2)
    assert ring.sentence(states, 2) in words(picture) and ring.sentence(states, 2) in picture.text
    assert "step 2 of 4: reduce-scatter, the receiver adds the piece to its own" in picture.text
    assert "step 3 of 4: all-gather, the receiver copies the piece" in ring.ring_step(
        states, 3).text


@pytest.mark.parametrize(("new", "changes", "said"), [
    ([[11, 2], [1, 2]], [Received(0, 0, "add")], "Rank 1 sends piece 0 to rank 0."),
    ([[1, 20], [1, 20]], [Received(0, 0, "copy"), Received(1, 1, "copy")],
     "Rank 0 sends piece 1 to rank 1, rank 1 piece 0 to rank 0."),
    ([[10, 20], [1, 7]], [Received(1, 1, "")],
     "Piece 1 of rank 1 became 7, neither a sum nor a copy."),
    ([[10, 20], [1, 2]], [], "No number changed.")])
def test_a_wrong_ring_is_told_as_it_is(new, changes, said):
    old = [[10, 20], [1, 2]]
    states = [State("before", old), State("step 1: add", new)]
    if said.startswith("Rank 1 sends piece 0 to rank 0."):
        states[1] = State("step 1: add", [[11, 20], [1, 2]])
    assert ring.received(old, states[1].held) == changes
    assert ring.sentence(states, 1) == said
    on_the_sheet(ring.ring_step(states, 1))


def test_digits_stand_on_the_colour_of_the_rank_that_they_come_from():
    states = all_reduce(4)
    shown = words(ring.ring_step(states, 2))
    # Piece 2 of rank 0 is 3033: three digits of ranks that are in the sum, and a zero.
    at = shown.index("rank 0") + 1
    assert shown[at + 8:at + 12] == ["3", "0", "3", "3"]


def test_a_piece_on_its_way_is_drawn_in_addition_to_what_ranks_held_before():
    states = all_reduce(3)
    still, moving = ring.ring_step(states, 1, moved=1.0), ring.ring_step(states, 1, moved=0.5)
    assert still.figure.get_size_inches().tolist() == moving.figure.get_size_inches().tolist()
    # The digits of 100, 20 and 3 on their ways, the last one seen in part below and in part above;
    # but not yet 110 in place of 010, and 022 in place of 002. Each number has all three digits.
    assert len(words(moving)) - len(words(still)) == 4 * 3
    at = words(moving).index("rank 1") + 1
    assert words(moving)[at:at + 3] == ["0", "1", "0"]


@pytest.mark.parametrize(("states", "titles"), [
    (all_reduce(3), ["before", "step 2: add", "step 4: copy"]),
    (all_reduce(3)[:3], ["before", "step 1: add", "step 2: add"]),
    (all_reduce(2), ["before", "step 1: add", "step 2: copy"]),
    (all_reduce(2)[:1], ["before"])], ids=["both halves", "one half", "two ranks", "nothing sent"])
def test_who_cannot_move_a_slider_sees_the_beginning_the_middle_and_the_end(states, titles):
    picture = ring.ring_still(states)
    assert [text for text in words(picture) if text == "before" or "step " in text[:5]] == titles
    for number in range(1, len(states)):
        assert ring.sentence(states, number) in picture.text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_step_stays_on_the_sheet(ranks):
    states = all_reduce(ranks)
    pictures = [ring.ring_step(states, number) for number in (0, 1)]
    on_the_sheet(pictures[1])
    first, second = (tuple(picture.figure.get_size_inches()) for picture in pictures)
    assert first == second  # nothing jumps when the slider moves
    if ranks < 8:
        on_the_sheet(ring.ring_still(states))

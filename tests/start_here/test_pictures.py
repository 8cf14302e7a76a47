"""Notebook 00: its answers pass its checks, its pictures show what really happened, and what its
text claims is so."""

import ast
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import labs
import labs.start_here as lab
from labs.checks import verdicts
from labs.start_here import scaffold
from labs.workers import launcher

SOURCE = Path(__file__).parents[2] / "solutions" / "00_start_here.py"
pytestmark = pytest.mark.usefixtures("warm_launcher")


def functions_of(path):
    """The functions that a notebook's cells define, by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.Import | ast.ImportFrom
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    names = {"__name__": "a_notebook"}
    exec(compile(tree, str(path), "exec"), names)
    return names


@pytest.fixture(scope="module")
def notebook():
    return functions_of(SOURCE)


@pytest.mark.parametrize("check, answer", [
    ("check_mean_over_ranks", "mean_over_ranks"), ("check_all_reduce", "all_reduce_in_two"),
    ("check_ring", "ring_all_gather ring_bytes"), ("check_mean_losses", "mean_losses_together")])
def test_the_solutions_pass(notebook, check, answer):
    verdict = getattr(lab, check)(*(notebook[name] for name in answer.split()))
    assert verdict.passed, verdict


def test_the_ring_in_the_notebook_is_the_one_that_is_counted(notebook):
    def body(tree):
        statements = [s for s in tree.body if not isinstance(s, ast.Expr) or
                      not isinstance(s.value, ast.Constant)]
        return [ast.unparse(s).replace("lab.send_recv", "send_recv") for s in statements]

    def ring_in(path):
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        return next(node for node in tree.body
                    if getattr(node, "name", "") == "ring_reduce_scatter")

    assert body(ring_in(SOURCE)) == body(ring_in(scaffold.__file__))


# pictures


@pytest.mark.parametrize("name, begin, after", [
    ("broadcast", "whole", lambda rank: [100, 200, 300]),
    ("all_reduce", "whole", lambda rank: [111, 222, 333]),
    ("all_gather", "shard", lambda rank: [100, 20, 3]),
    ("reduce_scatter", "whole", lambda rank: [111 * (rank + 1)]),
    ("all_to_all", "whole", lambda rank: [k * (rank + 1) for k in (100, 10, 1)])])
def test_who_holds_what_after_a_collective(notebook, name, begin, after):
    before, end = lab.who_holds_what(notebook[name], ranks=3, begin=begin).data
    whole = [[100, 200, 300], [10, 20, 30], [1, 2, 3]]
    assert before.held == ([[whole[r][r]] for r in range(3)] if begin == "shard" else whole)
    assert end.arrow == name
    assert end.held == [after(rank) for rank in range(3)]


def test_the_two_halves_with_what_lies_between(notebook):
    picture = lab.two_steps(notebook["all_reduce_in_two"], ranks=3)
    assert [state.arrow for state in picture.data] == ["", "reduce_scatter", "all_gather"]
    assert picture.data[1].held == [[111], [222], [333]]
    assert picture.data[2].held == [[111, 222, 333]] * 3


def test_a_picture_shows_a_wrong_answer_as_it_is():
    def all_but_the_last(mine):
        if dist.get_rank() == dist.get_world_size() - 1:
            mine = mine.clone().zero_()
        dist.all_reduce(mine)
        return mine

    assert lab.two_steps(all_but_the_last, ranks=3).data[-1].held == [[110, 220, 330]] * 3


def test_the_ring_step_by_step(notebook):
    states = lab.ring_steps(notebook["ring_all_reduce"], ranks=3).data
    assert [s.title for s in states] == ["before", "step 1: add", "step 2: add", "step 3: copy",
                                         "step 4: copy"]
    assert states[-1].held == [[111, 222, 333]] * 3
    for old, new in zip(states, states[1:], strict=False):
        changed = [(rank, piece) for rank in range(3) for piece in range(3)
                   if old.held[rank][piece] != new.held[rank][piece]]
        assert [rank for rank, _ in changed] == [0, 1, 2]  # one piece each
    first_half = lab.ring_steps(notebook["ring_reduce_scatter"], ranks=3).data
    assert [(s.title, s.held) for s in first_half] == [(s.title, s.held) for s in states[:3]]
    finished = [[n in (111, 222, 333) for n in row] for row in states[2].held]
    assert finished == [[piece == (rank + 1) % 3 for piece in range(3)]  # shifted by one
                        for rank in range(3)]


def test_the_rings_slider_shows_every_step_and_stands_still_without_a_kernel(notebook):
    steps = lab.ring_steps(notebook["ring_all_reduce"], ranks=2)
    grid, view = steps.box().children
    [slider] = grid.children
    assert slider.get_state(["label", "options", "index"]) == {
        "label": "step", "options": ["before", "1: add", "2: copy"], "index": 1}
    assert "alt='step 1 of 2: reduce-scatter, the receiver adds the piece" in view.value
    slider.set_state({"index": 0})
    assert "alt='before the first step: Each rank holds its own numbers only." in view.value
    slider.set_state({"index": 2})  # what the browser sends
    assert "alt='step 2 of 2: all-gather, the receiver copies the piece: Rank 0" in view.value
    bundle, _ = steps._repr_mimebundle_()
    assert {"image/png", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
    # Three moments in one picture, and every step in words.
    assert bundle["image/png"] == steps.still._repr_mimebundle_()[0]["image/png"]
    assert repr(steps) == bundle["text/plain"]
    assert "step 1 of 2: reduce-scatter, the receiver adds" in repr(steps)


def test_the_picture_of_two_all_reduces_and_its_guess(notebook):
    labs.guess("0.1", "after two all-reduces", 60)
    picture = lab.before_and_after(notebook["reduce_twice"], ranks=4, guess="0.1")
    assert picture.data == ([1, 4, 9, 16], [120] * 4, 60)
    assert lab.before_and_after(notebook["own_and_mean"], ranks=4).data[1:] == ([7.5] * 4, None)


def test_ring_traffic_is_counted_on_real_ranks(notebook):
    labs.guess("0.3", "MB", 24)
    rows = lab.ring_traffic(notebook["ring_all_gather"], notebook["ring_bytes"]).data
    assert [row.measured for row in rows] == [12, 16, 18, 21]
    assert [row.predicted for row in rows] == [12, 16, 18, 21]
    assert [row.guessed for row in rows] == [None, None, 24, None]


@pytest.mark.parametrize("guess, words", [
    (222, "rank 1 holds it"), (22, "no rank holds it"),
    (..., "no guess yet: put a number in place of ... above")])
def test_guess_of_what_a_rank_holds(notebook, guess, words):
    labs.guess("0.2", "a sum", guess)
    picture = lab.who_holds_what(notebook["reduce_scatter"], ranks=3, guess="0.2")
    assert picture.text.endswith(words)


def test_eight_ranks_in_words_have_whole_numbers(notebook):
    labs.guess("0.2", "a sum", 33333333)
    text = lab.who_holds_what(notebook["reduce_scatter"], ranks=8, guess="0.2").text
    assert "rank 2: 100000 200000 300000" in text and " → 33333333\n" in text
    assert text.endswith("your guess: 33333333; rank 2 holds it")


def test_infinity_is_drawn_and_so_is_a_function_without_a_collective():
    picture = lab.who_holds_what(lambda mine: mine / 0, ranks=2)
    assert [state.arrow for state in picture.data] == ["", "no collective"]
    assert picture.text.splitlines()[:2] == ["who holds what: before → no collective",
                                             "rank 0: 10 20 → inf inf"]


def test_why_ranks_run_on_the_cpu_is_said_once(capsys, monkeypatch):
    """By the picture of the machine, and not by the next launch again."""
    monkeypatch.setattr(launcher, "_announced", set())
    said = labs.machine().data.plan.reason
    capsys.readouterr()
    labs.launch(dist.get_rank, ranks=2)
    assert said not in capsys.readouterr().out


def test_a_plain_script_prints_what_pictures_show(notebook, capsys):
    lab.who_holds_what(notebook["broadcast"], ranks=2)
    lab.ring_steps(notebook["ring_all_reduce"], ranks=2)
    lab.diagnose(notebook["share_the_work"], ranks=2)
    lab.diagnose(lambda: dist.get_rank(), ranks=2)
    labs.machine()
    printed = capsys.readouterr().out
    for words in ("who holds what: before → broadcast\nrank 0: 10 20 → 10 20\nrank 1: 1 2 → 10 20",
                  "ring: before → step 1: add → step 2: copy\nrank 0: 10 20 → ",
                  "launch raised RankFailed: rank 0 raised ZeroDivisionError",
                  "rank 1 returned 1", "A launch starts "):
        assert printed.count(words) == 1, words


@pytest.mark.parametrize("answer", ["own_and_mean", "all_reduce_in_two"])
def test_a_picture_waits_for_nothing_that_the_answer_does_not_wait_for(notebook, answer):
    def hasty(*mine):
        dist.all_reduce(torch.ones(1), async_op=True)
        return notebook[answer](*mine)

    show = {"own_and_mean": lab.before_and_after,
            "all_reduce_in_two": lab.two_steps}[answer]
    verdict = show(hasty, ranks=2)
    assert "of 2: all_reduce was issued and never waited for" in verdict.sentence


@pytest.mark.parametrize("show", ["before_and_after", "two_steps"])
def test_pictures_of_unfilled_exercises_wait(show):
    def gap(*mine):
        raise NotImplementedError({"two_steps": "Exercise 0.2"}.get(show, "Exercise 0.1"))

    verdict = getattr(lab, show)(gap, ranks=2)
    assert isinstance(verdict, verdicts.Verdict) and verdict.passed is None


def test_picture_of_the_unfilled_formula_waits():
    def gap(size, ranks):
        raise NotImplementedError("Exercise 0.3")

    def unfilled_ring(mine):
        raise NotImplementedError("Exercise 0.3")

    assert lab.ring_traffic(lambda mine: mine, gap).passed is None
    assert lab.ring_traffic(unfilled_ring, lambda size, ranks: size).passed is None
    assert lab.ring_steps(unfilled_ring, ranks=4).passed is None


# failures


def test_diagnosis_of_the_uneven_training(notebook):
    labs.guess("0.4", "the missing rank", 0)
    picture = lab.diagnose(notebook["train_unevenly"], ranks=3, guess="0.4")
    first, *others = picture.data
    assert (first.done, first.label) == (2, "returned")
    assert {(lane.done, lane.label, lane.place.source) for lane in others} == {
        (2, "waits in all_reduce (#3)", "dist.all_reduce(total)")}
    assert "RanksStuck: deadlock" in picture.text
    assert picture.text.endswith("You guessed rank 0, and rank 0 it is.")


def test_diagnosis_of_the_first_deadlock(notebook):
    picture = lab.diagnose(notebook["rank_1_is_missing"], ranks=3)
    assert [lane.label for lane in picture.data] == [
        "waits in all_reduce (#1)", "returned", "waits in all_reduce (#1)"]
    assert "RanksStuck: deadlock" in picture.text


def test_diagnosis_of_one_failing_rank(notebook):
    picture = lab.diagnose(notebook["share_the_work"], ranks=3)
    assert picture.text.startswith("launch raised RankFailed: rank 0 raised ZeroDivisionError")
    assert picture.data[0].label == "raised ZeroDivisionError"
    # "the others did nothing wrong, they wait", in every run
    assert [lane.label for lane in picture.data[1:]] == ["waits in all_reduce (#1)"] * 2
    assert picture.data[0].place.source == "batches = 12 // dist.get_rank()"


def test_diagnosis_of_different_collectives(notebook):
    picture = lab.diagnose(notebook["different_places"], ranks=3)
    assert "not in the same collective" in picture.text
    assert picture.data[1].label.startswith("calls broadcast")
    assert picture.data[1].place.source == "dist.broadcast(total, src=1)"


def test_diagnosis_when_nothing_is_wrong():
    picture = lab.diagnose(lambda: dist.get_rank(), ranks=2)
    assert picture.text == "rank 0 returned 0\nrank 1 returned 1"


# claims of the text


@pytest.mark.parametrize("answer", ["4 · 30", "Then rank 0 had no batch left"])
def test_what_a_guess_asks_for_is_folded(answer):
    """It stands right below the cell, so it would be read before the guess is made."""
    text = SOURCE.read_text(encoding="utf-8")
    folded = "".join(re.findall(r"<details>.*?</details>", text, re.DOTALL))
    assert text.count(answer) == folded.count(answer) == 1


def test_gloo_gives_up_after_30_minutes():
    from torch.distributed.distributed_c10d import default_pg_timeout

    assert default_pg_timeout == timedelta(minutes=30)


def test_outside_of_launch_there_is_no_process_group():
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.ones(1))


def test_a_checked_function_can_be_launched_to_see_its_prints(notebook):
    def chatty(mine):
        print("I hold", mine.tolist())
        return notebook["mean_over_ranks"](mine)

    means = labs.launch(chatty, torch.ones(2), ranks=2)  # as the text says
    assert [mean.tolist() for mean in means] == [[1, 1], [1, 1]]


def test_collectives_return_nothing_and_take_the_output_first():
    def tried(mine):
        shard, whole = mine.new_empty(1), torch.empty_like(mine)
        returned = [dist.all_reduce(mine.clone()), dist.broadcast(mine, src=0),
                    dist.reduce_scatter_single(shard, mine),
                    dist.all_gather_single(whole, shard),
                    dist.all_to_all_single(whole, mine)]
        return returned == [None] * 5

    assert labs.launch(tried, torch.ones(2), ranks=2, quiet=True) == [True, True]


def test_everything_in_the_lab_can_be_found():
    assert all(callable(getattr(lab, name)) for name in lab.__all__)
    with pytest.raises(AttributeError, match="it offers .*check_mean_over_ranks"):
        lab.check_mean  # noqa: B018


def test_numbers_of_the_pictures_hold_the_digits_of_nine_ranks():
    from labs.start_here.recorded_collectives import pieces_of

    total = sum(pieces_of(rank, 9) for rank in range(9))
    assert total.tolist() == [int(f"{piece}" * 9) for piece in range(1, 10)]
    assert total.dtype == torch.int64

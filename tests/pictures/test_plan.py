"""labs.plan: a job with controls, one rank's memory and the seconds of a step."""

import pytest

import labs
from labs.pictures import plan as widget
from labs.predictions.plans.answer import Answer


def test_the_widget_starts_with_a_job_that_fits():
    controls = labs.plan()
    answer = controls.data
    assert isinstance(answer, Answer) and answer.is_feasible
    assert [choice.name for choice in controls.choices] and set(
        choice.name for choice in controls.choices) == set(widget.DEFAULTS)
    assert repr(controls).startswith("Fits: ")


@pytest.mark.parametrize("changes, says", [
    ({"model": "GPT-2", "gpus": 8, "recompute": "none"}, "launch-bound, the GPUs wait"),
    ({"model": "Llama-3-70B", "gpus": 8, "sharding": "DDP"}, "Does not fit: "),
    ({"tensor": 8, "pipeline": 16}, "No such plan: data 1"),
    ({"sharding": "HSDP", "tensor": 8, "code": "nanotron"}, "Fits: "),
    ({"pipeline": 4, "sharding": "ZeRO-1", "code": "Megatron-Core"}, "Fits: "),
    ({"gpu": "T4", "gpus": 1}, "Does not fit: ")])
def test_every_choice_has_a_picture_that_says_what_it_shows(changes, says):
    picture = widget.draw_plan(**widget.DEFAULTS | changes)
    assert picture.text.startswith(says) or says in picture.text.split("\n")[0]
    assert picture.png()


@pytest.mark.parametrize("first, error, says", [
    ({"speed": 3}, TypeError, "plan has no 'speed'; it has model, gpus"),
    ({"gpu": "H900"}, ValueError, "gpu='H900': choose 'T4'"),
    ({"tensor": 3}, ValueError, "tensor=3: choose 1, 2, 4, 8")])
def test_a_wrong_start_gets_one_sentence(first, error, says):
    with pytest.raises(error, match=says):
        labs.plan(**first)


def test_it_says_what_the_command_says(capsys):
    """One job has one answer: the widget's and scripts/plan's."""
    import json
    import sys
    from unittest import mock

    from _plan import __main__ as command

    ours = labs.plan(gpus=8).data
    arguments = ["plan", "Llama-3-8B", "--gpus", "8xH100", "--tp", "1", "--micro-batch", "1",
                 "--sharding", "FSDP", "--recompute", "full", "--json"]
    with mock.patch.object(sys, "argv", arguments):
        command.main()
    [theirs] = json.loads(capsys.readouterr().out.split("\n")[-2])["answers"]
    assert theirs["seconds"]["total"] == pytest.approx(ours.seconds.total)
    assert theirs["memory"]["largest"] == pytest.approx(ours.largest[1])

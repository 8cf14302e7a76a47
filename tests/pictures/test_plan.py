"""labs.plan: a job with controls, one rank's memory and the seconds of a step."""

import json
import sys
from dataclasses import replace
from unittest import mock

import pytest
from _plan import __main__ as command

import labs
from labs.pictures import plan as widget
from labs.predictions.hardware import gpu
from labs.predictions.plans.answer import Answer
from labs.predictions.plans.job import Plan
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.memory import fits, largest_rank
from labs.predictions.plans.search import plans, step_seconds

BIG = JOBS["Llama-3-405B"]
PUBLISHED = Plan(data=128, tensor=8, pipeline=16, sharding="FSDP", recompute="none", chunks=8)


def test_the_widget_starts_with_a_job_that_fits():
    controls = labs.plan()
    answer = controls.data
    assert isinstance(answer, Answer) and answer.is_feasible
    assert [choice.name for choice in controls.choices] and set(
        choice.name for choice in controls.choices) == set(widget.DEFAULTS)
    assert repr(controls).startswith("Fits: ")


@pytest.mark.parametrize("changes, says", [
    ({"model": "GPT-2", "gpus": 8, "recompute": "none", "sequence": 1024},
     "launch-bound, the GPUs wait"),
    ({"model": "GPT-2"}, "No such plan: sequences of 4,096 tokens: GPT-2 has learned positions"),
    ({"model": "Llama-3-70B", "gpus": 8, "sharding": "DDP"}, "Does not fit: "),
    ({"tensor": 8, "pipeline": 16}, "No such plan: data 1"),
    ({"sharding": "HSDP", "tensor": 8, "code": "nanotron"}, "Fits: "),
    ({"pipeline": 4, "sharding": "ZeRO-1", "code": "Megatron-Core"}, "Fits: "),
    ({"gpu": "T4", "gpus": 1}, "Does not fit: "),
    ({"expert": 2}, "No such plan: expert parallelism 2: Llama-3-8B has no experts"),
    ({"model": "Mixtral-8x7B", "expert": 8}, "Fits: "),
    ({"model": "Qwen3-30B-A3B", "expert": 8, "code": "Megatron-Core"}, "Fits: "),
    ({"model": "DeepSeek-V3", "gpus": 1024, "expert": 64, "code": "PyTorch, compiled"},
     "Fits: ")])
def test_every_choice_has_a_picture_that_says_what_it_shows(changes, says):
    picture = widget.draw_plan(**widget.DEFAULTS | changes)
    assert picture.text.startswith(says) or says in picture.text.split("\n")[0]
    assert picture.png()


@pytest.mark.parametrize("first, error, says", [
    ({"speed": 3}, TypeError, "plan has no 'speed'; it has model, gpus"),
    ({"gpu": "H900"}, ValueError, "gpu='H900': choose 'T4'"),
    ({"tensor": 0}, ValueError, "tensor=0: choose 1, 2, 4, 8"),
    ({"only": "seconds"}, ValueError, "only='seconds': choose \"memory\""),
    ({"plan": Plan()}, TypeError, "a job and a plan together"),
    ({"job": BIG, "plan": PUBLISHED, "only": "memory"}, TypeError, "a job and a plan together"),
    ({"job": BIG, "plan": PUBLISHED, "model": "GPT-2"}, TypeError,
     "plan has no 'model'; it has sharding, tensor"),
    ({"job": BIG, "plan": Plan()}, ValueError, "is 1 GPUs, the job has 16,384")])
def test_a_wrong_start_gets_one_sentence(first, error, says):
    with pytest.raises(error, match=says):
        labs.plan(**first)


def test_it_says_what_the_command_says(capsys):
    """One job has one answer: the widget's and scripts/plan's."""
    ours = labs.plan(gpus=8).data
    arguments = ["plan", "Llama-3-8B", "--gpus", "8xH100", "--tp", "1", "--micro-batch", "1",
                 "--sharding", "FSDP", "--recompute", "full", "--exact", "--json"]
    with mock.patch.object(sys, "argv", arguments):
        command.main()
    [theirs] = json.loads(capsys.readouterr().out.split("\n")[-2])["answers"]
    assert theirs["seconds"]["total"] == pytest.approx(ours.seconds.total)
    assert theirs["memory"]["largest"] == ours.largest[1] and theirs["memory"]["counted"]


def test_both_pictures_have_one_answer():
    """One micro-batch on each GPU, by the picture of memory alone and by all controls."""
    chosen = dict(model="Llama-3-8B", gpus=64, sharding="FSDP", micro_batch=16, recompute="full")
    memory = labs.plan(only="memory", recipe="bf16 policy", sequence=4096, **chosen).data
    assert labs.plan(**chosen).data.held == memory.held
    assert labs.plan(**chosen).data.seconds == replace(
        memory, job=replace(memory.job, gpu=gpu("H100"))).seconds


def test_a_plan_of_a_job_is_drawn_beside_the_one_to_start_from():
    alone = labs.plan(job=BIG, plan=PUBLISHED)
    assert [choice.name for choice in alone.choices if choice.name in ("chunks", "schedule")]
    beside = labs.plan(job=BIG, plan=PUBLISHED, chunks=1)
    assert "start: memory" not in alone.still.text
    assert "start: memory 76.6 GB" in beside.still.text and "chosen: memory" in beside.still.text
    assert alone.data.plan == PUBLISHED and beside.data.plan == replace(PUBLISHED, chunks=1)
    assert beside.still.text.startswith("Does not fit: ") and beside.still.png()
    changed = alone.picture(**alone.first | {"tensor": 4, "chunks": 1})
    assert changed.data.plan.data == 256  # what is left over of the GPUs
    assert alone.picture(**alone.first | {"tensor": 4}).text.startswith("No such plan: ")


def test_without_a_pipeline_there_are_no_chunks():
    job = JOBS["GPT-1.3B"]
    names = [choice.name for choice in labs.plan(job=job, plan=Plan(data=8)).choices]
    assert "pipeline" in names and not {"chunks", "schedule"} & set(names)


@pytest.mark.parametrize("name", JOBS)
def test_it_says_what_07b_says(name):
    """lab.fits and lab.step_seconds, for plans of every kind of the notebook's jobs."""
    job = JOBS[name]
    for each in plans(job)[::97]:
        answer = Answer(job, each)
        assert answer.is_feasible == fits(job, each)
        assert answer.seconds.total == step_seconds(job, each)
        assert answer.largest[1] == sum(largest_rank(job, each)[1].values())
        assert answer.held.total == pytest.approx(answer.largest[1])

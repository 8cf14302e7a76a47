"""labs.plan(only="memory") says what the predictions say, for every control."""

import sys
from dataclasses import replace

import pytest

import labs
from labs.pictures import plan_memory as widget
from labs.pictures.marks import format_number
from labs.pictures.plan_memory import GPUS, data_parallel_answer
from labs.predictions import hardware
from labs.predictions.memory.predict import predict
from labs.predictions.plans.answer import Answer
from labs.training import hf_configs
from labs.training.memory_categories import GB

FIRST = dict(model="Llama-3-8B", gpus=8, sharding="FSDP", recipe="bf16, fp32 master",
             micro_batch=1, sequence=4096, recompute="full")
OTHER = dict(model="Qwen2-7B", gpus=16, sharding="DDP", recipe="fp32", micro_batch=2, sequence=8192,
             recompute="none")


@pytest.fixture(scope="module")
def controls():
    return labs.plan(only="memory", **FIRST)


def with_(**changes) -> Answer:
    return data_parallel_answer(**FIRST | changes)


def test_it_starts_where_it_started(controls):
    assert widget.DEFAULTS == FIRST and controls.first == FIRST
    assert controls.data == with_() and controls.data.counted


@pytest.mark.parametrize("name", OTHER)
def test_every_control_changes_what_is_drawn(controls, name):
    grid, view = controls.box().children
    handle = {choice.name: handle for choice, handle in
              zip(controls.choices, grid.children, strict=True)}[name]
    before = view.value
    handle.value = OTHER[name]
    assert view.value != before and with_(**{name: OTHER[name]}).held != with_().held
    assert view.value == widget.memory_live(**FIRST | {name: OTHER[name]})


@pytest.mark.parametrize("sharding, asked", [
    ("DDP", dict(strategy="ddp")), ("ZeRO-1", dict(strategy="zero1")),
    ("ZeRO-2", dict(strategy="zero2")), ("FSDP", dict(strategy="fsdp2")),
    ("FSDP, no resharding", dict(strategy="fsdp2", reshard=False))])
def test_numbers_are_the_predictions(sharding, asked):
    want = predict(hf_configs.config("Llama-2-13B"), batch=2, sequence=2048, ranks=4, device="cuda",
                   recipe="bf16", checkpointing="selective", **asked)["peak"]
    chosen = dict(model="Llama-2-13B", micro_batch=2, sequence=2048, gpus=4, recipe="bf16",
                  recompute="selective", sharding=sharding)
    answer, html = data_parallel_answer(**chosen), widget.memory_live(**chosen)
    assert answer.held == want and widget.draw_memory(**chosen).data == answer
    for name, nbytes in want.by_name().items():
        # Four bytes of a counter are shown as 0 GB.
        assert f"<title>{name}: {format_number(round(nbytes / GB, 4))} GB</title>" in html
    low, high = (format_number(round((want.total * factor + answer.overhead) / GB, 4))
                 for factor in (answer.memory_factors.low, answer.memory_factors.high))
    assert f"<title>between {low} and {high} GB</title>" in html


def test_each_strategy_of_the_menu_is_one_of_a_plan(controls):
    [menu] = [choice for choice in controls.choices if choice.name == "sharding"]
    assert [value for _, value in menu.options] == ["DDP", "ZeRO-1", "ZeRO-2", "FSDP",
                                                    "FSDP, no resharding"]
    assert all(with_(sharding=value).counted for _, value in menu.options)


def test_resharding_is_worth_something():
    kept = with_(sharding="FSDP, no resharding").held.buffers
    assert kept > 5 * with_().held.buffers


@pytest.mark.parametrize("changes, sentence", [
    (dict(model="GPT-2", sequence=512), "Fits on the T4 with "),
    (dict(), "Fits on the A100-40 with "),
    (dict(model="Llama-3-70B", gpus=2), "Fits on none of these GPUs: even the H200 lacks ")])
def test_the_verdict_is_what_fits_says(changes, sentence):
    answer = with_(**changes)
    assert widget.verdict(answer).startswith(sentence)
    assert sentence in widget.memory_live(**FIRST | changes)
    for name in GPUS:
        fits = hardware.fits(answer.held.total, name, answer.job.gpus)
        assert fits == (widget.spare(answer, name) >= 0)
        on_this = replace(answer, job=replace(answer.job, gpu=hardware.gpu(name)))
        assert on_this.is_feasible == fits


def test_the_overhead_has_names():
    assert "CUDA context 0.50, loaded kernels 0.33, cuBLAS 0.07, NCCL 1.56." in (
        widget.overhead_named(with_()))
    assert "NCCL" not in widget.overhead_named(with_(gpus=1, sharding="DDP"))
    assert "at most 0.9 % more than predicted" in widget.overhead_named(with_())


@pytest.mark.parametrize("changes, sentence", [
    (dict(recipe="bf16 policy", sharding="DDP"), "FSDP does that"),
    (dict(model="GPT-2", sequence=2048), "GPT-2 has learned positions for only 1,024")])
def test_an_impossible_job_is_one_sentence(changes, sentence):
    html = widget.memory_live(**FIRST | changes)
    picture = widget.draw_memory(**FIRST | changes)
    assert "No such job: " in html and sentence in html.replace("&#x27;", "'")
    assert picture.text.splitlines()[-1].startswith("No such job: ") and sentence in picture.text
    assert picture.data is None and picture.png()


@pytest.mark.parametrize("wrong, error, sentence", [
    (dict(ranks=8), TypeError, r'plan\(only="memory"\) has no \'ranks\'; it has model, gpus'),
    (dict(tensor=8), TypeError, "has no 'tensor'"),
    (dict(model="GPT-5"), ValueError, "model='GPT-5': choose 'GPT-2', 'Qwen2-0.5B'"),
    (dict(gpus=0), ValueError, "gpus=0: choose 1, 2, 4")])
def test_a_wrong_beginning_is_refused(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        labs.plan(only="memory", **wrong)


def test_a_number_between_the_stops_becomes_a_stop():
    [gpus] = [choice for choice in labs.plan(only="memory", gpus=12).choices
              if choice.name == "gpus"]
    assert gpus.value == 12 and [value for _, value in gpus.options][3:6] == [8, 12, 16]


def test_without_a_live_kernel_it_is_a_picture(controls, monkeypatch):
    data, _ = controls._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["image/png"] and data["text/plain"] == controls.still.text
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    data, _ = controls._repr_mimebundle_()
    assert set(data) == {"image/png", "text/html", "text/plain"}
    assert "Fits on the A100-40 with" in data["text/plain"]

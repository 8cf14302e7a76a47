"""The explorer of notebook 01 says what the predictions say, for every control; and its chart of
70B on up to 1024 ranks."""

import sys

import pytest

from labs.memory_math import explorer
from labs.memory_math.explorer import GPUS, Setting, explore_memory
from labs.pictures.marks import format_number
from labs.predictions import hardware
from labs.predictions.memory.predict import predict
from labs.training import hf_configs
from labs.training.memory_categories import GB, Memory

FIRST = dict(model="Llama-3-8B", ranks=8, strategy="ZeRO-3 = FSDP", recipe="bf16, fp32 master",
             batch=1, sequence=4096, checkpointing="full")
OTHER = dict(model="Qwen2-7B", ranks=16, strategy="DDP", recipe="fp32", batch=2, sequence=8192,
             checkpointing="none")


@pytest.fixture(scope="module")
def controls():
    return explore_memory(**FIRST)


def with_(**changes) -> Setting:
    return Setting(**FIRST | changes)


@pytest.mark.parametrize("name", OTHER)
def test_every_control_changes_what_is_drawn(controls, name):
    grid, view = controls.box().children
    handle = {choice.name: handle for choice, handle in
              zip(controls.choices, grid.children, strict=True)}[name]
    before = view.value
    handle.value = OTHER[name]
    assert view.value != before and with_(**{name: OTHER[name]}).held != with_().held
    assert view.value == explorer.setting_html(**FIRST | {name: OTHER[name]})


@pytest.mark.parametrize("strategy, asked", [
    ("DDP", dict(strategy="ddp")), ("ZeRO-1", dict(strategy="zero1")),
    ("ZeRO-2", dict(strategy="zero2")), ("ZeRO-3 = FSDP", dict(strategy="fsdp2")),
    ("FSDP, no resharding", dict(strategy="fsdp2", reshard=False))])
def test_numbers_are_the_predictions(strategy, asked):
    want = predict(hf_configs.config("Llama-2-13B"), batch=2, sequence=2048, ranks=4, device="cuda",
                   recipe="bf16", checkpointing="selective", **asked)["peak"]
    setting = with_(model="Llama-2-13B", batch=2, sequence=2048, ranks=4, recipe="bf16",
                    checkpointing="selective", strategy=strategy)
    picture = explorer.draw_setting(**vars_of(setting))
    html = explorer.setting_html(**vars_of(setting))
    assert setting.held == want and picture.data[0].predicted == want
    for name, nbytes in want.by_name().items():
        # Four bytes of a counter are shown as 0 GB.
        assert f"<title>{name}: {format_number(round(nbytes / GB, 4))} GB</title>" in html


def vars_of(setting) -> dict:
    return {name: getattr(setting, name) for name in FIRST}


def test_resharding_is_worth_something():
    kept = with_(strategy="FSDP, no resharding").held.buffers
    assert kept > 5 * with_().held.buffers


@pytest.mark.parametrize("changes, sentence", [
    (dict(model="GPT-2", sequence=512), "Fits on the T4 with "),
    (dict(), "Fits on the A100-40 with "),
    (dict(model="Llama-3-70B", ranks=2), "Fits on none of these GPUs: even the H200 lacks ")])
def test_the_verdict_is_what_fits_says(changes, sentence):
    setting = with_(**changes)
    assert explorer.verdict(setting).startswith(sentence)
    assert sentence in explorer.setting_html(**FIRST | changes)
    for name in GPUS:
        assert setting.fits(name) == hardware.fits(setting.held.total, name, setting.ranks)
        assert setting.fits(name) == (setting.spare(name) >= 0)


def test_the_overhead_has_names():
    assert "CUDA context 0.50, loaded kernels 0.33, cuBLAS 0.07, NCCL 1.56." in (
        explorer.overhead_named(with_()))
    assert "NCCL" not in explorer.overhead_named(with_(ranks=1, strategy="DDP"))


@pytest.mark.parametrize("changes, sentence", [
    (dict(recipe="bf16 policy", strategy="DDP"), "FSDP does that"),
    (dict(model="GPT-2", sequence=2048), "learned positions for only 1024 tokens")])
def test_an_impossible_job_is_one_sentence(changes, sentence):
    html = explorer.setting_html(**FIRST | changes)
    picture = explorer.draw_setting(**FIRST | changes)
    assert "No such job: " in html and sentence in html.replace("&#x27;", "'")
    assert picture.text.splitlines()[-1].startswith("No such job: ") and sentence in picture.text
    assert picture.data[0].bar == Memory()


@pytest.mark.parametrize("wrong, error, sentence", [
    (dict(gpus=8), TypeError, "explore_memory has no 'gpus'; it has model, ranks"),
    (dict(model="GPT-5"), ValueError, "model='GPT-5': choose 'GPT-2', 'Phi-3-mini'")])
def test_a_wrong_beginning_is_refused(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        explore_memory(**wrong)


def test_a_number_between_the_stops_becomes_a_stop():
    [ranks] = [choice for choice in explore_memory(ranks=12).choices if choice.name == "ranks"]
    assert ranks.value == 12 and [value for _, value in ranks.options][3:6] == [8, 12, 16]


def test_without_a_live_kernel_it_is_a_picture(controls, monkeypatch):
    data, _ = controls._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["image/png"] and data["text/plain"] == controls.still.text
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    data, _ = controls._repr_mimebundle_()
    assert set(data) == {"image/png", "text/html", "text/plain"}
    assert "Fits on the A100-40 with" in data["text/plain"]


@pytest.mark.slow
def test_scaling_shows_dry_runs_beside_the_closed_form(monkeypatch):
    small = hf_configs.make("llama", hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                       num_key_value_heads=2, intermediate_size=128, vocab_size=256)
    monkeypatch.setattr(explorer.hf_configs, "config", lambda name: small)
    picture = explorer.show_scaling("small", traced=(4,), ranks=(2, 4), batch=2, sequence=64)
    two, four = picture.data
    assert (two.name, two.measured, four.name) == ("2", None, "4")
    assert two.predicted.parameters == pytest.approx(2 * four.measured.parameters, rel=0.02)
    assert four.measured.total == pytest.approx(four.predicted.total, rel=0.05)
    assert "Dry run on 4 ranks: 3 of 3 layers with fake tensors" in picture.text
    much = any(row.predicted.other > 0.05 * row.predicted.total for row in picture.data)
    assert ("Other: AdamW's temporaries" in picture.text) == much


def test_the_grey_part_is_named_where_only_the_closed_form_has_it():
    few, many = Memory(parameters=80, other=20), Memory(parameters=99, other=1)
    assert explorer._other_explained([many, few]).startswith(" Other: AdamW's temporaries")
    assert explorer._other_explained([many, many]) == ""


def test_an_interrupted_dry_run_says_so_in_a_line(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(explorer, "dry_run", interrupted)
    with pytest.raises(KeyboardInterrupt, match="the dry run was given up") as caught:
        explorer.show_scaling(traced=(1024,))
    assert caught.value.__suppress_context__

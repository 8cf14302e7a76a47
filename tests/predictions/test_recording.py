"""A recorded step, scaled to random sizes, against a fresh dry run of those sizes, to the byte."""

import random
from unittest import mock

import pytest
import torch
import transformers
from measured_memory import QUIET, gpt2, llama, phases_of_plain, qwen2

from labs.predictions.dryrun import dry_run
from labs.predictions.memory import model_sizes, recording
from labs.predictions.memory.predict import predict

PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "bf16 policy": "mixed"}
FAMILIES = {
    "MistralConfig": dict(sliding_window=64), "GemmaConfig": dict(), "PhiConfig": dict(),
    "Phi3Config": dict(), "Qwen3Config": dict(), "Olmo2Config": dict(),
    "Gemma3TextConfig": dict(),  # its layers differ: all are recorded
    "OPTConfig": dict(),  # its widths do not scale: recorded at its own
}


def drawn(name, seed):
    """A configuration of random sizes."""
    rng = random.Random(seed)
    kv, group, width = rng.randint(2, 3), rng.randint(2, 3), 8 * rng.randint(1, 4)
    heads = kv * group
    sizes = dict(hidden_size=heads * width, num_hidden_layers=rng.choice([2, 6, 8]),
                 num_attention_heads=heads, num_key_value_heads=kv,
                 vocab_size=rng.randint(99, 999),
                 intermediate_size=rng.randint(33, 333), use_cache=False, pad_token_id=None)
    cls = getattr(transformers, name)
    if getattr(cls(), "head_dim", None):
        sizes |= dict(head_dim=width, hidden_size=heads * rng.randint(9, 20))
    if name == "OPTConfig":
        sizes |= dict(ffn_dim=77, word_embed_proj_dim=sizes["hidden_size"])
    return cls(**QUIET | sizes | FAMILIES.get(name, {}))


def mistral(**more):
    """A small Mistral's configuration whose window is shorter than the sequences."""
    return llama(cls=transformers.MistralConfig, sliding_window=16, **more)


def drawn_job(seed):
    """A job that the dry run runs too, and its recipe's name."""
    rng = random.Random(seed)
    strategy = rng.choice(["plain", "ddp", "fsdp2"])
    recipe = rng.choice(["fp32", "bf16"] if strategy != "fsdp2" else ["fp32", "bf16 policy"])
    job = dict(batch=rng.choice([1, 2, 5]), sequence=rng.randint(20, 130), strategy=strategy,
               ranks=1 if strategy == "plain" else rng.randint(2, 5),
               checkpointing=rng.choice(["none", "full"]))
    return job, recipe


def without_scratch():
    """A dry run that does not try operators: the scratch space of this processor's kernels in bf16
    is no product of sizes, so no recording has it (half a percent of the smallest models)."""
    return mock.patch("labs.predictions.dryrun.trace.Probe", lambda threads: None)


def same_bytes(config, job, recipe):
    """Holds a prediction against a fresh dry run."""
    said = predict(config, recipe=recipe, inputs=True, threads=2, **job)
    with without_scratch():
        run = dry_run(config, precision=PRECISIONS[recipe], threads=2, **job)
    for phase in ("backward", "step", "peak"):  # of "forward" below: the root is resharded there
        assert said[phase].total == pytest.approx(run.at[phase].total, abs=8), phase
    if job["strategy"] != "fsdp2":
        assert said["forward"].total == run.at["forward"].total


@pytest.mark.sample(9)
@pytest.mark.parametrize("seed", range(9))
def test_random_sizes_to_the_byte(seed):
    make = (gpt2, llama, qwen2)[seed % 3]
    rng = random.Random(seed)
    heads = rng.choice([2, 4, 6])
    sizes = dict(hidden=heads * 8 * rng.randint(1, 3), layers=rng.choice([1, 3, 7]), heads=heads,
                 vocabulary=rng.randint(50, 3000))
    if make is gpt2:
        config = gpt2(**sizes, dropout=rng.choice([0, 0.1]), n_inner=rng.choice([None, 100]))
    else:
        config = make(**sizes, kv=rng.choice([1, 2, heads]), ffn=rng.randint(30, 300),
                      attention_dropout=rng.choice([0, 0.1]))
    job, recipe = drawn_job(100 + seed)
    same_bytes(config, job | {"sequence": min(job["sequence"], 128)}, recipe)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_decoder_to_the_byte(name):
    seed = list(FAMILIES).index(name)
    same_bytes(drawn(name, seed), *drawn_job(seed))


@pytest.mark.parametrize("sequence", [63, 64, 65])
def test_a_window_as_long_as_the_sequence(sequence):
    # A mask is made from a sequence of the window's length on.
    job = dict(batch=2, sequence=sequence, strategy="plain")
    same_bytes(drawn("MistralConfig", 1), job, "fp32")


@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_a_cache_of_many_layers_on_a_real_rank(make):
    # Forward fills a cache of keys and values layer by layer, and frees all of it at its end.
    config = make(layers=7, use_cache=True)
    config._attn_implementation = "eager"
    said = predict(config, batch=3, sequence=40, attention="eager")
    real = phases_of_plain(config, 3, 40)
    for phase in ("build", "forward", "backward", "step"):
        assert said[phase].total == pytest.approx(real[phase], abs=256), phase
    assert said["peak"].total == pytest.approx(real["peak"], rel=2e-4)


def test_one_recording_serves_all_sizes():
    recording._RECORDINGS.clear()
    for config, batch in ((llama(), 2), (llama(hidden=96, layers=5, vocabulary=77), 7)):
        predict(config, batch=batch, sequence=9 * batch)
    short = len(recording._RECORDINGS)
    predict(llama(layers=4), batch=3, sequence=30)
    assert (short, len(recording._RECORDINGS)) == (2, 2)  # of 2 layers, and of 4 or more


MOE = dict(QUIET, hidden_size=64, intermediate_size=48, num_hidden_layers=5, vocab_size=99,
           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, pad_token_id=None)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 64), (3, 101)])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_a_mixture_of_experts_to_the_byte(recipe, batch, sequence):
    job = dict(batch=batch, sequence=sequence, strategy="plain", ranks=1)
    same_bytes(transformers.MixtralConfig(**MOE), job, recipe)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="a hidden size of 62 cannot be cut into 4 heads"):
        predict(gpt2(hidden=62), batch=1, sequence=2)


def test_what_is_no_decoder_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="Linear is no configuration of a Hugging Face decoder"):
        predict(torch.nn.Linear(1, 1), batch=1, sequence=2)


def test_a_number_that_is_no_product_of_sizes():
    first, second = model_sizes.points(llama(), 2, 9, 2)
    known = [12 * point.values["batch"] * point.values["vocabulary"] for point in (first, second)]
    found = model_sizes.products(known[:1], known[1:], [first, second])
    sizes = model_sizes.sizes_of(llama(), 2, 9)
    assert found.at(sizes).tolist() == [12 * 2 * 300]
    with pytest.raises(model_sizes.NotScalable):
        model_sizes.products([known[0] + 7], [known[1] + 7], [first, second])


def test_a_run_that_another_thread_disturbed_is_recorded_again(monkeypatch):
    shapes, record = iter(["disturbed"]), recording.Recorder.record

    def disturbed_at_first(recorder):
        shape, numbers = record(recorder)
        return next(shapes, shape), numbers

    monkeypatch.setattr(recording, "_RECORDINGS", {})
    monkeypatch.setattr(recording.Recorder, "record", disturbed_at_first)
    mode = recording.Mode(4, "none", "sdpa", "cpu")
    assert recording.recording_of(gpt2(), 2, 16, mode).layers > 0
    assert None not in recording._RECORDINGS.values()

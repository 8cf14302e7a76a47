"""The chart of Llama-3-70B on up to 1024 ranks."""

import pytest

from labs.memory_math import scaling
from labs.training import hf_configs
from labs.training.memory_categories import Memory


@pytest.mark.slow
def test_scaling_shows_dry_runs_beside_the_closed_form(monkeypatch):
    small = hf_configs.make("llama", hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                       num_key_value_heads=2, intermediate_size=128, vocab_size=256)
    monkeypatch.setattr(scaling.hf_configs, "config", lambda name: small)
    picture = scaling.show_scaling("small", traced=(4,), ranks=(2, 4), batch=2, sequence=64)
    two, four = picture.data
    assert (two.name, two.measured, four.name) == ("2", None, "4")
    assert two.predicted.parameters == pytest.approx(2 * four.measured.parameters, rel=0.02)
    assert four.measured.total == pytest.approx(four.predicted.total, rel=0.05)
    assert "Dry run on 4 ranks: 3 of 3 layers with fake tensors" in picture.text
    much = any(row.predicted.other > 0.05 * row.predicted.total for row in picture.data)
    assert ("Other: AdamW's temporaries" in picture.text) == much


def test_the_grey_part_is_named_where_only_the_closed_form_has_it():
    few, many = Memory(parameters=80, other=20), Memory(parameters=99, other=1)
    assert scaling._other_explained([many, few]).startswith(" Other: AdamW's temporaries")
    assert scaling._other_explained([many, many]) == ""


def test_an_interrupted_dry_run_says_so_in_a_line(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling, "dry_run", interrupted)
    with pytest.raises(KeyboardInterrupt, match="the dry run was given up") as caught:
        scaling.show_scaling(traced=(1024,))
    assert caught.value.__suppress_context__

"""Well-known models have the sizes they are known for."""

import pytest

from labs.predictions.memory import parameters
from labs.training import hf_configs

PUBLISHED = {
    "GPT-2": 124_439_808, "GPT-2 XL": 1_557_611_200, "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320, "Llama-3-8B": 8_030_261_248, "Llama-3-70B": 70_553_706_496,
    "Qwen2-0.5B": 494_032_768, "Qwen2-7B": 7_615_616_512,
    "Mistral-7B": 7_241_732_096, "Gemma-7B": 8_537_680_896, "Phi-3-mini": 3_821_079_552,
    "Qwen3-8B": 8_190_735_360,
    # with experts; DeepSeek-V3's report, section 1: 671B, of which a token uses 37B
    "Mixtral-8x7B": 46_702_792_704, "Qwen3-30B-A3B": 30_532_122_624,
    "DeepSeek-V3": 671_026_404_352}


@pytest.mark.parametrize("name", hf_configs.NAMES)
def test_parameters_are_the_published_number(name):
    config = hf_configs.config(name)
    on_meta = sum(p.numel() for p in hf_configs.on_meta(config).parameters())
    assert on_meta == PUBLISHED[name]
    if config.model_type in ("gpt2", "llama", "qwen2", "mixtral", "qwen3_moe", "deepseek_v3"):
        assert parameters.count(config) == on_meta


def test_an_unknown_name_gets_one_sentence():
    with pytest.raises(ValueError, match="no model 'GPT-5': choose GPT-2, "):
        hf_configs.config("GPT-5")

"""Models that everybody knows, as Hugging Face configurations: their sizes, no weights.

Source: the `config.json` that each is published with; tests hold the number of parameters of every
one against the published number.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from labs.training.known_models import MIXTURES, SIZES, TIED

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedConfig

_LLAMA = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "vocab_size")
_GPT2 = ("n_embd", "n_layer", "n_head")
_CLASSES = {"gpt2": "GPT2Config", "llama": "LlamaConfig", "qwen2": "Qwen2Config",
            "mistral": "MistralConfig", "gemma": "GemmaConfig", "phi3": "Phi3Config",
            "qwen3": "Qwen3Config", "mixtral": "MixtralConfig",
            "qwen3_moe": "Qwen3MoeConfig", "deepseek_v3": "DeepseekV3Config"}
NAMES = tuple(SIZES)


def config(name: str) -> "PreTrainedConfig":
    """The configuration of the model with this name. Raises ValueError."""
    if name not in SIZES:
        raise ValueError(f"no model {name!r}: choose {', '.join(NAMES)}")
    family, *sizes = SIZES[name]
    if family == "gpt2":
        return make(family, **dict(zip(_GPT2, sizes, strict=True)))
    return make(family, tie_word_embeddings=name in TIED,
                **dict(zip(_LLAMA, sizes, strict=True)), **MIXTURES.get(name, {}))


def make(family: str, **sizes) -> "PreTrainedConfig":
    """A configuration of a family, one of "gpt2", "llama", "qwen2", "mistral", "gemma", "phi3",
    "qwen3", "mixtral", "qwen3_moe" and "deepseek_v3", with these sizes, in the names of its Hugging
    Face class."""
    import transformers

    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return getattr(transformers, _CLASSES[family])(**tokens | sizes)


def on_meta(config: "PreTrainedConfig") -> nn.Module:
    """The model itself with parameters that have shapes and no memory: 70B in half a second."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)

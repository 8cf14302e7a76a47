"""Models that everybody knows, as Hugging Face configurations: their sizes, no weights.

Source: the `config.json` that each is published with; tests hold the number of parameters of every
one against the published number.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedConfig

_LLAMA = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "vocab_size")
_GPT2 = ("n_embd", "n_layer", "n_head")
_SIZES = {
    "GPT-2": ("gpt2", 768, 12, 12),
    "GPT-2 XL": ("gpt2", 1600, 48, 25),
    "Llama-2-7B": ("llama", 4096, 32, 32, 32, 11008, 32000),
    "Llama-2-13B": ("llama", 5120, 40, 40, 40, 13824, 32000),
    "Llama-3-8B": ("llama", 4096, 32, 32, 8, 14336, 128256),
    "Llama-3-70B": ("llama", 8192, 80, 64, 8, 28672, 128256),
    "Qwen2-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936),
    "Qwen2-7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Mistral-7B": ("mistral", 4096, 32, 32, 8, 14336, 32000),
    "Gemma-7B": ("gemma", 3072, 28, 16, 16, 24576, 256000),
    "Phi-3-mini": ("phi3", 3072, 32, 32, 32, 8192, 32064),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12288, 151936),
}
_TIED = ("Qwen2-0.5B", "Gemma-7B")
_CLASSES = {"gpt2": "GPT2Config", "llama": "LlamaConfig", "qwen2": "Qwen2Config",
            "mistral": "MistralConfig", "gemma": "GemmaConfig", "phi3": "Phi3Config",
            "qwen3": "Qwen3Config"}
NAMES = tuple(_SIZES)


def config(name: str) -> "PreTrainedConfig":
    """The configuration of the model with this name. Raises ValueError."""
    if name not in _SIZES:
        raise ValueError(f"no model {name!r}: choose {', '.join(NAMES)}")
    family, *sizes = _SIZES[name]
    if family == "gpt2":
        return make(family, **dict(zip(_GPT2, sizes, strict=True)))
    return make(family, tie_word_embeddings=name in _TIED,
                **dict(zip(_LLAMA, sizes, strict=True)))


def make(family: str, **sizes) -> "PreTrainedConfig":
    """A configuration of a family, one of "gpt2", "llama", "qwen2", "mistral", "gemma", "phi3" and
    "qwen3", with these sizes, in the names of its Hugging Face class."""
    import transformers

    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return getattr(transformers, _CLASSES[family])(**tokens | sizes)


def on_meta(config: "PreTrainedConfig") -> nn.Module:
    """The model itself with parameters that have shapes and no memory: 70B in half a second."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)

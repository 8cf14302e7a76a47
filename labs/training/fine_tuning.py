"""What the script finetune.py of notebook 06 trains: a small Qwen2, or a model of the hub."""

import sys

import torch
from torch import nn

from labs.training import data, hf_configs, models
from labs.workers import devices

CONTEXT = 64  # tokens of a sequence
_SIZES = {"cpu": (4, 256), "cuda": (12, 1024)}  # layers, hidden


def qwen2(layers: int | None = None, hidden: int | None = None, seed: int = 0,
          device: str | None = None) -> nn.Module:
    """Returns a Qwen2 with random weights over bytes, on the CPU: tied embeddings, 4 query heads
    that share 2 key and value heads. Its sizes follow the type of the device on which it will be
    trained; None means that of the machine."""
    from transformers import Qwen2ForCausalLM

    device = device or ("cuda" if devices.gpus() else "cpu")
    usual = _SIZES.get(device, _SIZES["cpu"])
    layers, hidden = layers or usual[0], hidden or usual[1]
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(hf_configs.make(
        "qwen2", vocab_size=models.VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, use_cache=False, max_position_embeddings=CONTEXT))
    model.loss_type = "ForCausalLM"  # the default; left unset, transformers warns on every rank
    return model


def load(name: str | None, samples: int, device: str) -> tuple[nn.Module, torch.Tensor]:
    """(model, sequences of shape (samples, CONTEXT)) to fine-tune. name: of a model on the hub,
    with its tokenizer; None means the small Qwen2, of the size for this type of device: a job that
    uses the CPU of a node with GPUs could not train theirs. Where the hub does not answer, the
    process exits with a sentence."""
    if not name:
        return qwen2(device=device), data.windows(samples, CONTEXT)[:, :-1]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except OSError as error:  # also where there is no network
        reason = str(error).strip().partition("\n")[0]
        sys.exit(f"the hub does not give {name}: {reason} Without --model a small Qwen2 with "
                 "random weights is trained.")
    model.config.use_cache = False
    text = bytes(data.text().tolist()).decode(errors="replace")
    tokens = tokenizer(text[:8 * samples * CONTEXT], return_tensors="pt")["input_ids"][0]
    enough = min(samples, len(tokens) // CONTEXT)
    return model, tokens[:enough * CONTEXT].view(enough, CONTEXT)

"""The sizes of a model from its name, its configuration file, or its name on the hub."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from labs.predictions.memory.parameters import shape_of
from labs.predictions.memory.shape import Shape
from labs.training.known_models import SIZES, TIED

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedConfig


class NoModel(ValueError):
    """There is no such model, or its sizes cannot be read; one sentence says what to do."""


def shape_named(name: str) -> Shape:
    """The sizes of the model. Raises NoModel."""
    if name in SIZES:
        return _known(name)
    path = _file(name)
    try:
        return shape_of(_read(path))
    except ValueError as error:
        raise NoModel(f"{path}: {error}") from None


def config_named(name: str) -> "PreTrainedConfig":
    """The configuration of the model, from which it can be built. Raises NoModel."""
    if name in SIZES:
        from labs.training import hf_configs

        return hf_configs.config(name)
    return _read(_file(name))


def _file(name) -> Path:
    """The configuration's file."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    if name.count("/") == 1 and not path.suffix:
        return _from_hub(name)
    raise NoModel(f"no model {name!r}: choose {', '.join(SIZES)}, or give a file like config.json, "
                  "or a name of the hub such as Qwen/Qwen3-4B")


def _known(name) -> Shape:
    family, hidden, layers, heads, *rest = SIZES[name]
    if family == "gpt2":
        return Shape("gpt2", hidden, layers, heads, heads, hidden // heads, 4 * hidden, 50257, 1024,
                     tied=True, qkv_bias=True, out_bias=True, mlp_bias=True)
    kv_heads, ffn, vocabulary = rest
    if family in ("llama", "qwen2"):
        return Shape(family, hidden, layers, heads, kv_heads, hidden // heads, ffn, vocabulary,
                     tied=name in TIED, qkv_bias=family == "qwen2")
    from labs.training import hf_configs

    return shape_of(hf_configs.config(name))


def _read(path) -> "PreTrainedConfig":
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoModel(f"cannot read {path}: {error}") from None
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not kind:
        raise NoModel(f"{path} names no model_type, so it is no configuration of transformers")
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**content)
    except (ValueError, TypeError) as error:
        raise NoModel(f"{path}: {error}") from None


def _from_hub(name) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().split("\n")[0]
        raise NoModel(f"the hub gave no config.json of {name!r} ({why}): download it where you "
                      "can, and give the file") from None

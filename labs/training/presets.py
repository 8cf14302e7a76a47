"""Sizes that fit the machine: chosen by what it has, overridable in a notebook's first cell."""

import functools
import os
from dataclasses import dataclass, replace

from labs.workers import devices


@dataclass(frozen=True)
class Preset:
    """What a notebook trains: a GPT-2 and how it is divided.

    batch: sequences per rank and step. context: tokens of a sequence. cap_bytes: the most bytes of
    a gradient bucket.
    """

    name: str
    ranks: int
    layers: int
    hidden: int
    heads: int
    context: int
    batch: int
    cap_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens that all ranks together process in one step."""
        return self.ranks * self.batch * self.context

    @property
    def parameters(self) -> int:
        """Ψ of its GPT-2."""
        return _parameters(self)

    def __str__(self):
        return (f"{self.name}: {self.ranks} ranks, GPT-2 with {self.layers} layers of width "
                f"{self.hidden}, {self.batch} × {self.context} tokens per rank and step, "
                f"buckets of {self.cap_bytes / 1e6:g} MB")

    __repr__ = __str__


@functools.cache  # a search asks for the same sizes again and again
def _parameters(preset) -> int:
    import torch

    from labs.training import models

    with torch.device("meta"):
        return models.count_trainable(
            models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context))


# laptop: a step of some 20 ms on two cores.
# one-gpu: 59 million parameters. A rank keeps 1.2 GB under DDP (20 bytes for each: parameter,
# gradient, bucket, AdamW's two moments), and 1.9 GB at the peak. 02 keeps four such modules on each
# of 2 ranks: 11 GB and their contexts, so that a T4 (16 GB) is enough. The two ranks' steps are 0.8
# TFLOP: 40 ms at the peak of an A100 in fp32 (19.5 TFLOP/s), which no step reaches.
# node: 202 million parameters. A rank keeps 4 GB under DDP, and 5.2 GB at the peak; 02's four
# modules fit into 24 GB. A rank's step is 1.3 TFLOP: 66 ms at that peak. The gradients, 0.8 GB,
# take a tenth of it over NVLink, and as long as all of it over PCIe 4.
# tests/training/test_presets.py computes these numbers.
PRESETS = {each.name: each for each in (
    Preset("laptop", 2, 6, 128, 4, 64, 8, 800_000),
    Preset("one-gpu", 2, 12, 640, 10, 256, 4, 8_000_000),
    Preset("node", 8, 16, 1024, 16, 256, 4, 25_000_000),
    # What is trained under a memory limit: states are most of it, and DDP fits without the limit.
    Preset("laptop, limit", 4, 8, 160, 4, 64, 1, 800_000),
    Preset("one-gpu, limit", 2, 8, 1024, 16, 512, 2, 25_000_000),
    Preset("node, limit", 8, 8, 2048, 16, 1024, 2, 25_000_000),
    # 1.0 billion parameters; and the width of a model whose layers the lab chooses for the card.
    Preset("billion", 8, 20, 2048, 16, 1024, 4, 25_000_000),
    Preset("larger", 8, 1, 4096, 32, 1024, 1, 25_000_000))}


def machine() -> str:
    """Returns which presets suit this machine: "laptop", "one-gpu" or "node"."""
    gpus = devices.gpus()
    return "laptop" if gpus == 0 else "one-gpu" if gpus == 1 else "node"


def preset(name: str | None = None, lab: str = "", **changes: int) -> Preset:
    """The preset for this machine, or the one called `name`; changes override single sizes. lab:
    the experiment that it is for, where that has presets of its own, such as "limit". Raises
    ValueError where there is no such preset or size. $WORKBOOK_PRESET and $WORKBOOK_RANKS choose
    for a whole run what is not given here."""
    name = ", ".join(filter(None, [name or os.environ.get("WORKBOOK_PRESET") or machine(), lab]))
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: choose {', '.join(PRESETS)}, or leave it out")
    chosen, gpus = PRESETS[name], devices.gpus()
    # An own choice of a small preset keeps its number of ranks.
    if name == "node" or gpus > 1 and not name.startswith(("laptop", "one-gpu")):
        chosen = replace(chosen, ranks=max(2, gpus))
    if asked := os.environ.get("WORKBOOK_RANKS"):
        chosen = replace(chosen, ranks=int(asked))
    return replace(chosen, **_checked(changes))


def _checked(changes) -> dict:
    sizes = [name for name in Preset.__dataclass_fields__ if name != "name"]
    for name, value in changes.items():
        if name not in sizes:
            raise ValueError(f"a preset has no {name!r}; it has {', '.join(sizes)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
    return changes

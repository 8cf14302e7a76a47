"""Small models in the shape of the GPU presets, so that a run takes seconds on two cores."""

import os
from dataclasses import replace

from pretend_gpus import machine

# The most of each size; numbers of ranks and names stay those of the preset.
FEW = bool(os.environ.get("PRETEND_QUICK")) and machine.count() > 2
SMALL = {"layers": 2 if FEW else 3, "hidden": 64, "heads": 4, "context": 32, "batch": 2,
         "cap_bytes": 200_000}
# What some presets have instead, so that labs show their lesson on a card of 1.5e7 bytes: DDP with
# 18 layers of "limit" fits; without "billion"'s states, which FSDP divides, its batch does, too.
OF_LABS = {"limit": {"layers": 4, "hidden": 48, "batch": 1},
           "billion": {"layers": 3, "hidden": 112}, "larger": {"hidden": 128}}
# Where a card is far too large for the labs that fill it: the most that they choose.
MOST = {"MOST_SEQUENCES": {"small": 24, "larger": 4}, "MOST_LAYERS": 6}


def patch(module):
    """Replaces the sizes of all presets but the laptop's, and those that follow from the card."""
    if module.__name__ == "labs.fsdp.node_jobs":
        vars(module).update(MOST)
        return
    if module.__name__ == "labs.training.fine_tuning":
        module._SIZES = dict.fromkeys(module._SIZES, (SMALL["layers"], SMALL["hidden"]))
        return
    for name, preset in module.PRESETS.items():
        if not name.startswith("laptop"):
            most = {**SMALL, **OF_LABS.get(name.rpartition(", ")[2], {})}
            module.PRESETS[name] = replace(preset, **{
                size: min(value, getattr(preset, size)) for size, value in most.items()})

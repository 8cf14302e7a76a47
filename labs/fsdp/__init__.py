"""Notebook 04: fully sharded data parallelism, checked against a twin and under a real limit.

The names are looked up on first use, so that a rank does not load what draws.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "blocks": "labs.training.models", "mesh": ".trained", "device": "labs.workers.devices",
    "linears": ".wrapping",
    "check_shard": ".checks", "your_zero3": ".bridge", "beside_zero3": ".bridge",
    "sweep": ".wrapping", "show_sweep": ".wrapping",
    "check_cost": ".wrapping", "check_choose": ".wrapping",
    "ddp": ".limits", "largest": ".limits", "under_limit": ".rungs",
    "check_checkpointed": ".recompute", "compare": ".rungs", "show_rungs": ".rungs",
    "show_ladder": ".rungs", "table": ".rungs", "show_offload": ".rungs",
    "check_mixed": ".precision", "show_precision": ".precision", "underflow": ".precision",
    "check_from_meta": ".fresh", "check_checkpoint": ".states", "state_dicts": ".states",
    "fsdp1_names": ".first", "sweep_fsdp1": ".first", "node": ".on_a_node",
    "preset": "labs.training.presets",
})

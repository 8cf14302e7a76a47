"""Notebook 04: fully sharded data parallelism, checked against a twin and under a real limit.

The names are looked up on first use, so that a rank does not load what draws.
"""

from labs.lookup import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "blocks": "labs.training.models", "mesh": ".trained", "linears": ".wrapping",
    "check_shard": ".checks", "beside_zero3": ".bridge",
    "sweep": ".wrapping", "show_sweep": ".wrapping",
    "check_cost": ".wrapping", "check_choose": ".wrapping",
    "preset": "labs.training.presets",
})

"""Notebook 03: ZeRO-1, -2 and -3 by hand, checked for what they promise, beside the real ones.

The names are looked up on first use, so that a rank does not load what draws.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "Flat": ".flat", "ShardedOptimizer": ".optimizer", "Sharded": ".sharded", "layers": ".sharded",
    "all_gather": ".collectives", "reduce_scatter": ".collectives",
    "check_cut": ".cutting", "show_owners": ".looking",
    "show_reduce_scatter": ".racing",
    "check_prefetch": ".prefetching", "show_layers": ".looking",
    "check_zero1": ".checks", "check_zero2": ".checks", "check_zero3": ".checks",
    "check_clip_grad_norm": ".norms", "check_reshard": ".saving", "check_choose": ".choosing",
    "saved": ".saving", "load": ".saving", "states": ".choosing",
    "show_large": ".large", "show_choices": ".large",
    "compare": ".measuring", "show_memory": ".show", "show_traffic": ".show",
    "preset": "labs.training.presets",
})

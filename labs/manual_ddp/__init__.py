"""Notebook 02: data parallelism by hand, checked against a twin, measured beside torch's DDP.

The names are looked up on first use, so that a rank does not load what draws.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "Wrapper": ".wrappers", "Bucketed": ".wrappers",
    "check_combine": ".checks", "check_broadcast_state": ".checks",
    "check_average_gradients": ".checks", "check_manual_ddp": ".checks",
    "check_no_sync": ".accumulation", "check_accumulate": ".accumulation",
    "check_make_buckets": ".buckets", "check_bucket": ".buckets", "check_overlap": ".buckets",
    "measure": ".measuring", "torch_ddp": ".measuring",
    "show_combine": ".show", "show_gradients": ".show", "show_training": ".show",
    "show_flights": ".show", "show_timelines": ".show", "show_calls": ".show",
    "show_bytes": ".show", "show_throughput": ".show", "show_shares": ".show",
    "explore_buckets": ".explore",
    "preset": "labs.training.presets",
})

"""Notebook 02: data parallelism by hand, checked against a twin, measured beside torch's DDP.

The names are looked up on first use, so that a rank does not load what draws.
"""

from importlib import import_module

_HOME = {
    "Wrapper": "wrappers", "Bucketed": "wrappers",
    "check_combine": "checks", "check_broadcast_state": "checks",
    "check_average_gradients": "checks", "check_manual_ddp": "checks",
    "check_no_sync": "accumulation", "check_accumulate": "accumulation",
    "check_make_buckets": "buckets", "check_bucket": "buckets", "check_overlap": "buckets",
    "measure": "measuring", "torch_ddp": "measuring",
    "show_combine": "show", "show_gradients": "show", "show_training": "show",
    "show_flights": "show", "show_timelines": "show", "show_calls": "show", "show_bytes": "show",
    "show_throughput": "show", "show_shares": "show",
    "explore_buckets": "explore",
}

__all__ = [*_HOME, "preset"]


def __getattr__(name):
    if name == "preset":
        return import_module("labs.training.presets").preset
    if name not in _HOME:
        raise AttributeError(f"labs.manual_ddp has no {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"labs.manual_ddp.{_HOME[name]}"), name)


def __dir__():
    return sorted([*globals(), *__all__])

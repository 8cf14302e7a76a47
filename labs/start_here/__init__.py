"""Notebook 00: the machine, the collectives as pictures, errors and a deadlock.

The names are looked up on first use, so that a rank that runs one of these modules does not load
what draws.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "check_mean_over_ranks": ".checks",
    "check_all_reduce": ".checks",
    "check_ring_bytes": ".checks",
    "check_mean_losses": ".checks",
    "pass_on": ".ring",
    "ring_all_reduce": ".ring",
    "before_and_after_mean": ".shows",
    "diagnose": ".shows",
    "ring_steps": ".shows",
    "ring_traffic": ".shows",
    "two_steps": ".shows",
    "who_holds_what": ".shows",
})

"""Notebook 00: the machine, the collectives as pictures, errors and a deadlock.

The names are looked up on first use, so that a rank that runs one of these modules does not load
what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.start_here.all_reduce import check_all_reduce, ring_steps
    from labs.start_here.mean_losses import check_mean_losses
    from labs.start_here.mean_over_ranks import before_and_after, check_mean_over_ranks
    from labs.start_here.ring import check_ring, ring_traffic
    from labs.start_here.run_pictures import diagnose, two_steps, who_holds_what
    from labs.start_here.script import check_script, run_script

    from .scaffold import send_recv

__all__, __getattr__, __dir__ = lazy_exports(__name__)

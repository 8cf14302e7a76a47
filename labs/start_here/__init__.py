"""Notebook 00: the machine, the collectives as pictures, errors and a deadlock.

The names are looked up on first use, so that a rank that runs one of these modules does not load
what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .charts import (
        before_and_after_mean,
        diagnose,
        ring_steps,
        ring_traffic,
        run_script,
        two_steps,
        who_holds_what,
    )
    from .checks.collectives import (
        check_all_reduce,
        check_mean_losses,
        check_mean_over_ranks,
        check_ring_bytes,
    )
    from .checks.script import check_script
    from .scaffold import pass_on, ring_all_reduce

__all__, __getattr__, __dir__ = lazy_exports(__name__)

"""Data-Parallel Workbook: launch real ranks from a notebook cell, and look at what they do.

The names below are what a student uses. They are looked up on first use, so that
`import labs` costs nothing on a rank and needs no Jupyter.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.checks.guesses import guess
    from labs.pictures.machine import machine
    from labs.pictures.plan import plan
    from labs.workers.channel import report
    from labs.workers.devices import device
    from labs.workers.failures import LaunchError, OutOfMemory, RankFailed, RanksStuck, last_failure
    from labs.workers.launcher import launch
    from labs.workers.processes import warm_up

__all__, __getattr__, __dir__ = lazy_exports(__name__)

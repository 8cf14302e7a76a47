"""Notebook 06: a job of one's own, two hosts, what limits a run, and what it costs.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part 1: a job of one's own
    from labs.scaling.runs.commands import run_command, torchrun
    from labs.scaling.scaffold import worked_script, write_script
    # part 2: efficiency
    # part 3: two hosts
    # part 4: what limits it
    # part 5: Accelerate and DeepSpeed
    # part 6: what it costs
    # part 7: written down

__all__, __getattr__, __dir__ = lazy_exports(__name__)

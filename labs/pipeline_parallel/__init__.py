"""Notebook 07b: pipeline schedules as data, simulated and executed; three dimensions; JAX's view.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part A: schedules
    # isort: split
    # part B: stages on ranks
    # isort: split
    # part C: three dimensions
    from labs.training.presets import preset

__all__, __getattr__, __dir__ = lazy_exports(__name__)

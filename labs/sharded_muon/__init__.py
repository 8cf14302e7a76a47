"""Notebook 07d: Muon's update of weight matrices that are sharded over ranks.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.sharded_muon.muon_update import check_muon_update, show_sharded_muon
    from labs.sharded_muon.scaffold import newton_schulz, pieces_of

__all__, __getattr__, __dir__ = lazy_exports(__name__)

"""Notebook 07c: sharding in JAX, where the layout of an array is a part of its type.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.sharding_in_jax.jax_and_torch import show_collectives, show_omitted_sums
    from labs.sharding_in_jax.jax_process import run_jax
    from labs.sharding_in_jax.layouts import check_layouts, show_layouts
    from labs.sharding_in_jax.scaffold import block_arrays, place_arrays

__all__, __getattr__, __dir__ = lazy_exports(__name__)

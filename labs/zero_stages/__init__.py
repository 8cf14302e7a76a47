"""Notebook 03: ZeRO-1, -2 and -3 by hand, held to memory and traffic, next to the real libraries.

The names below are what a student uses. They are looked up on first use, so that a rank does not
load what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.training.presets import preset
    from labs.zero_stages.charts.layers import show_gathered_layers, show_owners
    from labs.zero_stages.charts.stages import (
        show_choices,
        show_memory,
        show_phases,
        show_state_bytes,
        show_traffic,
    )
    from labs.zero_stages.charts.storage import show_reads, show_reduce_scatter, show_storage
    from labs.zero_stages.checks.choose import check_choose
    from labs.zero_stages.checks.clip_grad_norm import check_clip_grad_norm
    from labs.zero_stages.checks.cut import check_cut
    from labs.zero_stages.checks.from_scratch import check_from_scratch
    from labs.zero_stages.checks.prefetch import check_prefetch
    from labs.zero_stages.checks.reshard import check_reshard
    from labs.zero_stages.checks.stages import check_zero1, check_zero2, check_zero3
    from labs.zero_stages.collectives import all_gather, reduce_scatter
    from labs.zero_stages.flat_parameter import FlatParameter, flatten_layers, layer_groups
    from labs.zero_stages.scaffold.checkpoint import load_sharded_state_dict, sharded_state_dict
    from labs.zero_stages.scaffold.module import ShardedModule, tensors_in
    from labs.zero_stages.scaffold.optimizer import ShardedOptimizer
    from labs.zero_stages.scaffold.sizes import state_bytes
    from labs.zero_stages.stage_comparison import compare_stages

__all__, __getattr__, __dir__ = lazy_exports(__name__)

"""Notebook 03: ZeRO-1, -2 and -3 by hand, with limits on memory and traffic, beside the libraries.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.training.presets import preset
    from labs.zero_stages.clip_grad_norm import check_clip_grad_norm
    from labs.zero_stages.collectives import reduce_scatter
    from labs.zero_stages.cut import check_cut, show_owners
    from labs.zero_stages.flat_parameter import FlatParameter, flatten_layers, layer_groups
    from labs.zero_stages.from_scratch import check_from_scratch
    from labs.zero_stages.lowest_stage import check_lowest_stage, show_choices
    from labs.zero_stages.prefetch import check_prefetch
    from labs.zero_stages.reshard import check_reshard, show_reads
    from labs.zero_stages.scaffold import (
        ShardedModule,
        ShardedOptimizer,
        load_sharded_state_dict,
        sharded_state_dict,
        state_bytes,
        tensors_in,
    )
    from labs.zero_stages.stage_by_bytes import check_stage_by_bytes, show_stages_by_bytes
    from labs.zero_stages.stage_comparison import (
        compare_stages,
        show_memory,
        show_phases,
        show_state_bytes,
        show_traffic,
    )
    from labs.zero_stages.zero1 import check_zero1, show_reduce_scatter
    from labs.zero_stages.zero1_script import check_zero1_script
    from labs.zero_stages.zero2 import check_zero2, show_storage
    from labs.zero_stages.zero3 import check_zero3, show_gathered_layers

__all__, __getattr__, __dir__ = lazy_exports(__name__)

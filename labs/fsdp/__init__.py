"""Notebook 04: fully sharded data parallelism, checked against a single-process reference and
under a real memory limit.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.fsdp.checkpoint import check_checkpoint, show_state_dicts
    from labs.fsdp.checkpointed import check_checkpointed
    from labs.fsdp.comparisons import show_gradient_accumulation, show_hsdp
    from labs.fsdp.cost import check_cost, show_exposed, show_wrappings
    from labs.fsdp.from_meta import check_from_meta
    from labs.fsdp.from_scratch import check_from_scratch
    from labs.fsdp.fsdp import check_fsdp
    from labs.fsdp.fsdp1 import show_fsdp1_names, show_wrap_policies
    from labs.fsdp.limit_charts import (
        compare_strategies,
        show_largest_models,
        show_memory_and_arithmetic,
        show_offload,
        show_offload_on_gpus,
        show_summary,
        show_training_under_limit,
    )
    from labs.fsdp.loop import check_loop, show_loop
    from labs.fsdp.memory_limits import largest_model, memory_limit
    from labs.fsdp.mixed import check_mixed, show_precision
    from labs.fsdp.node_charts import show_node_chart, show_node_steps, show_node_table
    from labs.fsdp.node_run import billion_parameters
    from labs.fsdp.paced_run import laptop_steps, show_pace, slow_down
    from labs.fsdp.scaffold import mesh, show_underflow, your_zero3
    from labs.fsdp.scaled_step import check_scaled_step, show_step
    from labs.fsdp.scaling_costs import check_scaling_costs, show_scaling_costs
    from labs.fsdp.shard import check_shard, show_beside_zero3
    from labs.training.models import blocks
    from labs.training.presets import preset
    from labs.workers.devices import device

__all__, __getattr__, __dir__ = lazy_exports(__name__)

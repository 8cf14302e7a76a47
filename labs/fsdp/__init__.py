"""Notebook 04: fully sharded data parallelism, checked against a single-process reference and
under a real memory limit.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.fsdp.checkpoint import check_checkpoint, compare_state_dicts
    from labs.fsdp.checkpointed import check_checkpointed
    from labs.fsdp.choose import check_choose, show_lost
    from labs.fsdp.comparisons import compare_accumulation, compare_meshes
    from labs.fsdp.cost import check_cost, compare_wrappings, show_wrappings
    from labs.fsdp.from_meta import check_from_meta
    from labs.fsdp.from_scratch import check_from_scratch
    from labs.fsdp.fsdp import check_fsdp
    from labs.fsdp.fsdp1 import block_policy, fsdp1_names, fsdp1_wrap_policies
    from labs.fsdp.gradient_bytes import check_gradient_bytes, show_pace, try_meter
    from labs.fsdp.limit_charts import (
        compare_strategies,
        offload_on_gpus,
        show_largest_models,
        show_memory_and_arithmetic,
        show_offload,
        summary_table,
        train_under_limit,
    )
    from labs.fsdp.loop import check_loop, try_loop
    from labs.fsdp.memory_limits import largest_model, memory_limit, parameters_of
    from labs.fsdp.mixed import check_mixed, show_precision
    from labs.fsdp.node_charts import node_chart, node_steps, node_table
    from labs.fsdp.node_run import billion_parameters
    from labs.fsdp.paced_run import laptop_steps, slow_down
    from labs.fsdp.scaffold import count_underflow, linears, mesh, your_zero3
    from labs.fsdp.scaled_step import check_scaled_step, try_step
    from labs.fsdp.scaling_costs import check_scaling_costs, show_scaling_costs
    from labs.fsdp.shard import check_shard, compare_with_zero3
    from labs.training.models import blocks
    from labs.training.presets import preset
    from labs.training.strategies import ddp
    from labs.workers.devices import device
    from labs.zero_stages.collectives import all_gather, reduce_scatter

__all__, __getattr__, __dir__ = lazy_exports(__name__)

"""Notebook 04: fully sharded data parallelism, checked against a single-process reference and
under a real memory limit.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.fsdp.charts.limits import (
        compare_strategies,
        offload_on_gpus,
        show_largest_models,
        show_memory_and_arithmetic,
        show_offload,
        summary_table,
        train_under_limit,
    )
    from labs.fsdp.charts.node import node_chart, node_steps, node_table
    from labs.fsdp.charts.node_pace import show_pace
    from labs.fsdp.charts.precision import compare_state_dicts, show_precision
    from labs.fsdp.charts.scaling_costs import show_scaling_costs
    from labs.fsdp.charts.sharding import (
        compare_accumulation,
        compare_meshes,
        compare_with_zero3,
        compare_wrappings,
        show_lost,
        show_wrappings,
    )
    from labs.fsdp.checks.checkpoint import check_checkpoint
    from labs.fsdp.checks.checkpointed import check_checkpointed
    from labs.fsdp.checks.choose import check_choose
    from labs.fsdp.checks.cost import check_cost
    from labs.fsdp.checks.from_meta import check_from_meta
    from labs.fsdp.checks.from_scratch import check_from_scratch
    from labs.fsdp.checks.gradient_bytes import check_gradient_bytes, try_meter
    from labs.fsdp.checks.loop import check_loop, try_loop
    from labs.fsdp.checks.mixed import check_mixed
    from labs.fsdp.checks.scaled import check_scaled_step, try_step
    from labs.fsdp.checks.scaling_costs import check_scaling_costs
    from labs.fsdp.checks.shard import check_shard
    from labs.fsdp.fsdp1 import block_policy, fsdp1_names, fsdp1_wrap_policies
    from labs.fsdp.memory_limits import largest_model, memory_limit, parameters_of
    from labs.fsdp.node.paced_run import laptop_steps, slow_down
    from labs.fsdp.node.running import billion_parameters
    from labs.fsdp.scaffold import count_underflow, linears, mesh, your_zero3
    from labs.training.models import blocks
    from labs.training.presets import preset
    from labs.training.strategies import ddp
    from labs.workers.devices import device
    from labs.zero_stages.collectives import all_gather, reduce_scatter

__all__, __getattr__, __dir__ = lazy_exports(__name__)

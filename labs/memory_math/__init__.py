"""Notebook 01: the memory of a training job by formula, checked against what ranks really hold.

scaffold: what the notebook measures. measurements: smaller measurements, on one rank. checks: one
file per exercise. charts: what is drawn.
explorer: one rank's memory for any setting. ground_truth: what the checks compare with.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.memory_math.charts.activations import (
        show_activations,
        show_checkpointing_cost,
        show_checkpointing_memory,
        show_layer_activations,
        show_logits,
        show_mixed_precision,
        show_saved_parts,
        show_saved_tensors,
        show_sequence_lengths,
    )
    from labs.memory_math.charts.jobs import (
        show_bytes_left,
        show_gpu_memory,
        show_other_memory,
        show_peak,
        show_rank_states,
        show_self_check,
        show_unexplained_bytes,
    )
    from labs.memory_math.charts.states import (
        show_70b,
        show_block,
        show_figure_1,
        show_models,
        show_optimizers,
        show_outside_blocks,
        show_quoted_figures,
        show_recipes,
        show_savings,
        show_traffic,
    )
    from labs.memory_math.checks.activations import check_activations
    from labs.memory_math.checks.bytes_for_backward import check_bytes_for_backward
    from labs.memory_math.checks.bytes_left import check_bytes_left
    from labs.memory_math.checks.bytes_per_parameter import check_bytes_per_parameter
    from labs.memory_math.checks.parameters import check_parameters
    from labs.memory_math.checks.per_rank import check_per_rank
    from labs.memory_math.checks.rank_states import check_rank_states
    from labs.memory_math.checks.step_flops import check_step_flops
    from labs.memory_math.explorer import explore_memory, show_scaling
    from labs.memory_math.scaffold import measure_checkpointing, measure_ranks, model_sizes
    from labs.predictions.hardware import gpu, overhead
    from labs.training.presets import preset

__all__, __getattr__, __dir__ = lazy_exports(__name__)

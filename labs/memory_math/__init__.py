"""Notebook 01: the memory of a training job by formula, checked against what ranks really hold.

scaffold: what the notebook measures. measurements: smaller measurements, on one rank. checks: one
file per exercise. charts: what is drawn.
scaling: one rank of a job on up to 1024. ground_truth: what the checks compare with.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.memory_math.activations import (
        check_activations,
        show_activations,
        show_layer_activations,
        show_logits,
        show_saved_tensors,
        show_sequence_lengths,
    )
    from labs.memory_math.bytes_for_backward import check_bytes_for_backward, show_saved_parts
    from labs.memory_math.bytes_left import check_bytes_left, show_bytes_left, show_self_check
    from labs.memory_math.bytes_per_parameter import (
        check_bytes_per_parameter,
        show_mixed_precision,
        show_optimizers,
        show_quoted_figures,
        show_recipes,
    )
    from labs.memory_math.fewest_ranks import check_fewest_ranks
    from labs.memory_math.parameters import (
        check_parameters,
        show_block,
        show_models,
        show_outside_blocks,
    )
    from labs.memory_math.per_rank import (
        check_per_rank,
        show_70b,
        show_figure_1,
        show_savings,
        show_traffic,
    )
    from labs.memory_math.rank_states import (
        check_rank_states,
        show_gpu_memory,
        show_other_memory,
        show_peak,
        show_rank_states,
        show_unexplained_bytes,
    )
    from labs.memory_math.scaffold import measure_checkpointing, measure_ranks, model_sizes
    from labs.memory_math.scaling import show_scaling
    from labs.memory_math.step_flops import (
        check_step_flops,
        show_checkpointing_cost,
        show_checkpointing_memory,
    )
    from labs.predictions.hardware import gpu, overhead
    from labs.training.presets import preset

__all__, __getattr__, __dir__ = lazy_exports(__name__)

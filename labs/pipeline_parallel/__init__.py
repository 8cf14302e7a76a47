"""Notebook 07b: pipeline schedules as data, simulated and executed; three dimensions; JAX's view.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part A: schedules
    from labs.pipeline_parallel.charts.schedules import (
        draw_schedule,
        show_published_bubbles,
        show_schedules,
        show_zb_h2,
    )
    from labs.pipeline_parallel.checks.gpipe import check_gpipe
    from labs.pipeline_parallel.checks.interleaved import check_interleaved
    from labs.pipeline_parallel.checks.one_f_one_b import check_one_f_one_b
    from labs.pipeline_parallel.checks.zb_h1 import check_zb_h1
    from labs.pipeline_parallel.scaffold import why_illegal
    from labs.predictions.activations import korthikanti
    from labs.predictions.pipelines.schedule import B, F, W
    # isort: split
    # part B: stages on ranks
    from labs.pipeline_parallel.charts.stages import (
        show_measured,
        show_runtimes,
        show_split,
        show_training,
    )
    from labs.pipeline_parallel.checks.clip_across_stages import check_clip_across_stages
    from labs.pipeline_parallel.checks.run_actions import check_run_actions
    from labs.pipeline_parallel.checks.split_layers import check_split_layers
    from labs.pipeline_parallel.execution.experiments import (
        llama_3_costs,
        part_seconds,
        small_llama,
    )
    from labs.pipeline_parallel.execution.messages import StageLinks, wire_device
    from labs.pipeline_parallel.execution.runner import PipelineRunner
    from labs.pipeline_parallel.execution.stages import (
        count_targets,
        make_stages,
        sum_of_losses,
    )
    from labs.start_here.charts import diagnose
    # isort: split
    # part C: three dimensions
    from labs.pipeline_parallel.charts.mesh import show_mesh
    from labs.pipeline_parallel.charts.plans import (
        show_plans,
        show_published_plans,
        show_stages,
    )
    from labs.pipeline_parallel.charts.three_dimensions import show_three_dimensions
    from labs.pipeline_parallel.checks.choose_plan import check_choose_plan
    from labs.pipeline_parallel.checks.mesh import check_mesh, check_wrong_rows
    from labs.pipeline_parallel.checks.rank_memory import check_rank_memory
    from labs.pipeline_parallel.checks.three_dimensions import check_three_dimensions
    from labs.pipeline_parallel.dimensions.published_meshes import (
        LLAMA_3,
        LLAMA_3_STEPS,
        STEPS_OF_175B,
        llama_3_seconds,
    )
    from labs.predictions.mesh import Mesh
    from labs.predictions.plans.job import SHARDING, Plan, impossible
    from labs.predictions.plans.known_jobs import JOBS
    from labs.predictions.plans.memory import (
        LOGIT_BYTES,
        fits,
        largest_rank,
        layer_activations,
        rank_memory,
    )
    from labs.predictions.plans.search import plans, step_parts, step_seconds
    from labs.training.presets import preset
    # isort: split
    # part D: JAX's view
    from labs.pipeline_parallel.charts.device_pieces import show_layouts
    from labs.pipeline_parallel.charts.jax_and_torch import compare_collectives, who_notices
    from labs.pipeline_parallel.checks.layouts import check_layouts
    from labs.pipeline_parallel.jax_view.layouts import block_arrays, place_arrays
    from labs.pipeline_parallel.jax_view.process import run_jax

__all__, __getattr__, __dir__ = lazy_exports(__name__)

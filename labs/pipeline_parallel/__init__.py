"""Notebook 07b: pipeline schedules as data, simulated and executed; three dimensions.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # a script of one's own
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.pipeline_parallel.pipeline import check_pipeline
    # isort: split
    # part A: schedules
    from labs.pipeline_parallel.gpipe import check_gpipe, show_activations
    from labs.pipeline_parallel.interleaved import check_interleaved
    from labs.pipeline_parallel.one_f_one_b import check_one_f_one_b
    from labs.pipeline_parallel.scaffold import why_illegal
    from labs.pipeline_parallel.schedule_charts import (
        show_published_bubbles,
        show_schedule,
        show_schedules,
        show_zb_h2,
    )
    from labs.pipeline_parallel.zb_h1 import check_zb_h1
    from labs.predictions.pipelines.schedule import B, F, W
    # isort: split
    # part B: stages on ranks
    from labs.pipeline_parallel.clip_across_stages import check_clip_across_stages
    from labs.pipeline_parallel.measured_steps import show_part_seconds, show_stage
    from labs.pipeline_parallel.messages import StageLinks
    from labs.pipeline_parallel.run_actions import (
        check_run_actions,
        show_measured,
        show_runtimes,
        show_training,
    )
    from labs.pipeline_parallel.runner import PipelineRunner
    from labs.pipeline_parallel.split_layers import check_split_layers, show_split
    from labs.start_here.run_pictures import diagnose
    # isort: split
    # part C: three dimensions
    from labs.pipeline_parallel.choose_plan import (
        check_choose_plan,
        show_plan_costs,
        show_plans,
        show_published_plans,
    )
    from labs.pipeline_parallel.mesh import check_mesh, show_mesh
    from labs.pipeline_parallel.published_meshes import show_llama_3_seconds, show_published_steps
    from labs.pipeline_parallel.rank_memory import check_rank_memory, show_stages
    from labs.pipeline_parallel.three_dimensions import (
        check_three_dimensions,
        show_three_dimensions,
    )
    from labs.predictions.communication.mesh import Mesh
    from labs.predictions.plans.job import SHARDING, Plan
    from labs.predictions.plans.known_jobs import JOBS
    from labs.predictions.plans.memory import fits, layer_activations
    from labs.predictions.plans.search import plans, step_seconds
    from labs.training.presets import preset

__all__, __getattr__, __dir__ = lazy_exports(__name__)

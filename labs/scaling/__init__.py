"""Notebook 06: a job of one's own, two hosts, what limits a run, and what it costs.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.exercises.records import keep
from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part 1: a job of one's own
    from labs.exercises.scripts.commands import run_command, torchrun
    from labs.exercises.scripts.files import worked_script, write_script
    from labs.scaling.charts.runs import show_metrics, show_ragged
    from labs.scaling.checks.ragged_step import check_ragged_step
    from labs.scaling.checks.train import check_train
    from labs.scaling.runs.ragged import answers, count_answers, loss_sum
    # isort: split
    # part 2: efficiency
    from labs.meters.trace import subtract, total_seconds, union
    from labs.scaling.charts.efficiency import show_lost_time, show_scaling
    from labs.scaling.checks.divide_lost_time import check_divide_lost_time
    from labs.scaling.checks.efficiency import check_efficiency
    from labs.scaling.runs.lost_time_runs import record_lost_time
    from labs.scaling.runs.scaling_runs import measure_scaling
    # isort: split
    # part 3: two hosts
    from labs.scaling.charts.links import (
        show_choice,
        show_fit,
        show_hierarchical,
        show_link_bytes,
        show_on_gpus,
        show_training,
    )
    from labs.scaling.checks.choose_strategy import check_choose_strategy
    from labs.scaling.checks.hierarchical_all_reduce import check_hierarchical_all_reduce
    from labs.scaling.checks.hybrid_shard import check_hybrid_shard
    from labs.scaling.checks.link_seconds import check_link_seconds
    from labs.scaling.links.measure import (
        fit_all_reduces,
        measure_all_reduces,
        measure_hierarchical,
        measure_training,
        run_on_two_hosts,
    )
    from labs.training.models import blocks
    # isort: split
    # part 4: what limits it
    from labs.scaling.charts.limits import show_step_errors, show_step_times, show_utilization
    from labs.scaling.charts.overlap import show_overlap
    from labs.scaling.checks.step_seconds import check_step_seconds
    from labs.scaling.checks.utilization import check_utilization
    from labs.scaling.scaffold import own_run, reported_run, step_parts
    # isort: split
    # part 5: Accelerate and DeepSpeed
    from labs.scaling.charts.engines import show_engines, show_jobs
    from labs.scaling.checks.what_ran import check_what_ran
    from labs.scaling.runs.engines import deepspeed_json, measure_engines
    from labs.scaling.runs.jobs import accelerate, read_job, start_otherwise
    # isort: split
    # part 6: what it costs
    from labs.predictions.failures.intervals import expected_wall
    from labs.predictions.prices import price_table
    from labs.scaling.charts.costs import show_budget, show_claim, show_costs, show_prices
    from labs.scaling.charts.spot import show_spot
    from labs.scaling.checks.claim import SCALES, SLIP, check_claim
    from labs.scaling.checks.costs import check_costs
    from labs.scaling.checks.spot_costs import check_spot_costs
    # isort: split
    # part 7: written down
    from labs.scaling.charts.record import show_record
    from labs.scaling.record.document import document
    from labs.scaling.scaffold import cluster_file
    # isort: split
    # optional: a job from a blank page
    from labs.scaling.charts.runs import show_job
    from labs.scaling.checks.job import check_job
    from labs.scaling.runs.ragged import answer_samples

__all__, __getattr__, __dir__ = lazy_exports(__name__)

keep()  # from now on what checks and pictures return: `document` writes it down

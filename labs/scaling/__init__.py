"""Notebook 06: a training script, two hosts, what limits a run, and what it costs.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.checks.records import keep
from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part 1: a training script
    from labs.checks.scripts.commands import run_command, torchrun
    from labs.checks.scripts.files import worked_script, write_script
    from labs.scaling.ragged import answers, loss_sum
    from labs.scaling.ragged_step import check_ragged_step, show_ragged
    from labs.scaling.train import check_train, show_metrics
    # isort: split
    # part 2: scaling efficiency
    from labs.meters.trace import subtract, total_seconds, union
    from labs.scaling.attribute_overhead import check_attribute_overhead
    from labs.scaling.efficiency import check_efficiency, show_scaling
    from labs.scaling.lost_time_runs import record_lost_time, show_lost_time
    from labs.scaling.release_notes import show_release_note
    # isort: split
    # part 3: two hosts
    from labs.scaling.choose_strategy import check_choose_strategy, show_choice
    from labs.scaling.hierarchical_all_reduce import (
        check_hierarchical_all_reduce,
        show_hierarchical,
        show_on_gpus,
    )
    from labs.scaling.hybrid_shard import check_hybrid_shard, show_training
    from labs.scaling.link_measurements import show_two_hosts
    from labs.scaling.link_seconds import check_link_seconds, show_fit, show_link_bytes
    # isort: split
    # part 4: what limits it
    from labs.scaling.scaffold import own_run, reported_run
    from labs.scaling.utilization import check_utilization, show_utilization
    # isort: split
    # part 5: Accelerate and DeepSpeed
    from labs.scaling.identify_strategy import check_identify_strategy, show_jobs
    from labs.scaling.started_jobs import accelerate, finetune_jobs, show_deepspeed_config
    # isort: split
    # part 6: what a job will take
    from labs.scaling.calibrate import check_calibrate, show_calibrated
    from labs.scaling.card_pairs import show_cards
    from labs.scaling.fastest import check_fastest, show_fastest
    from labs.scaling.gpu_steps import candidates, measured_step
    from labs.scaling.scoreboard_charts import show_gpu_runs, show_launch_floor
    from labs.scaling.stall_charts import show_stalls
    from labs.scaling.step_parts import check_step_parts, show_steps
    # isort: split
    # part 7: what it costs
    from labs.predictions.cost.prices import price_table
    from labs.predictions.failures.intervals import expected_wall
    from labs.scaling.costs import check_costs, show_budget, show_costs, show_prices
    from labs.scaling.spot_costs import check_spot_costs, show_spot
    # isort: split
    # part 8: the record
    from labs.scaling.record_document import show_record
    from labs.scaling.scaffold import show_cluster_file
    # isort: split
    # optional: a script from scratch
    from labs.scaling.job import check_job, show_job

__all__, __getattr__, __dir__ = lazy_exports(__name__)

keep()  # from now on what checks and pictures return: `show_record` writes it down

"""Notebook 08: the training state, checkpoints, restarts, and what failures cost.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part A: the training state
    from labs.fsdp.scaffold import your_zero3
    from labs.surviving_failure.forgotten_chart import show_forgotten
    from labs.surviving_failure.job_state import (
        check_job_state,
        show_resumed,
        show_stale_gradient,
    )
    from labs.surviving_failure.other_ranks import check_other_ranks, show_other_ranks
    from labs.workers.devices import random_states, set_random_states
    # isort: split
    # part B: atomic checkpoints
    from labs.surviving_failure.atomic_write import check_atomic_write
    from labs.surviving_failure.checkpoints import check_checkpoints, show_damage
    from labs.surviving_failure.crash_series import show_kills
    from labs.surviving_failure.scaffold import to_bytes
    # isort: split
    # part C: asynchronous checkpointing
    from labs.surviving_failure.async_saver import check_async_saver
    from labs.surviving_failure.snapshots import show_snapshot_memory
    from labs.surviving_failure.stalls import show_stalls
    # isort: split
    # part D: elastic restart
    from labs.checks.scripts.files import worked_script, write_script
    from labs.surviving_failure.elastic import check_elastic
    from labs.surviving_failure.elastic_charts import run_with_kills, show_restarts, show_run
    # isort: split
    # part E: the checkpoint interval
    from labs.predictions.failures.intervals import daly, expected_wall
    from labs.predictions.failures.reports import LLAMA_3, LLAMA_3_TOTAL, InterruptionCause
    from labs.predictions.failures.simulation import exponential_gaps, weibull_gaps
    from labs.surviving_failure.intervals import show_clusters, show_formulas, show_intervals
    from labs.surviving_failure.misprint import check_misprint, show_interruptions, show_readings
    from labs.surviving_failure.save_plan import (
        check_save_plan,
        show_checkpoint_sizes,
        show_failure_rates,
        show_goodput,
    )
    from labs.surviving_failure.wall_time import check_wall_time
    # isort: split
    # part F: silent corruption and stragglers
    from labs.faults.flipped_bit import flip_bit
    from labs.surviving_failure.find_corrupt import check_find_corrupt
    from labs.surviving_failure.find_straggler import (
        check_find_straggler,
        show_step_seconds,
        show_stragglers,
    )
    from labs.surviving_failure.flips import show_flips, show_gradient_flips, show_layouts
    from labs.surviving_failure.scaffold import StepSeconds, smooth, tensor_bytes
    # isort: split
    # part D, two hosts
    from labs.surviving_failure.host_loss import show_host_restarts, show_hosts, show_refusal
    from labs.surviving_failure.lost_host import lose_host
    # isort: split
    # part G: torchft
    from labs.surviving_failure.replica_charts import show_digests, show_replicas, show_time_lost
    from labs.surviving_failure.replica_goodput import check_replica_goodput, show_replica_groups
    from labs.surviving_failure.replica_process import ReplicaJob
    from labs.surviving_failure.replica_runs import run_replicas

__all__, __getattr__, __dir__ = lazy_exports(__name__)

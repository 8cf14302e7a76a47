"""Notebook 08: the whole state, checkpoints, restarts, and what failures cost.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part A: the whole state
    from labs.fsdp.scaffold import your_zero3
    from labs.surviving_failure.charts.whole_state import (
        show_forgotten,
        show_left_gradient,
        show_other_ranks,
        show_resumed,
    )
    from labs.surviving_failure.checks.job_state import check_job_state
    from labs.surviving_failure.checks.other_ranks import check_other_ranks
    from labs.surviving_failure.states.job import place_of, set_place
    from labs.workers.devices import random_states, set_random_states
    # isort: split
    # part B: whole checkpoints
    from labs.surviving_failure.charts.checkpoints import show_damage, show_kills
    from labs.surviving_failure.checks.checkpoints import check_checkpoints
    from labs.surviving_failure.checks.write_whole import check_write_whole
    from labs.surviving_failure.scaffold import MANIFEST, digest, shard_file, step_folder, to_bytes
    # isort: split
    # part C: saving without stopping
    from labs.surviving_failure.charts.async_saving import show_snapshot_memory, show_stalls
    from labs.surviving_failure.checks.async_saver import check_async_saver
    # isort: split
    # part D: restart without a person
    from labs.exercises.scripts.files import worked_script, write_script
    from labs.surviving_failure.charts.elastic import run_with_kills, show_restarts, show_run
    from labs.surviving_failure.checks.elastic import check_elastic
    # isort: split
    # part E: how often to save
    from labs.predictions.failures.intervals import daly, expected_wall, young
    from labs.predictions.failures.reports import LLAMA_3, LLAMA_3_TOTAL, RATES, InterruptionCause
    from labs.predictions.failures.simulation import exponential_gaps, weibull_gaps
    from labs.surviving_failure.charts.saving import (
        show_checkpoint_sizes,
        show_clusters,
        show_formulas,
        show_goodput,
        show_intervals,
        show_readings,
    )
    from labs.surviving_failure.checks.misprint import check_misprint
    from labs.surviving_failure.checks.save_plan import check_save_plan
    from labs.surviving_failure.checks.wall_time import check_wall_time
    # isort: split
    # part F: silent corruption and stragglers
    from labs.surviving_failure.charts.corruption import (
        show_flips,
        show_gradient_flips,
        show_layouts,
    )
    from labs.surviving_failure.charts.stragglers import show_stragglers
    from labs.surviving_failure.checks.find_corrupt import check_find_corrupt
    from labs.surviving_failure.checks.find_straggler import check_find_straggler
    from labs.surviving_failure.crashes.slow_ranks import recorded_stragglers
    from labs.surviving_failure.scaffold import StepSeconds, flip_bit, smooth, tensor_bytes
    # isort: split
    # part D, two hosts
    from labs.surviving_failure.charts.host_loss import show_host_restarts, show_hosts, why_refused
    from labs.surviving_failure.elastic.lost_host import lose_host
    # isort: split
    # part G: torchft
    from labs.surviving_failure.charts.replica_groups import show_replica_groups
    from labs.surviving_failure.charts.replicas import (
        show_digests,
        show_replicas,
        show_time_lost,
    )
    from labs.surviving_failure.checks.kept_share import check_kept_share
    from labs.surviving_failure.elastic.replicas.process import (
        goes_on,
        replica_batch,
        replica_model,
        replica_state,
        report_step,
    )
    from labs.surviving_failure.elastic.replicas.runs import run_replicas

__all__, __getattr__, __dir__ = lazy_exports(__name__)

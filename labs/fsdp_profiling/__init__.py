"""Notebook 05: FSDP's steps recorded on real ranks, read from their traces, and diagnosed.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.fsdp_profiling.charts import (
        explore_slow_runs,
        show_ahead,
        show_all_gathers,
        show_diagnoses,
        show_links,
        show_non_fsdp_collectives,
        show_prefetch,
        show_seconds,
        show_shares,
        show_throughput,
        show_timeline,
        show_waiting,
    )
    from labs.fsdp_profiling.checks.attribute import check_attribute
    from labs.fsdp_profiling.checks.call_site import check_call_site
    from labs.fsdp_profiling.checks.collective_seconds import check_collective_seconds
    from labs.fsdp_profiling.checks.communication_share import check_communication_share
    from labs.fsdp_profiling.checks.diagnose import check_diagnose
    from labs.fsdp_profiling.checks.exposed_seconds import check_exposed_seconds
    from labs.fsdp_profiling.checks.exposed_share import check_exposed_share
    from labs.fsdp_profiling.checks.fetched_late import check_fetched_late
    from labs.fsdp_profiling.checks.forward_prefetch import check_forward_prefetch
    from labs.fsdp_profiling.checks.no_prefetch import check_no_prefetch
    from labs.fsdp_profiling.injected_faults import watch_activations
    from labs.fsdp_profiling.recording import preset
    from labs.fsdp_profiling.scaffold import (
        CAUSES,
        LIBRARIES,
        record_fsdp,
        show_own_reader,
        slow_runs,
    )
    from labs.meters.trace import subtract, total_seconds, union
    from labs.meters.trace_file import load
    from labs.meters.trace_units import gradients_done, unit_of

__all__, __getattr__, __dir__ = lazy_exports(__name__)

"""Notebook 05: FSDP's steps recorded on real ranks, read from their traces, and diagnosed.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.fsdp_profiling.attribute import check_attribute, show_all_gathers
    from labs.fsdp_profiling.call_site import check_call_site, show_non_fsdp_collectives
    from labs.fsdp_profiling.collective_seconds import check_collective_seconds, show_links
    from labs.fsdp_profiling.communication_share import (
        check_communication_share,
        show_seconds,
        show_shares,
    )
    from labs.fsdp_profiling.diagnose import (
        check_diagnose,
        explore_slow_runs,
        show_diagnoses,
        show_waiting,
    )
    from labs.fsdp_profiling.exposed_seconds import check_exposed_seconds, show_own_reader
    from labs.fsdp_profiling.fetched_late import check_fetched_late
    from labs.fsdp_profiling.injected_faults import watch_activations
    from labs.fsdp_profiling.profile_fsdp import check_profile_fsdp
    from labs.fsdp_profiling.record_step import check_record_step
    from labs.fsdp_profiling.recorded_runs import preset
    from labs.fsdp_profiling.scaffold import (
        CAUSES,
        LIBRARIES,
        record_fsdp,
        show_timeline,
        slow_runs,
    )
    from labs.fsdp_profiling.set_prefetch import (
        check_set_prefetch,
        show_ahead,
        show_prefetch,
        show_throughput,
    )
    from labs.meters.trace import subtract, total_seconds, union
    from labs.meters.trace_file import load
    from labs.meters.trace_units import gradients_done

__all__, __getattr__, __dir__ = lazy_exports(__name__)

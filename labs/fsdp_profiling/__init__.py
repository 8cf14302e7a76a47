"""Notebook 05: FSDP's steps recorded on real ranks, read from their traces, and diagnosed.

The names are looked up on first use, so that a rank does not load what draws.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "preset": ".recording", "record": ".calm", "watch_activations": ".leftovers",
    "union": "labs.meters.trace", "subtract": "labs.meters.trace",
    "total_seconds": "labs.meters.trace", "load": "labs.meters.trace_file",
    "unit_of": "labs.meters.trace_units", "gradients_done": "labs.meters.trace_units",
    "LIBRARIES": ".attribution_checks", "CAUSES": ".diagnosis", "patients": ".diagnosis",
    "check_communication_share": ".share_checks", "check_exposed_share": ".share_checks",
    "check_attribute": ".attribution_checks", "check_call_site": ".attribution_checks",
    "check_fetched_late": ".prefetch_checks", "check_no_prefetch": ".prefetch_checks",
    "check_forward_prefetch": ".prefetch_checks", "check_diagnose": ".diagnosis",
    "check_wire_seconds": ".links",
    "show_timeline": ".show", "show_shares": ".show", "show_seconds": ".show",
    "show_gathers": ".show", "show_strangers": ".show", "show_prefetch": ".show",
    "show_price": ".show",
    "explore_patients": ".show", "show_diagnoses": ".show", "show_links": ".links",
})

"""Notebook 05: FSDP's steps recorded on real ranks, read from their traces, and diagnosed.

The names are looked up on first use, so that a rank does not load what draws.
"""

from labs.lookup import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "record": ".recording",
    "preset": ".recording",
})

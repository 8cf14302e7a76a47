"""Data-Parallel Workbook: launch real ranks from a notebook cell, and look at what they do.

The names below are what a student uses. They are looked up on first use, so that
`import labs` costs nothing on a rank and needs no Jupyter.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "launch": "labs.workers.launcher",
    "report": "labs.workers.channel",
    "last_failure": "labs.workers.failures",
    "RankFailed": "labs.workers.failures",
    "OutOfMemory": "labs.workers.failures",
    "RanksStuck": "labs.workers.failures",
    "LaunchError": "labs.workers.failures",
    "device": "labs.workers.devices",
    "machine": "labs.pictures.machine",
    "warm_up": "labs.workers.processes",
    "guess": "labs.exercises.guesses",
})

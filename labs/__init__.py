"""Data-Parallel Workbook: launch real ranks from a notebook cell, and look at what they do.

The names below are what a student uses. They are looked up on first use, so that
`import labs` costs nothing on a rank and needs no Jupyter.
"""

from importlib import import_module

_HOME = {
    "launch": "labs.workers.launcher",
    "report": "labs.workers.channel",
    "last_failure": "labs.workers.failures",
    "RankFailed": "labs.workers.failures",
    "OutOfMemory": "labs.workers.failures",
    "RanksStuck": "labs.workers.failures",
    "LaunchError": "labs.workers.failures",
    "device": "labs.workers.devices",
    "machine": "labs.pictures.machine",
    "warm_up": "labs.workers.start",
    "guess": "labs.exercises",
}

__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"labs has no {name!r}; it offers {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted([*globals(), *_HOME])

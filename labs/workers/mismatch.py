"""Says in plain words what torch says when two ranks meet in different collectives."""

import re

_SIGN = "Detected mismatch between collectives"
_RUNNING = re.compile(r"Rank \d+ is running collective: CollectiveFingerPrint\((.*?)\)\)", re.S)
_NAMES = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "all_gather",
          "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "reduce_scatter",
          "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all"}


def own_call(message: str):
    """`broadcast with float [2] (#1)`: what the rank that got this message was calling; None if
    the message is about something else."""
    found = _RUNNING.search(message) if _SIGN in message else None
    return _call(found.group(1)) if found else None


def _call(fingerprint: str) -> str:
    number, op, shape, dtype = (_field(fingerprint, name) for name in
                                ("SequenceNumber", "OpType", "TensorShape", "TensorDtypes"))
    name = _NAMES.get(op, op.lower())
    tensor = f" with {dtype.lower()} {shape}" if shape else ""
    return f"{name}{tensor} (#{int(number) + 1})" if number.isdigit() else f"{name}{tensor}"


def _field(fingerprint, name):
    found = re.search(name + r"=(\[[^\]]*\]|[^,]*)", fingerprint)
    return found.group(1) if found else ""

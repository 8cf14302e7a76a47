"""torch's flight recorders: which collectives this rank has issued, and which have not finished.

NCCL has a recorder of its own (FlightRecorderCUDA, `_dump_nccl_trace`); gloo's is another one
(`_dump_fr_trace`), and a rank may use both. The functions are private, but the only way to learn,
while the main thread is blocked in C++, which collective it waits in.
"""

import os
import pickle
import re

RECORDED = 256  # collectives that each recorder keeps
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")  # a build without CUDA lacks the second
# NCCL's names of what the student calls: nccl:_all_gather_base, nccl:send 0->1
_BASE = re.compile(r"^_(\w+)_base$")
_NAMES = {"all_reduce_barrier": "barrier", "coalesced": "batch_isend_irecv",
          "ALLGATHER_coalesced": "all_gather", "REDUCE_SCATTER_coalesced": "reduce_scatter"}


def dumps(collectives: bool = True, only_active: bool = True) -> list[dict]:
    """Returns the present state of each recorder; empty dicts where torch has changed it."""
    return [_dump(function, collectives, only_active) for function in _functions()]


def _functions() -> list:
    from torch._C import _distributed_c10d as c10d

    return [function for name in _DUMPS if (function := getattr(c10d, name, None))]


def _dump(function, collectives, only_active) -> dict:
    stacks = False
    try:
        return pickle.loads(function(collectives, stacks, only_active))
    except Exception:
        return {}


def counts() -> tuple:
    """(recorder, group, issued, done) for each process group; empty where torch does not tell."""
    return tuple((number, name, status.get("last_enqueued_collective"),
                  status.get("last_completed_collective"))
                 for number, dump in enumerate(dumps(collectives=False))
                 for name, status in dump.get("pg_status", {}).items())


def oldest_pending() -> dict | None:
    """Returns the collective that a rank waits in, if it waits: of those that have not finished one
    that occupies the GPU, else one of the default group, else the oldest; or None. gloo records no
    messages between two ranks."""
    entries = [entry for function in _functions() for entry in _unfinished(function)]
    # record_id counts in one recorder only
    return min(entries, key=lambda entry: (not is_on_gpu(entry), entry.get("pg_id") != 0,
                                           entry.get("time_created_ns", 0), entry["record_id"]),
               default=None)


def _unfinished(function) -> list[dict]:
    """The entries of one recorder that have not finished. NCCL's operations inside a group, such as
    batch_isend_irecv's, never leave the state "scheduled": the group's own entry, after them, tells
    (ProcessGroupNCCL::collective and pointToPoint)."""
    active = [entry for entry in _dump(function, True, True).get("entries", ())
              if not entry.get("retired") and entry.get("state") != "completed"]
    if not any(_is_nccls(entry) and entry.get("state") == "scheduled" for entry in active):
        return active
    reached = {}  # kind of entry -> the last one whose kernel has at least started
    for entry in _dump(function, True, False).get("entries", ()):
        if entry.get("state") != "scheduled":
            reached[_kind(entry)] = max(entry["record_id"], reached.get(_kind(entry), -1))
    return [entry for entry in active if entry.get("state") != "scheduled"
            or entry["record_id"] > reached.get(_kind(entry), -1)]


def _kind(entry) -> tuple:
    return entry.get("pg_id"), entry.get("is_p2p")


def _is_nccls(entry) -> bool:
    return entry.get("profiling_name", "").startswith("nccl:")


def is_on_gpu(pending: dict | None) -> bool:
    """Whether a collective occupies the GPU, where it waits for the other ranks' kernels. Without
    TORCH_NCCL_ENABLE_TIMING no collective of NCCL ever counts as started; then each that has not
    finished may be on the GPU."""
    if pending is None or not _is_nccls(pending):
        return False
    return pending.get("state") == "started" or os.environ.get("TORCH_NCCL_ENABLE_TIMING") != "1"


def last_issued() -> int | None:
    """Returns how many collectives this rank has called in the default group, the most over its
    backends; None where that cannot be told. `pg_status` would count its messages to single ranks,
    too."""
    issued = [_last_of(dump.get("entries")) for dump in dumps(only_active=False)]
    return None if not issued or None in issued else max(issued)


def _last_of(entries) -> int | None:
    if entries is None:
        return None
    issued = [entry["collective_seq_id"] for entry in entries if entry.get("pg_id") == 0]
    # A ring buffer: when it is full, an empty selection may be due to entries that were
    # overwritten.
    has_forgotten = len(entries) >= RECORDED
    return max(issued, default=None if has_forgotten else 0)


def name(pending: dict) -> str:
    """Returns the collective's name as the student calls it: all_gather."""
    given = pending["profiling_name"].split(":")[-1].split(" ")[0]
    return _NAMES.get(given) or _BASE.sub(r"\1", given)


def number(pending: dict | None) -> int | None:
    """Returns its number in the default group, from 1; None for a message or another group."""
    if not pending or pending.get("pg_id") != 0 or pending.get("is_p2p"):
        return None
    return pending["collective_seq_id"]

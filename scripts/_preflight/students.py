"""How many students this machine serves at once."""

from _preflight import host
from _preflight.found import Found, note, ok
from labs.words import counted

GB = 10**9
MEMORY = 4 * GB  # of one student: a kernel and four ranks take up to 3, a server the rest
CORES = 2  # of one student: with one, ranks take turns and seconds say little


def at_once() -> Found:
    """How many notebooks can run at the same time, by memory and by cores."""
    from labs.workers.cores import available

    by = {"memory": int(host.available_memory() // MEMORY), "cores": available() // CORES}
    count, limit = min((count, limit) for limit, count in by.items())
    assumption = f"{MEMORY / GB:g} GB and {counted(CORES, 'core')} for each"
    data = {"by_memory": by["memory"], "by_cores": by["cores"], "memory_each": MEMORY,
            "cores_each": CORES}
    if not count:
        return note(f"none at {assumption}", f"One notebook runs, and is slow: it has too few "
                    f"{'cores' if limit == 'cores' else 'bytes of memory'} for its ranks.", **data)
    return ok(f"{count} at once, at {assumption}: memory is enough for {by['memory']}, cores for "
              f"{by['cores']}", **data)

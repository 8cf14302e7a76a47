"""How busy this machine is, and how many students it serves at the same time."""

import os

from _unattended import nvidia_smi
from _unattended.nvidia_smi import number

from _preflight import host
from _preflight.found import NOTE, Found, note, ok, worst
from labs.words import counted, listed

GB = 10**9
MEMORY = 4 * GB  # of one student: a kernel and four ranks take up to 3, a server the rest
CORES = 2  # of one student: with one, ranks take turns and seconds say little
BUSY = 0.5  # of the cores: a higher load makes measured seconds too long
BUSY_GPU = 10  # percent of the time


def load() -> Found:
    """The load average of the last minute against the number of cores, and how busy the GPUs
    are, by all programs of the machine."""
    asked, cores = os.getloadavg()[0], os.cpu_count() or 1
    value, problems = f"load average {asked:.1f} on {counted(cores, 'core')}", []
    if asked > BUSY * cores:
        problems.append((NOTE, "What is timed now is too long, bytes and checks are right: end "
                               "other programs (top names them), or wait."))
    use = _use_of_gpus()
    busy = [index for index, percent in use.items() if percent > BUSY_GPU]
    if use:
        value += f"; {len(busy)} of {counted(len(use), 'GPU')} busy"
    if busy:
        said = listed(f"GPU {index} ({use[index]:.0f} %)" for index in busy)
        problems.append((NOTE, f"Somebody computes on {said}: nvidia-smi names the programs."))
    return worst(value, problems, load=asked, cores=cores, gpu_percent=use)


def _use_of_gpus() -> dict[str, float]:
    """GPU -> percent of the last second or so in which a kernel ran on it."""
    if not nvidia_smi.is_there():
        return {}
    asked = nvidia_smi.query("index", "utilization.gpu")
    pairs = zip(asked.get("index", ()), asked.get("utilization.gpu", ()), strict=False)
    return {index: number(cell) or 0.0 for index, cell in pairs}


def at_once() -> Found:
    """How many notebooks can run at the same time, by memory, by cores, and by GPUs where there
    are some."""
    from labs.workers.cores import available

    by = {"memory": int(host.available_memory() // MEMORY), "cores": available() // CORES}
    each = f"{MEMORY / GB:g} GB and {counted(CORES, 'core')}"
    if gpus := len(_use_of_gpus()):
        by["GPUs"], each = gpus, f"{MEMORY / GB:g} GB, {counted(CORES, 'core')} and a GPU"
    count = min(by.values())
    enough = ", ".join(f"{what} for {most}" for what, most in by.items())
    data = {"at_once": count, "by": by, "memory_each": MEMORY, "cores_each": CORES}
    if not count:
        return note(f"0 at once, if each has {each}: {enough}",
                    "One student can work here, and waits longer than the minutes that notebooks "
                    "name.", **data)
    return ok(f"{count} at once, if each has {each}: {enough}"
              + ("; scripts/turn lets more take turns" if gpus else ""), **data)

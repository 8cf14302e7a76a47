"""Into what a node is divided: its GPUs, and its cores alongside."""

import contextlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _unattended import nvidia_smi

from labs.words import counted

WITHOUT_GPUS = 8  # shares at most, of a machine that has cores alone
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class Node:
    """gpus: as CUDA_VISIBLE_DEVICES names them, none on a machine without; cores: their numbers."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """The shares' names: "gpu-0", or "cores-0" on a machine without GPUs."""
        if self.gpus:
            return [f"gpu-{gpu}" for gpu in self.gpus]
        return [f"cores-{index}" for index in range(min(WITHOUT_GPUS, len(self.cores)))]

    def in_words(self, count: int) -> str:
        """So many shares: "2 GPUs", "1 share of the cores"."""
        return counted(count, "GPU") if self.gpus else f"{counted(count, 'share')} of the cores"

    def cores_of(self, names: Sequence[str]) -> set[int]:
        """The cores of these shares: as large a part of all cores as the shares are of all. The
        two threads of a physical core stay together, so that no student slows another one down."""
        physical: dict[str, list[int]] = {}
        for core in self.cores:
            physical.setdefault(_siblings(core), []).append(core)
        groups, count = list(physical.values()), len(self.names)
        if len(groups) < count:
            groups = [[core] for core in self.cores]
        found = set()
        for index in map(self.names.index, names):
            low, high = (len(groups) * end // count for end in (index, index + 1))
            # With fewer cores than GPUs, several shares have the same core.
            found.update(*groups[low:max(high, low + 1)])
        return found

    def variables(self, names: Sequence[str]) -> dict[str, str]:
        """The environment of a process that is to use these shares."""
        cores = {"CPU_LIMIT": str(len(self.cores_of(names)))}  # where there is no affinity
        if not self.gpus:
            return cores
        # The order of nvidia-smi: CUDA's own is by speed.
        return cores | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(
            name.removeprefix("gpu-") for name in names)}


def node() -> Node:
    """This machine, or what CUDA_VISIBLE_DEVICES and the process's affinity leave of it."""
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = range(os.cpu_count() or 1)
    return Node(tuple(_gpus()), tuple(cores))


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [each.strip() for each in visible.split(",") if each.strip() not in ("", "-1")]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return nvidia_smi.query("index").get("index", []) if nvidia_smi.is_there() else []
    return []


def used_memory(names: Sequence[str]) -> int:
    """Bytes in use on the GPU of these shares that has most of them in use; 0 where nothing
    tells."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        found = nvidia_smi.query("index", "memory.used")
        used = dict(zip(found.get("index", ()), found.get("memory.used", ()), strict=False))
        own = [int(used[index]) for name in names
               if (index := name.removeprefix("gpu-")) in used]
        return max(own, default=0) << 20
    return 0


def _siblings(core) -> str:
    try:
        return Path(_SIBLINGS.format(core)).read_text().strip()
    except OSError:
        return str(core)

"""Draws this machine: its cores, memory, GPUs and links, and where a launch puts its ranks."""

import re
import subprocess
import textwrap
from collections import Counter
from dataclasses import dataclass

import psutil

from labs.pictures import palette
from labs.pictures.in_scripts import print_in_script
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import box, chip, sheet, write
from labs.words import counted
from labs.workers import cuda, devices, launcher, processes

GIB = 2**30
DRAWN = 40  # at most so many cores are drawn one by one


@dataclass(frozen=True)
class Facts:
    """What a machine has. memory: bytes. gpus: (name, bytes) of each. links: kind, as
    `nvidia-smi topo -m` names it -> pairs of GPUs. plan: where a launch without options runs."""

    cores: int
    memory: int
    gpus: list[tuple[str, int]]
    links: dict[str, int]
    plan: devices.Plan


class Machine(Picture):
    """The drawing; data holds its Facts."""

    @property
    def ranks(self) -> int:
        """How many ranks `launch` runs by itself."""
        return self.data.plan.ranks


def machine() -> Machine:
    """Draws this machine. Meanwhile the fork server starts and imports torch in the background."""
    processes.warm_up()
    drawn = draw(inspect_machine())
    launcher.has_been_told(drawn.data.plan.reason)
    return print_in_script(drawn)


def inspect_machine() -> Facts:
    """What this machine has. Makes no CUDA context."""
    found = cuda.count()
    gpus = parse_gpus(_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))
    # nvidia-smi lists all GPUs of the machine, or is missing; torch sees those that it may use.
    gpus = (gpus + [("GPU", 0)] * found)[:found]
    links = parse_links(_smi("topo", "-m"), found) if found > 1 else {}
    return Facts(devices.cores(), psutil.virtual_memory().total, gpus, links, devices.plan())


def parse_gpus(table: str) -> list[tuple[str, int]]:
    """(name, bytes) of each GPU from nvidia-smi's name and memory.total, which is in MiB."""
    rows = [line.rsplit(",", 1) for line in table.splitlines() if "," in line]
    return [(name.strip().removeprefix("NVIDIA "), int(mib) * 2**20)
            for name, mib in rows if mib.strip().isdigit()]


def parse_links(topology: str, gpus: int) -> dict[str, int]:
    """How many pairs of GPUs are joined by each kind of link, from `nvidia-smi topo -m`."""
    rows = re.findall(r"^GPU(\d+)\s+(.*)", topology, flags=re.M)
    return dict(Counter(kind for number, row in rows if int(number) < gpus
                        for kind in row.split()[int(number) + 1 : gpus]))


def link_words(links: dict[str, int]) -> str:
    """`12 NVLinks between every pair`, or how many pairs have what."""
    def name(kind):
        if kind.startswith("NV"):
            return f"{kind[2:]} NVLinks"
        return "PCIe" if kind in ("PIX", "PXB", "PHB") else "PCIe and the CPUs' link"

    if len(links) == 1:
        return f"{name(*links)} between every pair of GPUs"
    return ", ".join(f"{name(kind)}: {pairs} pairs" for kind, pairs in links.items())


def draw(facts: Facts) -> Machine:
    """The picture of a machine."""
    rows = -(-min(facts.cores, DRAWN) // 10)
    reason = textwrap.wrap(_sentence(facts), 106)
    gpus = (1.6 if facts.links else 1.25) if facts.gpus else 0
    figure, ax = sheet(WIDTH, 0.75 + 0.28 * rows + gpus + 0.22 * len(reason))
    bottom = _draw_cpu(ax, facts, rows)
    if facts.gpus:
        bottom = _draw_gpus(ax, facts, bottom + 0.2)
    for number, line in enumerate(reason):
        write(ax, 0.12, bottom + 0.24 + 0.22 * number, line)
    return Machine(figure, _in_words(facts), data=facts)


def _sentence(facts) -> str:
    reason = facts.plan.reason
    return (f"A launch starts {facts.plan.ranks} ranks here unless you ask for another number. "
            f"{reason[0].upper()}{reason[1:]}.")


def _in_words(facts) -> str:
    lines = [f"{counted(facts.cores, 'CPU core')}, {facts.memory / GIB:.0f} GiB memory"]
    lines += [f"GPU {number}: {name}, {memory / GIB:.0f} GiB"
              for number, (name, memory) in enumerate(facts.gpus)] or ["no GPU"]
    lines += [link_words(facts.links)] if facts.links else []
    return "\n".join([*lines, _sentence(facts)])


def _draw_cpu(ax, facts, rows) -> float:
    """Cores, memory and the ranks on the CPU; returns where the box ends, in inches."""
    height = 0.5 + 0.28 * rows
    box(ax, 0.1, 0.08, WIDTH - 0.2, height, [palette.SURFACE], edge=palette.BORDER)
    more = f" ({DRAWN} drawn)" if facts.cores > DRAWN else ""
    write(ax, 0.28, 0.3, f"{counted(facts.cores, 'CPU core')}{more}", size=11,
          weight="bold")
    _squares(ax, 0.28, min(facts.cores, DRAWN), 10)
    on_cpu = [r for r, device in enumerate(facts.plan.devices) if device == "cpu"]
    across, block = (8, 8) if on_cpu else (18, 8)
    # A square is so many GiB that all squares fit.
    while facts.memory / GIB / block > across * rows:
        block *= 2
    write(ax, 3.2, 0.3, f"{facts.memory / GIB:.0f} GiB memory", size=11, weight="bold")
    box(ax, 4.76, 0.225, 0.17, 0.17, [palette.MACHINE["memory"]])
    write(ax, 4.98, 0.31, f"{block} GiB", size=9, colour=palette.MUTED)
    _squares(ax, 3.2, round(facts.memory / GIB / block) or 1, across,
             palette.MACHINE["memory"])
    if on_cpu:
        write(ax, 5.62, 0.3, "ranks of a launch", size=11, weight="bold")
    for place, rank in enumerate(on_cpu):
        chip(ax, 5.95 + place * 0.72, 0.6, rank)
    return 0.08 + height


def _squares(ax, x, count, across, colour=palette.MACHINE["core"]):
    for number in range(count):
        box(ax, x + number % across * 0.28, 0.48 + number // across * 0.28, 0.23, 0.23, [colour])


def _draw_gpus(ax, facts, top) -> float:
    """The GPUs with their ranks, and their links; returns where the last box ends, in inches."""
    count = len(facts.gpus)
    width = min(2.2, (WIDTH - 0.2 - 0.12 * (count - 1)) / count)
    for number, (name, memory) in enumerate(facts.gpus):
        x = 0.1 + number * (width + 0.12)
        box(ax, x, top, width, 1.05, [palette.MACHINE["GPU"]], edge=palette.MACHINE["link"])
        short = name.split("-")[0] if width < 1.3 else name
        write(ax, x + width / 2, top + 0.2, short, size=9.5, weight="bold", ha="center")
        write(ax, x + width / 2, top + 0.44, f"{memory / GIB:.0f} GiB", size=9.5, ha="center")
        here = [r for r, d in enumerate(facts.plan.devices) if d in ("cuda", f"cuda:{number}")]
        for place, rank in enumerate(here):
            chip(ax, x + width / 2 + (place - (len(here) - 1) / 2) * 0.72, top + 0.8, rank)
    if not facts.links:
        return top + 1.05
    room = count * (width + 0.12) - 0.12
    box(ax, 0.1, top + 1.14, room, 0.24, [palette.MACHINE["link"]])
    write(ax, 0.1 + room / 2, top + 1.26, link_words(facts.links), size=9.5, colour="white",
          weight="bold", ha="center")
    return top + 1.4


def _smi(*arguments) -> str:
    """What nvidia-smi prints, or nothing where there is none."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                              timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # topo underlines its heading

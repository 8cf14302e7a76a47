"""What was measured between two hosts: now, on this machine, or as it was recorded on one that can
have hosts. `python -m labs.scaling.link_recordings` writes the recording again."""

import datetime
import json
import platform
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labs.predictions.communication.host_links import Topology
from labs.scaling import link_runs
from labs.scaling.link_collectives import Counted, Timed
from labs.words import counted
from labs.workers.hosts import hosts_unavailable

RECORDING = Path(__file__).resolve().parents[2] / "experiments/reference/two_hosts.json"
NOT_HERE = "Recorded, not measured here"
NOTE_WIDTH = 105  # characters of a line below a chart


@dataclass(frozen=True)
class LinkRun:
    """What was measured between hosts. note: where it was recorded and why; empty if it was
    measured here."""

    topology: Topology
    timed: list[Timed]
    counted: list[Counted]
    note: str = ""

    def __repr__(self):
        found = {"time": len(self.timed), "byte count": len(self.counted)}
        counts = " and ".join(counted(number, what) for what, number in found.items() if number)
        return "\n".join(filter(None, [
            f"{self.topology.hosts} hosts with {self.topology.ranks} ranks each: {counts}",
            self.note]))

    def seconds(self, what: str, bandwidth: str, size: int | None = None) -> float:
        """The fastest round of what was timed under this name, on this link."""
        return next(one.seconds for one in self.timed if (one.what, one.bandwidth) == (
            what, bandwidth) and size in (None, one.size))

    def sent(self, what: str) -> int:
        """Bytes that host 0 sent; for "…, resident" the bytes that a rank keeps."""
        return next(one.sent for one in self.counted if one.what == what)


@dataclass(frozen=True)
class JobRun:
    """A job that ran on several hosts. output: by host; sent: bytes, by host. note: as of
    `LinkRun`."""

    command: str
    output: list[str]
    exit_codes: list[int]
    sent: list[int]
    seconds: float
    note: str = ""

    def __repr__(self):
        lines = [f"`{self.command}` ran for {self.seconds:.1f} s"]
        lines += [f"host {host}: exit code {code}, {sent / 1e6:.2f} MB sent over its link"
                  for host, (code, sent) in enumerate(zip(self.exit_codes, self.sent,
                                                          strict=True))]
        if self.note:  # what ran here has printed its lines already
            lines[:0] = [f"host {host} │ {line}" for host, text in enumerate(self.output)
                         for line in text.splitlines()]
        return "\n".join([*lines, *filter(None, [self.note])])


def measured_or_recorded(name: str, measure: Callable[[], dict]) -> dict:
    """What `measure()` returns; on a machine that cannot have hosts the recording of this name,
    with a `note` that says so and why."""
    refusal = hosts_unavailable()
    if refusal is None:
        return measure()
    recorded = json.loads(RECORDING.read_text(encoding="utf-8"))
    note = f"{NOT_HERE}: {recorded['made']}. {refusal}"
    return {**recorded["runs"][name], "note": textwrap.fill(note, NOTE_WIDTH)}


def link_run(found: dict) -> LinkRun:
    """The result of measure_all_reduces, measure_hierarchical or measure_strategies."""
    return LinkRun(link_runs.TOPOLOGY, [Timed(**one) for one in found["timed"]],
                   [Counted(**one) for one in found["counted"]], found.get("note", ""))


def write_recording(runs: dict[str, dict], path: Path = RECORDING) -> None:
    """Writes runs by name, with the day, the machine and the versions."""
    import psutil
    import torch

    kernel = platform.release().split("-")[0]
    made = (f"{datetime.date.today()}, {psutil.cpu_count()} cores, Linux {kernel}, "
            f"Python {platform.python_version()}, torch {torch.__version__}")
    path.write_text(json.dumps({"made": made, "command": "python -m labs.scaling.link_recordings",
                                "runs": runs}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measures all runs with the worked answers of the notebook, and writes them."""
    import tempfile

    from labs.checks.previous_work import ROOT, definitions
    from labs.checks.scripts.files import write_script

    with tempfile.TemporaryDirectory() as folder:
        write_recording(link_runs.all_runs(definitions(ROOT / "solutions/06_scaling.py"),
                                           write_script("train.py", folder)))


if __name__ == "__main__":
    main()

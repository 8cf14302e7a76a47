"""What this session's checks and pictures have shown, sorted for the record; the machine and the
versions, and the name of the record's folder."""

import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from labs.checks import guesses, records
from labs.checks.verdicts import Verdict
from labs.meters.metrics import Metric
from labs.meters.trace import Trace
from labs.pictures.machine import inspect_machine
from labs.pictures.picture import Picture
from labs.scaling.link_recordings import NOT_HERE
from labs.workers import cuda

_BYTES = re.compile(r"[kKMGT]?i?B|bytes")
_SECONDS = re.compile(r"[mµn]?s|.+/s")
# Bytes of a metric whose name has one of these were sent, the others were held.
_SENT = re.compile(r"link|sent|wire|traffic|all.?(reduce|gather|to.all)|reduce.scatter|collective",
                   re.IGNORECASE)
_EFFICIENCY = re.compile(r"efficien|MFU|HFU|speed-?up|utili[sz]ation", re.IGNORECASE)
TOPICS = {"efficiency": "Efficiency", "throughput": "Throughput and seconds", "memory": "Memory",
          "traffic": "Traffic", "other": "Other numbers"}
NEEDED = {"efficiency": "the pictures of *Scaling efficiency* and *Scaling overhead* show it",
          "throughput": "the pictures of *Scaling efficiency* and *Training on two hosts* show it",
          "memory": "the pictures of HSDP and of Accelerate show it"}


@dataclass(frozen=True)
class Row:
    """A measured number with the exercise that it belongs to. recorded: it is of a recording that
    came with the workbook, because this machine cannot have hosts."""

    exercise: str
    metric: Metric
    recorded: bool = False

    @property
    def topic(self) -> str:
        """A key of TOPICS."""
        name, unit = self.metric.name, self.metric.unit
        # By name and unit alone, because numbers come from all notebooks' pictures.
        if unit in ("", "%") and _EFFICIENCY.search(name):
            return "efficiency"
        if unit == "Ψ" or _BYTES.fullmatch(unit):
            return "traffic" if unit == "Ψ" or _SENT.search(name) else "memory"
        return "throughput" if _SECONDS.fullmatch(unit) else "other"


@dataclass(frozen=True)
class Session:
    """results: of checks and pictures, the oldest first. guesses: (exercise, question, guess)."""

    results: list[records.Result]
    guesses: list[tuple[str, str, float]]

    @classmethod
    def now(cls) -> "Session":
        """What has been shown until now."""
        return cls(records.kept(), guesses.all_guesses())

    @property
    def rows(self) -> list[Row]:
        """All measured numbers."""
        return [Row(result.exercise, metric, NOT_HERE in str(result.found))
                for result in self.results for metric in records.metrics_of(result.found)]

    def of_topic(self, topic: str) -> list[Row]:
        """The measured numbers of a topic."""
        return [row for row in self.rows if row.topic == topic]

    @property
    def verdicts(self) -> list[records.Result]:
        """The last verdict of each exercise, by number."""
        found = [result for result in self.results if isinstance(result.found, Verdict)]
        return sorted(found, key=lambda result: _number(result.exercise))

    @property
    def pictures(self) -> list[records.Result]:
        """What can be saved as a PNG."""
        return [result for result in self.results if isinstance(result.found, Picture)]

    @property
    def texts(self) -> list[records.Result]:
        """What else was shown, such as tables and runs, of which the words are kept."""
        return [result for result in self.results
                if not isinstance(result.found, Verdict | Picture)]

    @property
    def traces(self) -> list[Path]:
        """The files of the traces that were shown, as far as they are still there."""
        found = dict.fromkeys(Path(trace.path) for result in self.results
                              for trace in _traces_in(result.found) if trace.path)
        return [path for path in found if path.is_file()]

    @property
    def missing(self) -> list[str]:
        """The topics without a number."""
        return [topic for topic in NEEDED if all(row.recorded for row in self.of_topic(topic))]

    def as_data(self) -> dict[str, Any]:
        """All numbers, verdicts and guesses, for JSON."""
        return {"numbers": [{"topic": row.topic, "exercise": row.exercise, "recorded": row.recorded,
                             **asdict(row.metric)}
                            for row in self.rows],
                "verdicts": [{"exercise": one.exercise, "passed": one.found.passed,
                              "text": str(one.found)} for one in self.verdicts],
                "guesses": [{"exercise": exercise, "question": question, "guess": value}
                            for exercise, question, value in self.guesses],
                "shown": [{"exercise": one.exercise, "function": one.function,
                           "seconds": round(one.seconds, 3)} for one in self.results]}


def _number(exercise: str) -> tuple:
    """6.10 comes after 6.9."""
    return tuple(int(part) for part in re.findall(r"\d+", exercise)), exercise


def _traces_in(found: Any, depth: int = 3) -> Iterator[Trace]:
    """The traces in a result: itself, or in lists, dictionaries and attributes of it."""
    if isinstance(found, Trace):
        yield found
    elif depth:
        inside = [*found.values()] if isinstance(found, Mapping) else (
            [*found] if isinstance(found, list | tuple) else [])
        inside += [value for value in getattr(found, "__dict__", {}).values()
                   if isinstance(value, list | tuple | Mapping | Trace)]
        for each in inside:
            yield from _traces_in(each, depth - 1)


_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "numpy")


def facts(root: Path) -> dict[str, object]:
    """Cores, bytes of memory, GPUs, ranks of a launch, system, versions, and the commit of root."""
    found = inspect_machine()
    return {"cores": found.cores, "memory": found.memory,
            "gpus": [{"name": name, "bytes": nbytes} for name, nbytes in found.gpus],
            "ranks": found.plan.ranks, "backend": found.plan.library,
            "system": platform.platform(), "versions": versions(), "commit": commit(root)}


def versions() -> dict[str, str]:
    """Name -> version, of what is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if cuda.count():
        found["nccl"] = ".".join(map(str, cuda.nccl_version()))
    return found


def commit(root: Path) -> str:
    """The commit in short, with "-dirty" where files have changed; "unknown" without git."""
    try:
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"],
                              capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def title(found: dict) -> str:
    """"8x NVIDIA A100-SXM4-80GB", or "2 cores, no GPU"."""
    names = [gpu["name"] for gpu in found["gpus"]]
    if not names:
        return f"{found['cores']} cores, no GPU"
    return f"{len(names)}x {names[0]}" if len(names) > 1 else names[0]


def folder_name(found: dict) -> str:
    """"laptop" without a GPU, else the GPUs, as scripts/solutions names its folders."""
    if not found["gpus"]:
        return "laptop"
    return re.sub(r"[^\w.-]+", "-", title(found).replace("NVIDIA ", ""))

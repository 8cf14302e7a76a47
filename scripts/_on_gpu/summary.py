"""summary.md: on one page what agreed, what did not, predicted against measured, and times."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from _on_gpu import machine
from _on_gpu.runner import FAILED, INTERRUPTED, PASSED, SKIPPED, TIMED_OUT

READ = ("one_rank.json", "bench_memory.json", "faults.json", "gpu_tests.xml")  # of the parts
AGREES = 5.0  # per cent between predicted and measured
GB = 1e9
_WRONG = re.compile(r"^✗ .*$", re.M)  # of an exercise, or of a picture that could not be made


def page(data: dict, out: Path) -> str:
    """Returns the summary of results.json and of what the parts have written into `out`."""
    found = data["machine"]
    gigabytes = found["gpus"][0]["bytes"] / GB
    versions = (f"torch {found['torch']}, CUDA {found['cuda']}, Python {found['python']}, "
                f"transformers {found['transformers']}")
    lines = [f"# {machine.title(found)}, {data['date']}", "",
             f"{gigabytes:.1f} GB per GPU; {versions}; commit {data['commit']}. "
             f"{data['seconds'] / 60:.1f} of {data['minutes_allowed']:g} minutes."
             + " **Small sizes: only to try the command.**" * data["small"], "",
             *_verdict(data), "", "| part | outcome | seconds | remark |", "|---|---|---:|---|"]
    lines += [f"| {part['name']} | {part['outcome']} | {part['seconds']:.0f} | "
              f"{_remark(part, out)} |" for part in data["parts"]]
    for section in (_one_rank, _bench, _faults, _tests, _exercises):
        lines += section(out, data["parts"])
    return "\n".join(lines) + "\n"


def _verdict(data) -> list[str]:
    counts = {outcome: [part["name"] for part in data["parts"] if part["outcome"] == outcome]
              for outcome in (PASSED, FAILED, TIMED_OUT, INTERRUPTED, SKIPPED)}
    said = [f"{len(names)} {outcome}" + (f" ({', '.join(names)})" if outcome != PASSED else "")
            for outcome, names in counts.items() if names]
    return [f"**{'; '.join(said)}.**"]


def _remark(part, out) -> str:
    words = [part["why"].replace("|", "\\|")] if part["why"] else []
    if part["left"]:
        words.append(f"**{part['left']:.0f} MiB left on a GPU**")
    if part["outcome"] in (FAILED, TIMED_OUT) and (out / f"{part['name']}.log").exists():
        words.append(f"[log]({part['name']}.log)")
    return "; ".join(words)


def _read(path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _one_rank(out, parts) -> list[str]:
    data = _read(out / "one_rank.json")
    if not data:
        return []
    lines = ["", f"## One rank of {data['ranks']}: GB at the peak of a step", "",
             "| model and recipe | predicted | measured | off | step |",
             "|---|---:|---:|---:|---:|"]
    for row in data["rows"]:
        if row.get("error"):
            lines.append(f"| {row['case']} | {_gb(row['predicted_bytes'])} | "
                         f"{row['error']} | | |")
        elif not row["fits"]:
            lines.append(f"| {row['case']} | {_gb(row['predicted_bytes'])} | does not fit "
                         f"{data['card_bytes'] / GB:.1f} GB | | |")
        else:
            lines.append(f"| {row['case']} | {_gb(row['predicted_bytes'])} | "
                         f"{_gb(row['measured_bytes'])} | {_off(row['off_pct'])} | "
                         f"{row['seconds']:.3f} s |")
    return lines


def _gb(nbytes) -> str:
    return "–" if nbytes is None else f"{nbytes / GB:.3f}"


def _off(percent) -> str:
    text = f"{percent:+.1f} %"
    return text if abs(percent) <= AGREES else f"**{text}**"


def _bench(out, parts) -> list[str]:
    data = _read(out / "bench_memory.json")
    if not data:
        return []
    lines = ["", f"## Memory bench on CUDA, {data['cases']} cases: predicted against measured", "",
             "| method | cases | mean off | worst |", "|---|---:|---:|---:|"]
    for name, row in data["methods"].items():
        if row["cases"]:
            lines.append(f"| {name} | {row['cases']} | {row['mean_pct']:.1f} % | "
                         f"{row['worst_pct']:.1f} % |")
    far = [row for row in data["residuals"] if row["method"] == "dry run"][:3]
    return lines + [f"- dry run, {row['case']}: {row['off_pct']:+.1f} %" for row in far]


def _faults(out, parts) -> list[str]:
    data = _read(out / "faults.json")
    if not data:
        return []
    tried = [row for row in data["rows"] if "wrong" in row]
    wrong = [row for row in tried if row["wrong"]]
    lines = ["", f"## The launcher's faults over {data['backend']}: {len(tried) - len(wrong)} of "
             f"{len(tried)} as they should be", ""]
    lines += [f"- **{row['fault']}**: {'; '.join(row['wrong'])}" for row in wrong]
    return lines + [f"- {row['fault']}: not tried, {row['skipped']}"
                    for row in data["rows"] if row.get("skipped")]


def _tests(out, parts) -> list[str]:
    try:
        cases = list(ElementTree.parse(out / "gpu_tests.xml").getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []
    def named(*tags):
        return [f"{case.get('classname')}.{case.get('name')}" for case in cases
                if any(case.find(tag) is not None for tag in tags)]
    failed, skipped = named("failure", "error"), named("skipped")
    return ["", f"## Tests marked gpu: {len(cases) - len(failed) - len(skipped)} passed, "
            f"{len(failed)} failed, {len(skipped)} skipped", "",
            *(f"- **{name}**" for name in failed)]


def _exercises(out, parts) -> list[str]:
    """The checks that rejected the worked solution on this machine, and what else went wrong."""
    logs = [(part["name"], out / f"{part['name']}.log") for part in parts
            if re.match(r"\d\d_", part["name"])]
    found = [f"- {name}: {line.strip()[:200]}" for name, log in logs if log.exists()
             for line in _WRONG.findall(log.read_text(errors="replace"))]
    return ["", "## What the solutions say is wrong here", "", *found] if found else []

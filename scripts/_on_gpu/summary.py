"""summary.md: on one page what agreed, what did not, predicted against measured, and times."""

import contextlib
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import _notebooks
from _unattended import machine
from _unattended.runner import FAILED, INTERRUPTED, PASSED, SKIPPED, TIMED_OUT

from labs.predictions import hardware

TESTS = {"gpu_tests.xml": "Tests marked gpu", "long_gpu_tests.xml": "Long tests marked gpu"}
READ = ("one_rank.json", "rates.json", "bench_memory.json", "faults.json", *TESTS)  # of the parts
AGREES = 5.0  # per cent between predicted and measured
GB = 1e9
SMALL = "Nothing is judged: the workspaces are larger than the small models."
# Of an exercise, or of a picture that could not be made; ○: it could not be judged.
_WRONG = re.compile(r"^(?:✗|○) .*$", re.M)


def page(data: dict, out: Path) -> str:
    """Returns the summary of results.json and of what the parts have written into `out`."""
    found = data["machine"]
    gigabytes = found["gpus"][0]["bytes"] / GB
    versions = (f"torch {found['torch']}, CUDA {found['cuda']}, Python {found['python']}, "
                f"transformers {found['transformers']}")
    lines = [f"# {machine.title(found)}, {data['date']}", "",
             f"{gigabytes:.1f} GB per GPU; {versions}; commit {data['commit']}. "
             f"{data['seconds'] / 60:.1f} of {data['minutes_allowed']:g} minutes."
             + " **Small sizes and few cases, only to try the command: nothing here is a result.**"
             * data["small"], "",
             *_verdict(data), "", "| part | outcome | seconds | remark |", "|---|---|---:|---|"]
    lines += [f"| {part['name']} | {part['outcome']} | {part['seconds']:.0f} | "
              f"{_remark(part, out)} |" for part in data["parts"]]
    for section in (_one_rank, _rates, _bench, _faults, _tests, _exercises):
        try:
            lines += section(out, data)
        except Exception as error:  # a part may have written anything, and the others still count
            title = section.__name__.strip("_").replace("_", " ")
            lines += ["", f"## {title}", "", f"**Cannot be read: {type(error).__name__}: {error}**"]
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


def _one_rank(out, data) -> list[str]:
    found = _read(out / "one_rank.json")
    if not found:
        return []
    lines = ["", f"## One rank of {found['ranks']}: GB at the peak of a step", "",
             "| model and recipe | predicted | measured | off | reserved | step |",
             "|---|---:|---:|---:|---:|---:|"]
    lines += [f"| {row['case']} | {_gb(row['predicted_bytes'])} | "
              f"{_measured(row, found['card_bytes'], data['small'])} |" for row in found["rows"]]
    by_the_cpus = [row["case"] for row in found["rows"] if row.get("operators") == "cpu"]
    return [*lines, "",
            f"Predicted: a dry run, and {_gb(found['workspace_bytes'])} GB of cuBLAS's workspaces. "
            "Measured: torch.cuda.max_memory_allocated of the second step; reserved: what the "
            "allocator had taken from the driver by then. "
            + (SMALL if data["small"] else f"Bold: more than {AGREES:g} % off.")
            + f" Predicted with the CPU's operators: {'; '.join(by_the_cpus)}." * bool(by_the_cpus)]


def _measured(row, card, small) -> str:
    """The last four cells of a row."""
    if row.get("error"):
        return f"{row['error']} | | |"
    if not row["fits"]:
        return f"does not fit {card / GB:.1f} GB | | |"
    off = f"{row['off_pct']:+.1f} %" if small else _off(row["off_pct"])
    return (f"{_gb(row['measured_bytes'])} | {off} | {_gb(row.get('reserved'))} | "
            f"{row['seconds']:.3f} s")


def _gb(nbytes) -> str:
    return "–" if nbytes is None else f"{nbytes / GB:.3f}"


def _off(percent) -> str:
    text = f"{percent:+.1f} %"
    return text if abs(percent) <= AGREES else f"**{text}**"


def _rates(out, data) -> list[str]:
    found = _read(out / "rates.json")
    if not found:
        return []
    card = data["machine"]["gpus"][0]
    sheet = hardware.recognised(card["name"], card["bytes"])
    products = {name: value[1] for name, value in found.items() if isinstance(value, list)}
    bf16 = max(rate for name, rate in products.items() if "bfloat16" in name)
    copied = found["copy, read+written GB/s"]
    lines = ["", f"## Rates, and the data sheet of {sheet.name}", "",
             "| | measured | data sheet | |", "|---|---:|---:|---:|",
             _rate("bf16 products, TFLOP/s", bf16, sheet.flops / 1e12),
             _rate("memory, GB/s", copied, sheet.bandwidth / GB)]
    return lines + [f"| {name} | {value:.4g} | | |" for name, value in found.items()
                    if name not in products and not name.startswith(("copy", "add"))]


def _rate(name, measured, sheet) -> str:
    return f"| {name} | {measured:.0f} | {sheet:.0f} | {measured / sheet:.0%} |"


def _bench(out, data) -> list[str]:
    found = _read(out / "bench_memory.json")
    if not found:
        return []
    lines = ["", f"## Memory bench on CUDA, {found['cases']} cases: predicted against measured", "",
             "| method | cases | mean off | worst |", "|---|---:|---:|---:|"]
    for name, row in found["methods"].items():
        if row["cases"]:
            lines.append(f"| {name} | {row['cases']} | {row['mean_pct']:.1f} % | "
                         f"{row['worst_pct']:.1f} % |")
    far = [row for row in found["residuals"] if row["method"] == "dry run"][:3]
    furthest = "; ".join(f"{row['case']} {row['off_pct']:+.1f} %" for row in far)
    return [*lines, "", f"Ours: dry run and recording. The dry run's furthest off: {furthest}."]


def _faults(out, data) -> list[str]:
    found = _read(out / "faults.json")
    if not found:
        return []
    tried = [row for row in found["rows"] if "wrong" in row]
    wrong = [row for row in tried if row["wrong"]]
    lines = ["", f"## The launcher's faults over {found['backend']}: {len(tried) - len(wrong)} of "
             f"{len(tried)} as they should be", ""]
    if "nccl" not in found["backend"]:
        lines += ["Ranks shared a GPU, so NCCL was not tried: it needs one for each rank.", ""]
    lines += [f"- **{row['fault']}**: {'; '.join(row['wrong'])}" for row in wrong]
    return lines + [f"- {row['fault']}: not tried, {row['skipped']}"
                    for row in found["rows"] if row.get("skipped")]


def _tests(out, data) -> list[str]:
    lines = []
    for file, title in TESTS.items():
        with contextlib.suppress(OSError, ElementTree.ParseError):
            lines += _cases(title, ElementTree.parse(out / file).getroot().iter("testcase"))
    return lines


def _cases(title, found) -> list[str]:
    cases = list(found)

    def named(*tags):
        return [f"{case.get('classname') or ''}.{case.get('name')}".strip(".") for case in cases
                if any(case.find(tag) is not None for tag in tags)]

    failed, skipped = named("failure", "error"), named("skipped")
    return ["", f"## {title}: {len(cases) - len(failed) - len(skipped)} passed, "
            f"{len(failed)} failed, {len(skipped)} skipped", "",
            *(f"- **{name}**" for name in dict.fromkeys(failed))]


def _exercises(out, data) -> list[str]:
    """The checks that rejected the worked solution on this machine, and what else went wrong."""
    logs = [(part["name"], out / f"{part['name']}.log") for part in data["parts"]
            if _notebooks.number(part["name"])]
    found = [f"- {name}: {line.strip()[:200]}" for name, log in logs if log.exists()
             for line in _WRONG.findall(log.read_text(errors="replace"))]
    title = "## What the solutions say is wrong here (✗), or cannot be judged (○)"
    return ["", title, "", *found] if found else []

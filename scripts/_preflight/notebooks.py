"""Which notebooks run on this machine, and for how long: from the reference run of its kind."""

from pathlib import Path

import _notebooks
from _on_gpu import parts
from _unattended import machine, nvidia_smi, reference

from _preflight import host
from _preflight.found import NOTE, Found, ok, worst
from labs.predictions.cost.prices import node_dollars
from labs.words import counted, listed

ROOT = Path(__file__).resolve().parents[2]
GB = 1e9


def running(root: Path = ROOT) -> Found:
    """The notebooks, each with its minutes and with the memory that its run took."""
    names = [path.stem for path in _notebooks.paths(root / "notebooks", ".ipynb")]
    cards = nvidia_smi.query("name").get("name", []) if nvidia_smi.is_there() else []
    found = {"gpus": [{"name": card} for card in cards]}
    found["title"] = machine.title(found) if cards else "no GPU"
    run = reference.of_machine(found, root)
    return _measured(names, run) if run else _estimated(names, "on these GPUs" if cards else "here")


def _measured(names, run) -> Found:
    """By the reference run. A notebook that took more memory than there is will not run."""
    ran = {one["name"]: one for one in run["notebooks"] if one["name"] in reference.seconds(run)}
    free = host.available_memory()
    rows = [{"name": name, "seconds": ran[name]["seconds"], "bytes": ran[name].get("host_bytes"),
             "runs": (ran[name].get("host_bytes") or 0) <= free} for name in names if name in ran]
    fits, tight = ([row for row in rows if row["runs"] is wanted] for wanted in (True, False))
    value = (f"{'all ' * (len(fits) == len(names))}{len(fits)} run here, in minutes: "
             + ", ".join(f"{_notebooks.number(row['name'])} {row['seconds'] / 60:.1f}"
                         for row in rows)
             + f"; measured on {run['machine']['title']}, {run['date'][:10]}")
    problems = []
    if tight:
        most = max(row["bytes"] for row in tight)
        numbers = listed(_notebooks.number(row["name"]) for row in tight)
        problems.append((NOTE, f"{numbers} took up to {most / GB:.1f} GB, and {free / GB:.1f} GB "
                               "are to be had: end other programs before you open them."))
    if new := [_notebooks.number(name) for name in names if name not in ran]:
        problems.append((NOTE, f"The reference run has no {listed(new)}: how long that takes is "
                               "not yet measured."))
    return worst(value, problems, notebooks=rows, reference=run["date"])


def _estimated(names, where) -> Found:
    """On a kind of machine that no reference run is of, or in a release, which has none: a
    prediction, and marked as one."""
    seconds = {part.name: part.seconds for part in parts.PARTS if part.name in names}
    minutes = sum(seconds.values()) / 60
    return ok(f"{counted(len(names), 'notebook')}; how long they take {where} is not yet "
              f"measured. Predicted for 8 A100: {minutes:.0f} minutes, {node_dollars(minutes):.2f} "
              "dollars", predicted=seconds)

"""Reference runs of the solutions, one for each kind of machine, committed as
experiments/reference/NAME/results.json (`scripts/solutions --reference` makes them)."""

from pathlib import Path

from _unattended.folder import read
from _unattended.runner import PASSED

PLACE = Path("experiments") / "reference"


def runs(root: Path) -> list[dict]:
    """All of them, the machine without GPUs first, then by number of GPUs."""
    found = [read(path) for path in sorted((root / PLACE).glob("*/results.json"))]
    # what scripts/on-gpu leaves in the same place has parts instead of notebooks
    return sorted((run for run in found if "notebooks" in run),
                  key=lambda run: len(run["machine"]["gpus"]))


def kind(machine: dict) -> str:
    """What two machines have in common whose runs may be compared: their GPUs, if they have some.
    machine: as results.json has it."""
    return machine["title"] if machine["gpus"] else "no GPU"


def of_machine(machine: dict, root: Path) -> dict | None:
    """The reference run of this kind of machine, or None."""
    return next((run for run in runs(root) if kind(run["machine"]) == kind(machine)), None)


def of_run(data: dict, root: Path) -> dict | None:
    """The reference run that a run's numbers may be compared with: of the same kind of machine and
    the same sizes, and not the run itself; or None."""
    found = of_machine(data["machine"], root)
    sizes = ("preset", "ranks")
    if found is None or found["date"] == data["date"]:
        return None
    return found if all(found[size] == data[size] for size in sizes) else None


def seconds(run: dict) -> dict[str, float]:
    """Notebook -> seconds, of those that passed."""
    return {one["name"]: one["seconds"] for one in run.get("notebooks", ())
            if one["outcome"] == PASSED}

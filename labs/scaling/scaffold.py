"""What a student of notebook 06 calls or subclasses."""

from dataclasses import replace
from pathlib import Path

from labs.checks.scripts.files import FileText
from labs.checks.verdicts import Wrong, shows
from labs.meters.own_speed import OwnSpeed, measure_own_speed
from labs.predictions.step_time.reported_runs import ReportedRun, reported_runs
from labs.training.models import VOCABULARY
from labs.training.presets import Preset, preset
from labs.workers import devices

ROOT = Path(__file__).resolve().parents[2]


# ---- part 4: what limits it

SMALL = {"layers": 4, "hidden": 256, "heads": 4, "context": 64, "batch": 4}  # of one core


def reported_run(name: str) -> ReportedRun:
    """A published run, such as "mosaic-096". Raises Wrong for another name."""
    if name not in reported_runs():
        raise Wrong(f"no published run {name!r}", f"Choose among {', '.join(reported_runs())}.",
                    code="unknown_name")
    return replace(reported_runs()[name])


class OwnRun(ReportedRun):
    """A run of this machine. sheet_tflops: of a large product, since no data sheet says it."""

    def __repr__(self):
        sizes = super().__repr__().splitlines()[0]
        return (f"{sizes}\n{self.tokens_per_s:,.0f} tokens/s; a large product, which stands for a "
                f"data sheet's peak, reaches {self.sheet_tflops:,.4g} TFLOP/s")


@shows("This machine's own run")
def own_run(chosen: Preset | None = None) -> ReportedRun:
    """Trains a small GPT-2 on one core, or on one GPU, and returns the run as a report would: its
    "data sheet" is a large fp32 product on the same device."""
    chosen = chosen or (preset() if devices.gpus() else preset("laptop", **SMALL))
    return as_run(measure_own_speed(replace(chosen, ranks=1)))


def as_run(speed: OwnSpeed) -> ReportedRun:
    """The measured speed as a report: the head of GPT-2 is its embedding."""
    where = "one GPU of this machine" if speed.device == "cuda" else "one core of this machine"
    sizes = speed.preset
    return OwnRun(f"GPT-2 on {where}", speed.parameters, VOCABULARY, True, sizes.layers,
                       sizes.hidden, sizes.context, "none", 1, speed.flops_per_s / 1e12, False,
                       speed.tokens_per_s)


# ---- part 8: the record


@shows("A cluster's file")
def show_cluster_file(name: str) -> FileText:
    """The text of a file of scripts/cluster, such as "train.sbatch"."""
    return FileText((ROOT / "scripts" / "cluster" / name).read_text(encoding="utf-8"))

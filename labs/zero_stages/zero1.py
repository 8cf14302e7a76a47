"""Exercise 3.2: ZeRO-1, an optimizer that owns 1/N of the states; and what its reduce-scatter
really sends."""

from collections.abc import Callable

from labs.checks.verdicts import check, shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.predictions.communication import traffic
from labs.training.presets import Preset
from labs.workers.launcher import launch
from labs.zero_stages import lifecycle_recording
from labs.zero_stages.stages import equal, moves, verify_stage


@check("3.2")
def check_zero1(strategy: Callable):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-1."""
    difference, volume = verify_stage(strategy, 1)
    return (f"{equal(difference)}, holds 8Ψ/N bytes of optimizer state and {moves(volume)}")


@shows("3.2")
def show_reduce_scatter(preset: Preset) -> Picture:
    """MB that a rank sends in a reduce-scatter of 8 MiB on gloo: torch's own, the lab's, and the
    all-reduce of which it is half. Counted in the rank's TCP connections, with the formula's tick;
    where the system does not count, the formula alone."""
    # On the CPU on every machine: it shows what gloo does, and NCCL's bytes pass no connection that
    # the system counts.
    sent = launch(lifecycle_recording.sent_by_each, ranks=preset.ranks, quiet=True, verify=False,
                  device="cpu")[0]
    size = 4 * lifecycle_recording.elements(preset.ranks)
    formulas = {"all_reduce, keep a piece": traffic.all_reduce,
                "torch's reduce_scatter": traffic.all_reduce,
                "lab.reduce_scatter": traffic.reduce_scatter}
    rows = []
    for (name, formula), counted in zip(formulas.items(), sent, strict=True):
        want = formula(size, preset.ranks) / 1e6
        rows.append(Bar(name, want if counted is None else counted / 1e6, want,
                        colour=palette.PHASES["communication"]))
    return bars(rows, "MB", f"that leave each of {preset.ranks} ranks for {size / 1e6:.1f} MB, gloo"
                + ", by formula" * (None in sent), lesson=(
                    f"lab.reduce_scatter sends {rows[2].measured / rows[0].measured:.0%} of what "
                    "an all-reduce sends"))

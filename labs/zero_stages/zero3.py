"""Exercise 3.4: ZeRO-3, a layer is gathered only while it is used; and the picture of it."""

from collections.abc import Callable

from labs.checks.gpu_notes import spreads_of_recorded
from labs.checks.verdicts import check, shows
from labs.pictures import timelines
from labs.pictures.picture import Picture
from labs.training.presets import Preset
from labs.workers.launcher import launch
from labs.workers.slow_link import Link
from labs.zero_stages import lifecycle_recording
from labs.zero_stages.stages import MEMORY_HINTS, equal, moves, verify_stage

_NOT_AS_ZERO2 = (
    "Nothing of it was updated here: its shard got no gradient before the step. Does "
    "after_backward still do with the gradients what that of ZeRO-2 does, after it has freed the "
    "unit?")


@check("3.4", hints=MEMORY_HINTS)
def check_zero3(strategy: Callable):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-3."""
    difference, volume = verify_stage(strategy, 3, nothing_updated=_NOT_AS_ZERO2)
    return f"{equal(difference)}, keeps 16Ψ/N bytes and one layer, and {moves(volume)}"


# Each rank's own link, on a CPU: a layer's gather takes less time than a layer computes, and the
# cores are free meanwhile, as on a GPU.
LINK = Link(bytes_per_second=150e6, latency=2e-4)


@shows("3.4")
def show_gathered_layers(strategy: Callable, preset: Preset) -> Picture:
    """When each layer of the preset's GPT-2 is gathered in a step of ZeRO-3, on rank 0, and when
    the rank only waits for a gather. On a CPU, the ranks' collectives pass a slow link. On GPUs a
    note says how long the recorded steps took, of which the fastest is drawn."""
    found = timelines.Lifecycle(**launch(
        lifecycle_recording.record_lifecycle, strategy, preset, link=LINK, ranks=preset.ranks,
        quiet=True, verify=False)[0])
    return timelines.gathered_layers(found, spreads_of_recorded(
        {f"{lifecycle_recording.STEPS} recorded steps": found.recorded}, preset))

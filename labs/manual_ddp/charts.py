"""The charts of notebook 02, each drawn from a run of the student's own code. What runs on ranks
stands in other modules: a rank that imported this one would import matplotlib.
"""

from collections.abc import Callable
from functools import partial

from labs.exercises import comparison
from labs.exercises.comparison import Comparison
from labs.exercises.gpu_notes import below, speeds, spreads
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.manual_ddp import variants
from labs.manual_ddp.checks.combine import as_gradient, gradients_of_shards
from labs.manual_ddp.checks.ready_order import count_early
from labs.meters.trace import Trace
from labs.meters.typical_step import require_typical
from labs.pictures import agreement, palette, phases, shards, timelines
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.pictures.widgets import Choice, Controls
from labs.predictions import traffic as predicted
from labs.training.presets import Preset
from labs.workers.launcher import launch

CAPS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 25.0)  # MB, the slider's


@shows("2.1")
def show_combine(combine: Callable) -> Picture:
    """Draws the gradient of a batch in shards of 1, 1 and 10: whole, combined, plainly averaged."""
    whole, parts = gradients_of_shards([1, 1, 10])
    combined = as_gradient(combine([part.clone() for part in parts], [1, 1, 10]), whole)
    return agreement.gradient_strips({"the whole batch": whole, "your combine": combined,
                                      "plain mean": sum(parts) / len(parts)})


@shows("2.3")
def show_gradients(average_gradients: Callable, ranks: int = 2) -> Picture:
    """Draws the gradients of every rank before and after the student's function averaged them."""
    return agreement.gradients_by_rank(launch(variants.record_averaging, average_gradients,
                                              ranks=ranks, quiet=True))


@shows("2.5")
def explore_buckets(make_buckets: Callable, preset: Preset) -> Controls:
    """Draws how the preset's GPT-2 is cut into buckets, for a cap that a slider moves; without a
    live kernel, for the preset's cap, which the guess is about."""
    model = comparison.model_of(preset)
    names = {id(parameter): name.removeprefix("transformer.")
             for name, parameter in model.named_parameters()}

    def picture(cap_mb):
        cut = make_buckets(model.parameters(), cap_mb * 1e6)
        return shards.bucket_bar([[(names[id(p)], p.numel() * p.element_size()) for p in bucket]
                                   for bucket in cut], cap_mb * 1e6,
                                 guessed("2.5") if cap_mb == cap else None)

    cap = preset.cap_bytes / 1e6
    options = [(f"{each:g}", each) for each in sorted({*CAPS, cap})]
    return Controls([Choice("cap_mb", "cap, MB", options, cap)], picture)


@shows("2.7")
def show_in_flight(wrap: Callable, preset: Preset) -> Picture:
    """Draws when each gradient of rank 0 was ready, and when its bucket left and arrived, in the
    recorded step that is nearest to the median."""
    recorded, buckets = launch(variants.record_marked, wrap, preset, ranks=preset.ranks, quiet=True,
                               verify=False)[0]
    require_typical({"a step": (recorded.seconds, recorded.usual)}, "this cell")
    return timelines.buckets_in_flight(recorded.trace, buckets)


@shows("2.7")
def show_training(wrap: Callable, preset: Preset, steps: int = 20) -> Picture:
    """Draws the loss on `preset.ranks` ranks, and on one rank with the whole batch: the same model,
    the same batches, the plain loop."""
    one = variants.losses(lambda model: model, preset, steps, ranks=1)
    several = variants.losses(wrap, preset, steps, ranks=preset.ranks)
    difference = max(abs(a - b) for a, b in zip(one, several, strict=True))
    return agreement.loss_curves({"1 rank, the whole batch": one,
                               f"{preset.ranks} ranks, a share each": several}, difference)


@shows("2.8")
def show_accumulation(wrap: Callable, preset: Preset, parts: int = 4) -> Picture:
    """Draws the all-reduces of a step of `parts` micro-batches, with and without no_sync, the
    numbers that the buckets predict, and the guess."""
    calls, buckets = launch(variants.count_all_reduces, wrap, preset, parts,
                            ranks=preset.ranks, quiet=True)[0]
    each, once = calls
    return bars([Bar("averaged after each micro-batch", each, parts * buckets),
                 Bar("no_sync around all but the last", once, buckets, guessed("2.8"))],
                "calls", f"of all_reduce in a step of {parts} micro-batches")


@shows("2.10")
def show_calls(compared: Comparison) -> Picture:
    """Draws the collectives per step of each variant, and the count that its buckets predict."""
    return bars([Bar(name, len(found.calls), _predicted_calls(compared, name),
                                       guessed("2.5") if "bucketed" in name else None)
                          for name, found in compared.results.items()],
                         "calls", "of all_reduce per step and rank")


def _predicted_calls(compared, name) -> int | None:
    [cut, *_] = compared.results[name].observed
    return len(cut) if cut else compared.tensors if "per parameter" in name else None


@shows("2.10")
def show_bytes(compared: Comparison) -> Picture:
    """Draws the bytes per step of each variant, and the predicted 4 bytes per parameter."""
    want = predicted.gradient_bytes(compared.parameters) / 1e6
    return bars([Bar(name, found.bytes.total() / 1e6, want)
                          for name, found in compared.results.items()],
                         "MB", "all-reduced per step and rank (logical bytes)")


@shows("2.10")
def show_timelines(compared: Comparison, *names: str) -> Picture:
    """Draws one recorded step of the named variants (all, if none is named), on at most three
    ranks: the first, the slowest and the last. It is the step of `show_phases`."""
    return timelines.by_rank({name: variants.shown_ranks(traces)
                              for name, traces in _typical_steps(compared, names).items()})


@shows("2.10")
def show_phases(compared: Comparison) -> Picture:
    """Draws where a recorded step went, mean over ranks: phases and exposed communication. It is
    the step nearest to the median that `show_throughput` draws; on GPUs a note has the seconds of
    all that were recorded."""
    recorded = {name: one.recorded[0].recorded for name, one in compared.results.items()}
    note = spreads(recorded, compared.preset)
    return phases.step_phases(_typical_steps(compared), below(
        note, "The recorded step nearest to the median is drawn." if note else ""))


def _typical_steps(compared, names=()) -> dict[str, list[Trace]]:
    """Variant -> one trace of each rank. Raises NotTypical where one is far from the throughput."""
    recorded = {name: compared.results[name].recorded for name in names or compared.results}
    require_typical({name: (first.seconds, first.usual) for name, [first, *_] in recorded.items()},
                    "the cell with lab.compare")
    return {name: [one.trace for one in by_rank] for name, by_rank in recorded.items()}


@shows("2.10")
def show_throughput(compared: Comparison) -> Picture:
    """Draws the tokens per second of all ranks together, by variant, and the student's guess; on
    GPUs a note has the seconds of a step and their spread."""
    ratio, torchs = guessed("2.10"), compared.tokens_per_second("torch DDP")
    return bars([Bar(
        name, compared.tokens_per_second(name), colour=palette.PLAIN,
        guessed=ratio * torchs if ratio is not None and "overlapped" in name else None)
        for name in compared.results], "tokens/s", "of all ranks together (median of turns)",
        note=below(speeds(compared)))


@shows("2.11")
def show_starts(wrap: Callable, steps: int = 3) -> Table:
    """A table of the buckets that leave while gradients are still being computed, by step, for one
    model whose layers are registered in two orders."""
    rows = [(f"registered {how}", *(f"{early} of {calls}" for early, calls in launch(
        partial(count_early, is_reversed=is_reversed), wrap, steps, ranks=2, quiet=True)[0]))
        for how, is_reversed in (("in the order of forward", False), ("in reverse", True))]
    return Table("Buckets that leave before the last gradient is ready",
                 ("the same model", *(f"step {number + 1}" for number in range(steps))), rows)

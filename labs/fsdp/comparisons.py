"""What several pictures of notebook 04 share, and those of gradient accumulation and of meshes,
which belong to no exercise."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from labs.checks.comparison import Comparison, compare
from labs.checks.gpu_notes import below, measured_on_gpus, rounds_of, speeds
from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.fsdp import scaffold
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.communication.traffic import passes, stage_passes
from labs.predictions.memory.recipes import model_states
from labs.training import strategies
from labs.training.memory_categories import GB, Memory
from labs.training.presets import Preset

ROOT_FREED = "fully_shard,\nroot freed too"
FEW = 2  # sequences per rank, at most, where parameters are looked at: activations would hide them
COMMUNICATION = palette.PHASES["communication"]


def few_tokens(preset: Preset) -> Preset:
    """Returns the preset with at most FEW sequences per rank."""
    return replace(preset, batch=min(preset.batch, FEW))


def peaks(found, predicted=()) -> Panel:
    """Returns the panel of the peak of a step, by category. found: Measured, by strategy."""
    return memory_panel("peak of a step", [r.report.step_peak for r in found], predicted)


def memory_panel(title: str, values: Sequence[Memory | float], *ticks, **options) -> Panel:
    """Returns a Panel of bytes, in MB or, where they are that many, in GB."""
    most = max(getattr(value, "total", value) for value in values)
    return Panel(title, *(("GB", values, GB) if most >= GB else ("MB", values, 1e6)), *ticks,
                 **options)


def measure_zero3(zero3: Callable, strategy: Callable, preset: Preset) -> Comparison:
    """Returns the comparison of the four strategies of `show_beside_zero3`."""
    chosen = {"DDP": partial(strategies.ddp, cap_bytes=preset.cap_bytes), "ZeRO-3 by hand": zero3,
              "fully_shard": strategy,
              ROOT_FREED: partial(scaffold.with_root_resharded, strategy)}
    size = few_tokens(preset)
    return compare(chosen, size, losses=3, rounds=rounds_of(size), quiet=True)


def draw_zero3(found: Comparison) -> Picture:
    """Draws what `measure_zero3` found."""
    results, stages = found.results.values(), (0, 3, 3, 3)
    guess = guessed("4.1")
    states = memory_panel(
        "held after backward", [r.report.phases["backward"] for r in results],
        [model_states(found.parameters, ranks=found.preset.ranks, stage=s).total for s in stages],
        [None, None, guess and guess * 1e6, None])
    sent = Panel("sent in a step", "Ψ", list(map(found.communication_volume, found.results)), 1,
                 [sum(passes(kind) * n for kind, n in stage_passes(s).items()) for s in stages],
                 colour=COMMUNICATION)
    calls = Panel("collectives", "per step", [len(r.calls) for r in results], colour=COMMUNICATION)
    held, volume = ([values[0] / values[2] for values in (
        [value.total for value in states.values], sent.values)])
    return side_by_side(list(found.results), [states, sent, calls],
                        below(_losses(found), measured_on_gpus(found)),
                        f"fully_shard holds 1/{held:.2g} of DDP's bytes and sends "
                        f"{1 / volume:.2g} times as much")


def _losses(found) -> str:
    losses = [result.losses for result in found.results.values()]
    apart = max(max(step) - min(step) for step in zip(*losses, strict=True))
    words = f"are {apart:.0e} apart at most" if apart else "are equal bit for bit"
    return (f"{found.preset.ranks} ranks, Ψ = {found.parameters:,}; the four losses of each of "
            f"{len(losses[0])} steps {words}")


def draw_wrappings(compared: Comparison, calls=(), nbytes=(), guesses=()) -> Picture:
    """Draws peak, the bytes gathered at once where they are predicted, and collectives. calls,
    nbytes: predicted collectives and gathered bytes, by wrapping; guesses: of the collectives."""
    found = list(compared.results.values())
    held = [memory_panel("gathered at once", [r.report.gathered for r in found],
                         nbytes, colour=palette.MEMORY["buffers"])] if nbytes else []
    sent = Panel("collectives", "per step", [len(r.calls) for r in found], predicted=calls,
                 guessed=guesses, colour=COMMUNICATION)
    first, last = (" ".join(name.replace("_\n", "_").split())
                   for name in (list(compared.results)[0], list(compared.results)[-1]))
    high, low = (found[row].report.step_peak.total for row in (0, -1))
    return side_by_side(list(compared.results), [peaks(found), *held, sent],
                        measured_on_gpus(compared),
                        f"{first} → {last}: peak {low / high - 1:+.0%}, collectives "
                        f"{len(found[0].calls)} → {len(found[-1].calls)}")


# gradient accumulation


@shows("Gradient accumulation")
def show_gradient_accumulation(strategy: Callable, preset: Preset, parts: int = 4) -> Table:
    """Returns a table of one step, accumulated from `parts` micro-batches: reduced after each of
    them, only after the last, and with the parameters kept gathered as well."""
    size = replace(few_tokens(preset), batch=1)
    found = compare({name: partial(scaffold.accumulating, strategy, parts, every, freed)
                     for name, every, freed in (("reduced after each", True, True),
                                                ("reduced once", False, True),
                                                ("… and never freed", False, False))},
                    size, tries=2, rounds=rounds_of(size), quiet=True)
    # Whole gradients that wait for the last micro-batch are in no parameter's .grad: they count as
    # what is kept of a forward. Activations are the same in all rows.
    activations = min(_before_backward(one).activations for one in found.results.values())
    rows = [(name, str(one.kinds["all_gather"]), str(one.kinds["reduce_scatter"]),
             f"{found.communication_volume(name):.1f}",
             f"{(_before_backward(one).total - activations) / 1e6:,.1f}")
            for name, one in found.results.items()]
    return Table(f"{parts} micro-batches make one step; {size.ranks} ranks, Ψ = "
                 f"{found.parameters:,}", ("", "gathers", "reductions", "Ψ sent", "MB allocated"),
                 rows, note="MB allocated: before the last backward, less activations. A shard of "
                      f"the gradients has {4 * found.parameters / size.ranks / 1e6:,.1f} MB, full "
                      f"gradients have {4 * found.parameters / 1e6:,.1f}. {speeds(found)}".rstrip())


def _before_backward(one) -> Memory:
    return one.report.phases["forward"]


# replicas of shards


@shows("HSDP")
def show_hsdp(strategy: Callable, preset: Preset, ranks: int = 4) -> Table:
    """Returns a table of one strategy on a mesh of `ranks` shards, and on one of two replicas."""
    size = replace(few_tokens(preset), ranks=ranks)
    names = {f"1 × {ranks}": 1, f"2 × {ranks // 2}": 2}
    found = compare({name: partial(scaffold.on_replicas, strategy, replicas)
                     for name, replicas in names.items()}, size,
                    rounds=rounds_of(size), quiet=True)
    rows = [(name, str(ranks // names[name]),
             f"{_states(one.report.phases['backward']) / 1e6:,.1f}",
             *(f"{one.elements[kind] / found.parameters:.2g}"
               for kind in ("all_gather", "reduce_scatter", "all_reduce")))
            for name, one in found.results.items()]
    return Table(f"One step on {ranks} ranks, Ψ = {found.parameters:,}",
                 ("replicas × shards", "ranks that share", "MB of state", "Ψ gathered", "Ψ reduced",
                  "Ψ all-reduced"), rows,
                 note="Gathers and reductions stay among the ranks that share; the all-reduce, of "
                      f"one shard, is between the replicas. {speeds(found)}".rstrip())


def _states(held) -> float:
    return held.parameters + held.gradients + held.optimizer_state

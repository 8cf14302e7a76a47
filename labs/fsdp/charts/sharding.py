"""Pictures of sharding: ZeRO-3 against fully_shard, the units of a wrapping and what they wait for,
gradient accumulation, and meshes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from labs.exercises.comparison import Comparison, compare, model_of
from labs.exercises.gpu_notes import below, measured_on_gpus, rounds_of, speeds
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.fsdp import scaffold
from labs.fsdp.checks.cost import collectives, gathered_bytes
from labs.fsdp.checks.lost_time import Machine, lost
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.memory_recipes import model_states
from labs.predictions.traffic import passes, stage_passes
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


# ZeRO-3 by hand against fully_shard


@shows("4.1")
def compare_with_zero3(zero3: Callable, strategy: Callable, preset: Preset) -> Picture:
    """Draws what one rank holds and sends under DDP, ZeRO-3 by hand, the student's fully_shard, and
    the same with its root resharded after forward too; with ZeRO's formulas as ticks."""
    return draw_zero3(measure_zero3(zero3, strategy, preset))


def measure_zero3(zero3: Callable, strategy: Callable, preset: Preset) -> Comparison:
    """Returns the comparison of the four strategies of `compare_with_zero3`."""
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
    return side_by_side(list(found.results), [states, sent, calls],
                        below(_losses(found), measured_on_gpus(found)))


def _losses(found) -> str:
    losses = [result.losses for result in found.results.values()]
    apart = max(max(step) - min(step) for step in zip(*losses, strict=True))
    words = f"are {apart:.0e} apart at most" if apart else "are equal bit for bit"
    return (f"{found.preset.ranks} ranks, Ψ = {found.parameters:,}; the four losses of each of "
            f"{len(losses[0])} steps {words}")


# which modules are units


@shows("Wrappings")
def compare_wrappings(wrappings: dict[str, Callable], preset: Preset) -> Comparison:
    """Trains the model under every wrapping: name -> function that selects its units."""
    size = few_tokens(preset)
    return compare({name: partial(scaffold.shard_units, select)
                    for name, select in wrappings.items()}, size,
                   rounds=rounds_of(size), quiet=True)


@shows("4.2")
def show_wrappings(compared: Comparison, wrappings: dict[str, Callable],
                   cost: Callable) -> Picture:
    """Draws peak, gathered bytes and collectives of each wrapping, with what the student's `cost`
    predicts and the guess for the wrapping "each linear"."""
    model = model_of(compared.preset)
    calls, nbytes = zip(*(cost(scaffold.unit_sizes(select, model))
                          for select in wrappings.values()), strict=True)
    guesses = [guessed("4.2") if name == "each linear" else None for name in wrappings]
    return draw_wrappings(compared, calls, nbytes, guesses)


def draw_wrappings(compared: Comparison, calls=(), nbytes=(), guesses=()) -> Picture:
    """Draws peak, the bytes gathered at once where they are predicted, and collectives. calls,
    nbytes: predicted collectives and gathered bytes, by wrapping; guesses: of the collectives."""
    found = list(compared.results.values())
    held = [memory_panel("gathered at once", [r.report.gathered for r in found],
                         nbytes, colour=palette.MEMORY["buffers"])] if nbytes else []
    sent = Panel("collectives", "per step", [len(r.calls) for r in found], predicted=calls,
                 guessed=guesses, colour=COMMUNICATION)
    return side_by_side(list(compared.results), [peaks(found), *held, sent],
                        measured_on_gpus(compared))


# what a forward waits for

TOKENS = 4096  # of each rank
RANKS = 8
LATENCY = 20e-6  # seconds: of a small collective among the GPUs of a node, in order of magnitude
PRICE = 50e-6  # seconds: FSDP's hooks, the launch and the copies of a collective, likewise
UTILISATION = 0.4  # of the peak, as well-tuned training reaches it
_A100 = hardware.gpu("A100-80")
LINKS = {"NVLink": _A100.nvlink, "PCIe 4": _A100.pcie, "100 GbE": 100e9 / 8}


def llama_wrappings() -> dict[str, list[int]]:
    """Returns name -> units of Llama-2-7B: parameters, the root's first."""
    hidden, inner, layers, vocabulary = 4096, 11008, 32, 32000
    linears = 4 * [hidden * hidden] + 3 * [hidden * inner]
    norms, root = 2 * hidden, 2 * vocabulary * hidden + hidden
    block = sum(linears) + norms
    return {"whole model": [root + layers * block],
            "8 blocks": [root] + 4 * [8 * block], "2 blocks": [root] + 16 * [2 * block],
            "each block": [root] + layers * [block],
            "each linear": [root + layers * norms] + layers * linears}


def a100_on(link: str) -> Machine:
    """Returns an A100 on one of LINKS: fp32 parameters of RANKS ranks, TOKENS tokens a rank, whose
    products are in 16 bits."""
    return Machine(link, LATENCY, 4 * (RANKS - 1) / RANKS / LINKS[link],
                   2 * TOKENS / (UTILISATION * _A100.flops), PRICE)


@shows("4.3")
def show_lost(choose: Callable) -> Table:
    """Returns a table of Llama-2-7B on A100s: what each wrapping gathers at once, and the time that
    its forward loses on three links; the wrapping that the student's `choose` takes is marked."""
    wrappings = llama_wrappings()
    machines = [a100_on(link) for link in LINKS]
    free = 30 * GB  # of 80: next to shards and activations
    chosen = [choose(wrappings, free, one.gather, one.compute, one.price) for one in machines]
    rows = [(name, f"{gathered_bytes(units) / GB:.1f}", f"{collectives(units)}",
             *(f"{lost(units, one) * 1e3:,.0f}{' ←' * (name == taken)}"
               for one, taken in zip(machines, chosen, strict=True)))
            for name, units in wrappings.items()]
    computes = machines[0].compute(sum(wrappings["whole model"]))
    return Table(f"Llama-2-7B on {RANKS} × A100-80, {TOKENS:,} tokens a rank, gathered in fp32, "
                 "multiplied in 16 bits: computed, not measured",
                 ("", "GB at once", "collectives", *(f"ms lost, {link}" for link in LINKS)), rows,
                 note=f"← what choose takes with {free / GB:g} GB free. A forward computes "
                      f"{computes * 1e3:,.0f} ms. Assumed: {LATENCY * 1e6:g} µs of latency, and "
                      f"{PRICE * 1e6:g} µs for each collective.")


# gradient accumulation


@shows("Gradient accumulation")
def compare_accumulation(strategy: Callable, preset: Preset, parts: int = 4) -> Table:
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
                 f"{found.parameters:,}", ("", "gathers", "reductions", "Ψ sent", "MB held"), rows,
                 note="MB held: before the last backward, less activations. A shard of the "
                      f"gradients has {4 * found.parameters / size.ranks / 1e6:,.1f} MB, whole "
                      f"gradients have {4 * found.parameters / 1e6:,.1f}. {speeds(found)}".rstrip())


def _before_backward(one) -> Memory:
    return one.report.phases["forward"]


# replicas of shards


@shows("HSDP")
def compare_meshes(strategy: Callable, preset: Preset, ranks: int = 4) -> Table:
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

"""What the stages hold and send: charts of the comparison, tables of bytes and of choices."""

from collections.abc import Callable

from labs.exercises.comparison import Comparison
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.memory_recipes import model_states, recipe_of
from labs.predictions.traffic import passes
from labs.training.memory_categories import GB
from labs.words import counted, listed
from labs.zero_stages.checks.choose import MODELS
from labs.zero_stages.stage_comparison import PHASES, RECORDED, expected, peak_phase

MOMENTS = {"build": "after building", "forward": "after forward", "backward": "after backward",
           "step": "after the step", "peak": "at the peak of a step"}
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
TABLE_RECIPE = "bf16, fp32 moments"  # 12 bytes per parameter
TABLE_RANKS = (1, 4, 8, 16, 64, 512)
_TRAFFIC_GUESSES = {"ZeRO-1": "3.2", "ZeRO-3": "3.4"}  # strategy -> exercise
_RECORDED_NOTE = "on the machine of the worked notebook, where the library was installed."


@shows("3.8")
def show_memory(comparison: Comparison, moment: str = "backward") -> Picture:
    """What a rank holds under each strategy, by category. moment: one of MOMENTS.

    The formula's tick after backward counts parameters, gradients and optimizer state: no other
    tensor is needed then. At other moments it is the predicted step of torch's strategies. At the
    peak, a note says in which phase of the step each strategy's highest moment lies.
    """
    if moment not in MOMENTS:
        raise ValueError(f"no moment {moment!r}: choose {', '.join(MOMENTS)}")
    guess = guessed("3.8") if moment == "backward" else None
    rows = []
    for name, result in comparison.results.items():
        held = result.report.step_peak if moment == "peak" else result.report.phases[moment]
        known = expected(name)
        formula = (known.states(comparison) if moment == "backward"
                   else known.memory(comparison, moment))
        rows.append(MemoryRow(name, held, formula and formula.total,
                              guess and guess * 1e6 if name == "ZeRO-2" else None))
    note = _peak_phases(comparison) if moment == "peak" else ""
    return memory_bars(rows, f"of one rank {MOMENTS[moment]}", unit="MB", note=note)


def _peak_phases(comparison) -> str:
    """In which phase of a step each strategy's memory is highest, as a sentence."""
    names = {}
    for name, result in comparison.results.items():
        # a name's comma would read as the end of the name
        names.setdefault(peak_phase(result.report), []).append(name.replace(",", ""))
    parts = [f"{'in the step' if phase == 'step' else f'in {phase}'} for {listed(names[phase])}"
             for phase in PHASES if phase in names]
    return f"The highest moment lies {'; '.join(parts)}."


@shows("3.8")
def show_traffic(comparison: Comparison) -> Picture:
    """What each strategy sends in one step, by collective: in Ψ and in bytes, where an all-reduce
    counts twice, and in how many calls."""
    names, results = list(comparison.results), list(comparison.results.values())
    known, ranks = [expected(name) for name in names], comparison.preset.ranks
    guesses = [guessed(_TRAFFIC_GUESSES[name]) if name in _TRAFFIC_GUESSES else None
               for name in names]
    elements = [{kind: passes(kind) * n / comparison.parameters
                 for kind, n in result.elements.items()} for result in results]
    nbytes = [{kind: passes(kind) * n for kind, n in result.bytes.items()} for result in results]
    return side_by_side(names, [
        Panel("elements that travel", "Ψ per step", elements, 1,
              [one.communication_volume(comparison) for one in known], guesses),
        Panel("bytes that travel", "MB per step", nbytes, 1e6,
              [one.bytes(comparison) for one in known]),
        Panel("collectives", "calls per step", [len(result.calls) for result in results],
              colour=palette.MUTED)],  # of all kinds, so none of their colours
        f"An all-reduce counts twice; each rank sends {ranks - 1}/{ranks} of what travels."
        + f" {RECORDED}: {_RECORDED_NOTE}" * any(map(_is_recorded, names)))


def _is_recorded(name) -> bool:
    return name.endswith(RECORDED)


@shows("3.8")
def show_phases(comparison: Comparison) -> Table:
    """How many Ψ each strategy sends in which phase of a step, measured, an all-reduce counted
    twice."""
    rows = []
    for name, result in comparison.results.items():
        by_phase = result.observed[0] if result.observed else {}
        totals = [sum(passes(kind) * n for kind, n in by_phase.get(phase, {}).items())
                  / comparison.parameters for phase in PHASES]
        rows.append((name, *(f"{total:.2f}" if total > 0.005 else "-" for total in totals),
                     f"{sum(totals):.2f}"))
    return Table(f"Ψ sent in a step, by phase, on {comparison.preset.ranks} ranks",
                 ("", *PHASES, "all"), rows, note="an all-reduce counts twice")


def show_state_bytes(parameters: float, ranks: int = 8) -> Table:
    """What each stage leaves on a rank at 12 bytes per parameter, by formula, and the guess."""
    recipe = recipe_of(TABLE_RECIPE)
    divided = (0, recipe.optimizer_state, recipe.optimizer_state + recipe.gradients, recipe.total)
    rows = [(name, _psi(recipe.total - part), f"{_psi(part)}/{ranks}" if part else "",
             f"{model_states(parameters, recipe, ranks=ranks, stage=stage).total / GB:g}")
            for stage, (name, part) in enumerate(zip(STAGES, divided, strict=True))]
    guess = guessed("3.8b")
    return Table(f"{parameters / 1e9:g}B parameters on {ranks} ranks, {recipe.name}: GB per rank",
                 ("", "on every rank", "divided", "GB"), rows,
                 note="" if guess is None else f"your guess for ZeRO-2: {guess:g}")


def _psi(each) -> str:
    return f"{each:g}Ψ" if each else "0"


@shows("3.9")
def show_choices(choose: Callable, gpu: str = "A100-80", activations: float = 10 * GB) -> Table:
    """What the student's function chooses on a GPU of `hardware`, for some models and ranks."""
    capacity = hardware.gpu(gpu).usable
    rows = [(model, *("-" if stage is None else STAGES[int(stage)] for stage in (
        choose(parameters, ranks, capacity, activations) for ranks in TABLE_RANKS)))
            for model, parameters in MODELS.items()]
    return Table(f"on GPUs of type {gpu}, on which CUDA reports {capacity / GB:.1f} GB, with "
                 f"{activations / GB:g} GB of activations",
                 ("model", *(counted(ranks, "rank") for ranks in TABLE_RANKS)),
                 rows, note="-: no stage fits")

"""The charts of notebook 03 that set the student's stages beside the real libraries."""

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.traffic import TrafficRow, stacked_traffic
from labs.predictions.traffic import passes

MOMENTS = {"build": "after building", "forward": "after forward", "backward": "after backward",
           "step": "after the step", "peak": "at the peak of a step"}


@shows("3.8")
def show_memory(compared, moment: str = "backward"):
    """What a rank holds under each strategy, by category. moment: one of MOMENTS.

    The formula's tick after backward counts parameters, gradients and optimizer state: nothing else
    is needed then. Elsewhere it comes from playing the step through, for torch's strategies.
    """
    if moment not in MOMENTS:
        raise ValueError(f"no moment {moment!r}: choose {', '.join(MOMENTS)}")
    rows = [MemoryRow(name, _held(result.report, moment), _formula(compared, name, moment),
                      _megabytes(guessed(f"MB per rank {MOMENTS[moment]}, {name}")))
            for name, result in compared.results.items()]
    return memory_bars(rows, f"of one rank {MOMENTS[moment]}", unit="MB")


def _held(report, moment):
    return report.step_peak if moment == "peak" else report.phases[moment]


def _formula(compared, name, moment):
    if moment == "backward":
        return compared.states(name).total
    predicted = compared.results[name].predicted
    return predicted[moment].total if predicted else None


def _megabytes(value):
    return None if value is None else value * 1e6


@shows("3.8")
def show_traffic(compared):
    """What travels in one step under each strategy, by collective: in Ψ and in bytes."""
    rows = [_row(name, result, compared.parameters) for name, result in compared.results.items()]
    return stacked_traffic(rows, compared.preset.ranks)


def _row(name, result, parameters):
    def doubled(sizes, each=1):
        return {kind: passes(kind) * size / each for kind, size in sizes.items()}

    return TrafficRow(
        name, doubled(result.elements(), parameters), doubled(result.bytes()),
        calls=len([call for call in result.calls if call.elements]),
        predicted=result.kind.travels(), guessed=guessed(f"Ψ that travel per step, {name}"),
        predicted_bytes=result.kind.bytes(parameters))

"""What a layer sends and keeps, with its sequence whole and in pieces: pictures of the student's
own strategies, beside torch's."""

from collections.abc import Callable

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.traffic import all_reduce
from labs.tensor_parallel.sequence import layer_records
from labs.tensor_parallel.sequence.activations import predicted
from labs.training import models
from labs.workers.launcher import launch

RANKS = 4
_OURS = ("tensor parallel, yours", "sequence parallel, yours")


@shows("7.7")
def show_activations(tensor_parallel: Callable, sequence_parallel: Callable) -> Picture:
    """Draws what a layer keeps for backward on one of 4 ranks, in b·s·h numbers, by part, with what
    the formula says; at last what the formula says if the inputs are gathered again."""
    strategies = [layer_records.whole, tensor_parallel, sequence_parallel]
    found = launch(layer_records.layer_memory, strategies, ranks=RANKS, quiet=True)[0]
    unit = layer_records.unit_bytes()
    config = models.llama(1, **layer_records.SIZES).config
    formulas = list(predicted(config, RANKS).values())
    totals = " · ".join(f"{each.total / unit:.2f}" for each in found)
    panel = Panel("kept by a layer", f"b·s·h numbers, on one of {RANKS} ranks",
                  [*(each.parts for each in found),
                   {name: unit * value for name, value in formulas[-1].by_part().items()}],
                  size=unit, predicted=[*(unit * each.total for each in formulas[:-1]), None],
                  pale=(len(found),))
    return side_by_side(["nothing divided", *_OURS, "inputs gathered again"], [panel],
                        f"total by the memory meter at the end of forward: {totals}")


@shows("7.7")
def show_layer_collectives(tensor_parallel: Callable, sequence_parallel: Callable) -> Picture:
    """Draws calls and bytes of a layer's collectives in one step, by kind, with what the formula
    says: two all-reduces of b·s·h in forward and two in backward, or as many pairs of an all-gather
    and a reduce-scatter."""
    return _collectives([tensor_parallel, sequence_parallel], _OURS)


@shows("7.9")
def show_collectives_of_plan(tensor_parallel: Callable, sequence_parallel: Callable,
                             torchs_parallel: Callable) -> Picture:
    """Draws the same, with torch's plan in a third row."""
    return _collectives([tensor_parallel, sequence_parallel, torchs_parallel],
                        (*_OURS, "torch's plan"))


def _collectives(strategies, names) -> Picture:
    found = launch(layer_records.layer_traffic, strategies, ranks=RANKS, quiet=True)[0]
    sent = 4 * all_reduce(layer_records.unit_bytes(), RANKS)
    guess = guessed("7.7")
    guesses = [None, guess and guess * sum(found[0].sent.values()), *[None] * (len(found) - 2)]
    panels = [Panel("calls of a layer and step", "collectives", [each.calls for each in found],
                    predicted=[4, *[8] * (len(found) - 1)]),
              Panel("sent by a rank, of a layer and step", "kB", [each.sent for each in found],
                    size=1e3, predicted=[sent] * len(found), guessed=guesses)]
    return side_by_side([*names], panels, _note(found[1:]))


def _note(found) -> str:
    small = " and ".join(f"{each.calls.get('all_reduce', 0):g}" for each in found)
    return (f"all-reduces for the gradients of a layer's 2 norms: {small}; their bytes are too few "
            "to be seen")


@shows("7.9")
def show_comm_debug(torchs_parallel: Callable, layers: int = 2) -> Table:
    """A table of the collectives of forward and backward: what torch's CommDebugMode counts, and
    what the lab counts."""
    counts = launch(layer_records.both_counts, torchs_parallel, layers, ranks=RANKS, quiet=True)[0]
    return Table(f"collectives of forward and backward, {layers} layers, {RANKS} ranks",
                 ("collective", "by CommDebugMode", "by the lab's Traffic"),
                 [(kind.replace("_", "-"), *numbers) for kind, numbers in counts.items()],
                 note=f"{4 * layers} all-gathers and {4 * layers} reduce-scatters are the layers'; "
                      "the others are those of embedding, head and loss")

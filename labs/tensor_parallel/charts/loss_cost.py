"""What the loss costs where the logits are gathered, and where they stay divided: bytes that a rank
sends, and its memory at the peak, measured on ranks beside formulas."""

from collections.abc import Callable

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import LAUNCH_SECONDS, shows
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.predictions import traffic
from labs.tensor_parallel.charts.recording import (
    TOKENS,
    VOCABULARY,
    LossCost,
    gathered_cross_entropy,
    record_loss_cost,
)
from labs.workers.launcher import launch

NAMES = ("gathered", "divided")
_ALIVE = 3  # fp32 numbers for each logit at the peak: the log-softmax or exp, and two gradients


@shows("7.5")
def show_loss_cost(vocabulary_parallel_cross_entropy: Callable, ranks: int = 4) -> Picture:
    """Draws both costs of the loss with gathered logits and with the student's function, on ranks
    of this machine; a note has what the formulas give for Llama-3's vocabulary."""
    functions = {"gathered": gathered_cross_entropy, "divided": vocabulary_parallel_cross_entropy}
    measured = {name: launch(record_loss_cost, function, ranks=ranks, quiet=True,
                             timeout=LAUNCH_SECONDS)[0] for name, function in functions.items()}
    guess = guessed("7.5")
    predicted = {name: predict_loss_cost(name, TOKENS, VOCABULARY, ranks) for name in NAMES}
    panels = [Panel("a rank sends", "MB", [measured[name].sent for name in NAMES], 1e6,
                    [predicted[name].sent for name in NAMES],
                    guessed=[None, guess and traffic.all_reduce(4 * guess * TOKENS, ranks)],
                    colour=palette.PHASES["communication"]),
              Panel("memory at the peak", "MB", [measured[name].peak for name in NAMES], 1e6,
                    [predicted[name].peak for name in NAMES],
                    colour=palette.MEMORY["activations"])]
    rows = ["logits\ngathered", "logits\ndivided"]
    return side_by_side(rows, panels, note=_of_llama_3(ranks))


def predict_loss_cost(name: str, tokens: int, vocabulary: int, ranks: int) -> LossCost:
    """By formula: gathered logits send (t-1)/t · b·s·v numbers, divided ones an all-reduce of three
    for each token; at the peak `_ALIVE` fp32 numbers for each logit that the loss sees are alive.
    """
    logits = tokens * vocabulary
    sent = (traffic.all_gather(4 * logits, ranks) if name == "gathered"
            else traffic.all_reduce(3 * 4 * tokens, ranks))
    return LossCost(sent, 4 * _ALIVE * logits / (1 if name == "gathered" else ranks))


def _of_llama_3(ranks: int, tokens: int = 8192, vocabulary: int = 128_256) -> str:
    gathered, divided = (predict_loss_cost(name, tokens, vocabulary, ranks) for name in NAMES)
    return (f"By the same formulas, {vocabulary:,} rows of Llama-3, {tokens:,} tokens, {ranks} "
            f"ranks:\ngathered {gathered.sent / 1e9:.1f} GB sent, {gathered.peak / 1e9:.1f} GB at "
            f"the peak; divided {divided.sent / 1e6:.2f} MB and {divided.peak / 1e9:.1f} GB")

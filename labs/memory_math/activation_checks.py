"""Checks of exercises 1.4 and 1.5: what forward saves, and what computing it again costs."""

import random

from labs.exercises.verdicts import Wrong, check
from labs.memory_math import truth
from labs.memory_math.answers import Slip, close, compare, instead, number, takes
from labs.predictions.parameters import shape_of
from labs.training import hf_configs

LAYER = ("batch", "sequence", "hidden", "heads", "fused")
RAN = (3, 96, 128, 4)  # batch, sequence, hidden, heads of the block that the notebook shows


@check("1.4")
def check_activations(layer_activations, activations):
    """A layer's bytes against a real block's saved tensors, a model's against sums of layers."""
    takes(layer_activations, LAYER)
    takes(activations, ("m", "batch", "sequence", "checkpointing"))
    for sizes in (RAN, truth.drawn_sizes(), truth.drawn_sizes()):
        for fused in (False, True):
            _compare_layer(layer_activations, *sizes, fused)
    for name in ("GPT-2", "Llama-3-8B", "Llama-2-7B"):  # in the last a layer exceeds the logits
        m = shape_of(hf_configs.config(name))
        for batch, sequence in ((1, 1024), (random.randint(2, 9), 8 * random.randint(20, 99))):
            for checkpointing in (False, True):
                _compare_model(activations, name, m, batch, sequence, checkpointing)
    return ("to the byte what real GPT-2 blocks save, but for the statistics of norms and softmax: "
            f"{100 * _left_out(*RAN, True):.1f} % of the block that was shown")


def statistics(batch, sequence, heads, fused) -> int:
    """Bytes that the formula leaves out: two numbers in 16 bits per token and norm, and fused
    attention's one in fp32 per token and head."""
    return 8 * batch * sequence + (4 * batch * heads * sequence if fused else 0)


def _left_out(batch, sequence, hidden, heads, fused) -> float:
    """The share of those bytes in all that a real block saves."""
    real = sum(nbytes for nbytes, _, _ in truth.saved(batch, sequence, hidden, heads, fused))
    return statistics(batch, sequence, heads, fused) / real


def _compare_layer(layer_activations, batch, sequence, hidden, heads, fused):
    what = (f"{batch} x {sequence} tokens, hidden {hidden}, {heads} heads, "
            f"{'fused' if fused else 'eager'} attention")
    said = number(layer_activations(batch, sequence, hidden, heads, fused), what)
    real = sum(nbytes for nbytes, _, _ in truth.saved(batch, sequence, hidden, heads, fused))
    counted = real - statistics(batch, sequence, heads, fused)
    compare(said, counted, f"a real block, {what}", "bytes",
            _layer_slips(batch, sequence, hidden, heads, fused),
            "Add up the tensors that lab.show_saved lists, in units of s·b·h.")


def _layer_slips(b, s, h, a, fused) -> list:
    size, scores = s * b * h, 5 * a * s * s * b
    want = 34 * size + (0 if fused else scores)
    return [
        Slip(0 if fused else -scores, "the scores inside attention, 5as/h, are missing",
             "They grow with the square of the sequence."),
        Slip(scores if fused else 0, "fused attention never writes the scores out",
             "Leave 5as/h out where `fused` is True."),
        Slip(0 if fused else 5 * a * s * (s * b - size // h), "the batch counts once", ""),
        Slip(want, "2x: that is as if 34 counted elements; it counts bytes",
             "sbh(34 + 5as/h) is in bytes already."),
        Slip(-want / 2, "half: counted in 16-bit elements", "The answer is in bytes."),
        Slip((1 / b - 1) * want, "the batch is missing", "Every sequence of it is saved."),
        Slip(-10 * size, "10sbh is missing: two norms' inputs, and what attention's and the "
             "feed-forward part's outputs save", "lab.show_saved lists them all."),
        instead(2 * size, want, "2sbh is what checkpointing keeps", "Here nothing is dropped."),
    ]


def _compare_model(activations, name, m, batch, sequence, checkpointing):
    what = (f"{name}, {batch} x {sequence} tokens, "
            f"{'with' if checkpointing else 'without'} checkpointing")
    said = number(activations(m, batch, sequence, checkpointing), what)
    size = batch * sequence * m.hidden
    layer, logits = 34 * size, 4 * batch * sequence * m.vocabulary
    want = model_activations(m, batch, sequence, checkpointing)
    compare(said, want, what, "bytes",
            _model_slips(m, size, layer, logits, want, checkpointing),
            "What all layers keep, and what comes on top at the fullest moment.")


def model_activations(m, batch, sequence, checkpointing) -> int:
    """Bytes at the fullest moment, as the notebook counts them: what all layers keep, and on top
    the fp32 logits or, with checkpointing, one whole layer, whichever is more."""
    size = batch * sequence * m.hidden
    layer, logits = 34 * size, 4 * batch * sequence * m.vocabulary
    if checkpointing:
        return 2 * size * m.layers + max(layer, logits)
    return layer * m.layers + logits


def _model_slips(m, size, layer, logits, want, checkpointing) -> list:
    both = 2 * size * m.layers + layer + logits
    kept = 2 * size * m.layers if checkpointing else layer * m.layers
    top = want - kept
    slips = [
        Slip(-top if logits == top else 0, "the logits are missing",
             "Batch x sequence x vocabulary numbers in fp32."),
        Slip(-logits / 2 if logits == top else 0, "the logits are counted in 16 bits",
             "The loss needs them in fp32."),
        Slip((1 - m.layers) * (kept // m.layers), "only one layer is counted", "m.layers keep."),
    ]
    if not checkpointing:
        return slips
    return [*slips,
            instead(both, want, "logits and a layer that is computed again are never there "
                    "together", "The logits are gone when backward reaches the layers: take max."),
            instead(layer * m.layers + logits, want, "nothing was dropped",
                    "With checkpointing a layer keeps its input alone, 2sbh."),
            Slip(-kept / 2, "a layer's input is counted in elements", "In 16 bits: 2sbh bytes."),
            Slip(-top, "what comes on top of the checkpoints is missing",
                 "At the loss it is the logits, later one layer that is computed again."),
            instead(2 * size * m.layers + logits, want, "the layer that is computed again is "
                    "missing", "One layer at a time is whole again, 34sbh."),
            instead(2 * size * m.layers + layer, want, "the logits are missing",
                    "Batch x sequence x vocabulary numbers in fp32.")]


@check("1.5")
def check_step_flops(step_flops):
    """FLOPs of a step against those that torch counts in a real stack of linear layers."""
    takes(step_flops, ("parameters", "tokens", "checkpointing"))
    dice = random.Random()
    for checkpointing in (False, True):
        widths = tuple(dice.randint(3, 30) for _ in range(dice.randint(3, 5)))
        tokens = dice.randint(2, 50)
        parameters, real = truth.counted_flops(widths, tokens, checkpointing)
        what = (f"{parameters} parameters, {tokens} tokens, "
                f"{'with' if checkpointing else 'without'} checkpointing")
        said = number(step_flops(parameters, tokens, checkpointing), what)
        once = parameters * tokens
        if not close(said, real):
            raise _not_the_flops(said, real, once, what, checkpointing)
    return "the FLOPs that torch counts in real layers: 6 per parameter and token, 8 if recomputed"


def _not_the_flops(said, real, once, what, checkpointing) -> Wrong:
    words = f"{what}: torch counts {real:,} FLOPs, your formula says {said:,.10g}"
    known_slips = {
        2 * once: ("that is forward alone", "Backward makes two products where forward makes one."),
        4 * once: ("forward and backward count as much" if not checkpointing else
                   "that is backward alone",
                   "Backward makes two products for each one of forward: for the layer's input "
                   "and for its weight."),
        6 * once: ("nothing is computed again", "Checkpointing runs forward a second time."),
        7.98 * once: ("a third more is 4/3, not 1.33", "Forward twice and backward: 2 + 2 + 4."),
        8 * once: ("forward runs twice, though nothing is dropped here", "Ask `checkpointing`."),
        12 * once: ("the whole step is done twice", "Only forward runs again, not backward."),
        10 * once: ("backward is computed again", "Only forward runs again."),
        real / 2: ("a multiplication and an addition are two operations", "2 per parameter."),
    }
    for value, (slip, hint) in known_slips.items():
        if close(said, value):
            return Wrong(f"{words}: {slip}", hint)
    return Wrong(f"{words}, {said / real:.4g}x",
                 "2 per parameter and token in forward, twice that in backward.")

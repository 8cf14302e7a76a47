"""Exercise 1.4: what forward saves, of a layer and of a model."""

import random
from dataclasses import replace

from labs.exercises.numbers import Cause, judge_number, pairs, require_signature
from labs.exercises.verdicts import check
from labs.memory_math.ground_truth import random_sizes, saved_bytes
from labs.predictions.parameters import Shape, shape_of
from labs.training import hf_configs

SHOWN = (3, 96, 128, 4)  # batch, sequence, hidden, heads of the block that the notebook shows
LOGIT = 12  # bytes at the loss's backward: log-softmax, its gradient, the logits' gradient, in fp32


@check("1.4")
def check_activations(layer_activations, activations):
    """A layer's bytes against a real block's saved tensors, a model's against sums of layers."""
    require_signature(layer_activations, ("batch", "sequence", "hidden", "heads", "fused"))
    require_signature(activations, ("m", "batch", "sequence", "checkpointing"))
    # Random sizes reject an answer that fits only the block in the notebook.
    for sizes in (SHOWN, random_sizes(), random_sizes()):
        for fused in (True, False):  # what is wrong without scores is found without them
            _check_layer(layer_activations, *sizes, fused)
    for name, m in _models():
        for batch, sequence in ((1, 1024), (random.randint(2, 9), 8 * random.randint(20, 99))):
            for checkpointing in (False, True):
                _check_model(activations, name, m, batch, sequence, checkpointing)
    batch, sequence, _, heads = SHOWN
    share = statistics_bytes(batch, sequence, heads, True) / saved_bytes(*SHOWN, True)
    return ("to the byte what real GPT-2 blocks save, except for the statistics of norms and "
            f"softmax: {100 * share:.1f} % of the block that was shown")


def _models() -> list[tuple[str, Shape]]:
    """Known models, and one whose layer exceeds its logits: it rejects answers without the
    maximum."""
    known = [(name, shape_of(hf_configs.config(name))) for name in
             ("GPT-2", "Llama-3-8B", "Llama-2-7B")]
    return [*known, ("a GPT-2 over bytes", replace(known[0][1], vocabulary=256))]


def statistics_bytes(batch: int, sequence: int, heads: int, fused: bool) -> int:
    """Bytes that the formula leaves out: two numbers in 16 bits per token and norm, and fused
    attention's one in fp32 per token and head."""
    return 8 * batch * sequence + (4 * batch * heads * sequence if fused else 0)


def _check_layer(layer_activations, batch, sequence, hidden, heads, fused):
    what = (f"a real block, {batch} x {sequence} tokens, hidden {hidden}, {heads} heads, "
            f"{'fused' if fused else 'eager'} attention")
    expected = (saved_bytes(batch, sequence, hidden, heads, fused)
                - statistics_bytes(batch, sequence, heads, fused))
    judge_number(layer_activations(batch, sequence, hidden, heads, fused), expected,
                 _layer_causes(batch, sequence, hidden, heads, fused, expected), what, "bytes",
                 "Add up the tensors of lab.show_saved_tensors, in units of s·b·h.")


def _layer_causes(b, s, h, a, fused, real) -> list[Cause]:
    size, scores = s * b * h, 5 * a * s * s * b
    a_mask = 0 if fused else scores // 5
    causes = [
        Cause("scores_inside_attention", 34 * size,
              "the scores inside attention, 5as/h, are missing",
              "They grow with the square of the sequence."),
        Cause("scores_counted_for_one_sequence", real - (not fused) * (b - 1) * 5 * a * s * s,
              "the scores are counted for one sequence", "There are a·b·s² of them: b sequences."),
        Cause("mask_scores_missing", real - a_mask, "the mask of the scores is missing",
              "It has a byte for each score."),
        Cause("mask_scores_counted_two_bytes", real + a_mask,
              "the mask of the scores is counted with two bytes",
              "A mask has one byte for each score."),
        Cause("dropout_mask_missing", real - size, "a dropout mask is missing",
              "Each has one byte for each of s·b·h numbers."),
        Cause("two_dropout_masks", real - 2 * size,
              "two dropout masks, or one tensor in 16 bits, are missing",
              "lab.show_saved_tensors lists them all."),
        Cause("norms_statistics_counted", real + 8 * b * s, "the norms' statistics are counted",
              "Leave them out."),
        Cause("statistics_counted", real + statistics_bytes(b, s, a, fused),
              "the statistics are counted", "Leave them out."),
        Cause("fused_attention_never_writes", 34 * size + scores,
              "fused attention never writes the scores out",
              "Leave 5as/h out where `fused` is True."),
        Cause("counted_in_elements", 2 * real,
              "2x: that is as if 34 counted elements; it counts bytes",
              "sbh(34 + 5as/h) is in bytes already."),
        Cause("half_counted_in_16_bit", real / 2, "half: counted in 16-bit elements",
              "The answer is in bytes."),
        Cause("batch_missing", real / b, "the batch is missing", "Every sequence of it is saved."),
        Cause("inputs_missing", real - 10 * size, "10sbh is missing: two norms' inputs, and what "
              "attention's and the feed-forward part's outputs save",
              "lab.show_saved_tensors lists them all.")]
    return [*causes, Cause("checkpoint_only", 2 * size,
                           "2sbh is what checkpointing keeps", "Here nothing is dropped."),
            *pairs(causes, real)]


def _check_model(activations, name, m, batch, sequence, checkpointing):
    what = (f"{name}, {batch} x {sequence} tokens, "
            f"{'with' if checkpointing else 'without'} checkpointing")
    expected = model_activations(m, batch, sequence, checkpointing)
    judge_number(activations(m, batch, sequence, checkpointing), expected,
                 _model_causes(m, batch * sequence, checkpointing, expected), what, "bytes",
                 "What all layers keep, and what comes on top at the peak.")


def model_activations(m: Shape, batch: int, sequence: int, checkpointing: bool) -> int:
    """Bytes of activations at the peak, as the notebook counts them: what all layers keep, and on
    top the loss's 12 bytes for each logit or, with checkpointing, one whole layer, whichever is
    more."""
    size = batch * sequence * m.hidden
    layer, logits = 34 * size, LOGIT * batch * sequence * m.vocabulary
    if checkpointing:
        return 2 * size * m.layers + max(layer, logits)
    return layer * m.layers + logits


_LOGITS = ("At the peak the loss holds three fp32 numbers, 12 bytes, for each of batch x sequence "
           "x vocabulary logits.")


def _model_causes(m, tokens, checkpointing, real) -> list[Cause]:
    layer, logits = 34 * tokens * m.hidden, LOGIT * tokens * m.vocabulary
    inputs = 2 * tokens * m.hidden * m.layers  # what checkpointing keeps
    kept = inputs if checkpointing else layer * m.layers
    top = real - kept
    causes = [
        Cause("logits_missing", real - (logits == top) * logits, "the logits are missing", _LOGITS),
        *(Cause("logits_counted_bytes", real - (logits == top) * (LOGIT - counted) * logits / LOGIT,
                f"the logits are counted with {counted} bytes each", _LOGITS)
          for counted in (1, 2, 4, 6, 8, 10, 16)),
        Cause("only_one_layer_counted", top + kept // m.layers, "only one layer is counted",
              "There are m.layers of them.")]
    if not checkpointing:
        return causes + pairs(causes, real)
    causes += [
        Cause("layer_input_counted_in_elements", real - kept / 2,
              "a layer's input is counted in elements", "In 16 bits: 2sbh bytes."),
        Cause("peak_beside_checkpoints_missing", kept,
              "what comes on top of the checkpoints is missing",
              "At the loss it is the logits, later one layer that is computed again.")]
    return [
        *causes,
        Cause("logits_recomputed_layer_never", inputs + layer + logits,
              "the logits and the recomputed layer are never there together",
              "The logits are gone when backward reaches the layers: take max."),
        Cause("nothing_dropped", layer * m.layers + logits, "nothing was dropped",
              "With checkpointing a layer keeps its input alone, 2sbh."),
        Cause("layer_computed_again_missing", inputs + logits,
              "the layer that is computed again is missing",
              "One layer at a time is whole again, 34sbh."),
        Cause("logits_missing", inputs + layer, "the logits are missing", _LOGITS),
        *pairs(causes, real)]

"""What the check of exercise 1.4 must reject, and what it must accept."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))


def changed(m, **sizes):
    """The same sizes but for these."""
    return replace(m, **sizes)


# 1.4 layer_activations and activations


class Layer:
    def no_scores(batch, sequence, hidden, heads, fused):
        return 34 * sequence * batch * hidden

    def scores_always(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, heads, False)

    def elements(batch, sequence, hidden, heads, fused):
        return 2 * right.layer_activations(batch, sequence, hidden, heads, fused)

    def half(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, heads, fused) / 2

    def no_batch(batch, sequence, hidden, heads, fused):
        return right.layer_activations(1, sequence, hidden, heads, fused)

    def twenty_four(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, heads, fused) \
            - 10 * sequence * batch * hidden

    def checkpointed(batch, sequence, hidden, heads, fused):
        return 2 * sequence * batch * hidden

    def of_the_block_that_was_shown(batch, sequence, hidden, heads, fused):
        return sequence * batch * hidden * (34 if fused else 44)

    def scores_of_one_sequence(batch, sequence, hidden, heads, fused):
        return 34 * sequence * batch * hidden + (0 if fused else 5 * heads * sequence**2)

    def no_mask_of_scores(batch, sequence, hidden, heads, fused):
        return 34 * sequence * batch * hidden + (0 if fused else 4) * heads * batch * sequence**2

    def scores_in_16_bits(batch, sequence, hidden, heads, fused):
        return 34 * sequence * batch * hidden + (0 if fused else 6) * heads * batch * sequence**2

    def no_masks(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, heads, fused) \
            - 2 * sequence * batch * hidden

    def with_statistics(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, heads, fused) \
            + 8 * sequence * batch

    def fused_has_no_attention(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, heads, fused) \
            - (10 * sequence * batch * hidden if fused else 0)

    def with_one_head(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, 1, fused)


class Whole:
    def no_logits(m, batch, sequence, checkpointing):
        return right.activations(changed(m, vocabulary=0), batch, sequence, checkpointing)

    def logits_in_16_bits(m, batch, sequence, checkpointing):
        return right.activations(m, batch, sequence, checkpointing) - (
            0 if checkpointing else 10 * batch * sequence * m.vocabulary)

    def fp32_logits_alone(m, batch, sequence, checkpointing):
        layer = right.layer_activations(batch, sequence, m.hidden, m.heads, True)
        logits = 4 * batch * sequence * m.vocabulary
        if not checkpointing:
            return m.layers * layer + logits
        return 2 * m.layers * batch * sequence * m.hidden + max(layer, logits)

    def without_the_last_gradient(m, batch, sequence, checkpointing):
        return right.activations(m, batch, sequence, checkpointing) - (
            0 if checkpointing else 4 * batch * sequence * m.vocabulary)

    def one_layer(m, batch, sequence, checkpointing):
        return right.activations(changed(m, layers=1), batch, sequence, checkpointing)

    def both_on_top(m, batch, sequence, checkpointing):
        layer = right.layer_activations(batch, sequence, m.hidden, m.heads, True)
        logits = 12 * batch * sequence * m.vocabulary
        return right.activations(m, batch, sequence, checkpointing) + checkpointing * min(
            layer, logits)

    def never_checkpointed(m, batch, sequence, checkpointing):
        return right.activations(m, batch, sequence, False)

    def only_checkpoints(m, batch, sequence, checkpointing):
        if not checkpointing:
            return right.activations(m, batch, sequence, False)
        return 2 * m.layers * batch * sequence * m.hidden

    def no_layer_again(m, batch, sequence, checkpointing):
        if not checkpointing:
            return right.activations(m, batch, sequence, False)
        return batch * sequence * (2 * m.layers * m.hidden + 12 * m.vocabulary)

    def inputs_in_elements(m, batch, sequence, checkpointing):
        return right.activations(m, batch, sequence, checkpointing) - (
            checkpointing * m.layers * batch * sequence * m.hidden)

    def only_the_layer_again(m, batch, sequence, checkpointing):
        if not checkpointing:
            return right.activations(m, batch, sequence, False)
        return batch * sequence * m.hidden * (2 * m.layers + 34)


WRONG = [
    *(((layer, right.activations), words) for layer, words in [
        (Layer.no_scores, "scores_inside_attention"),
        (Layer.scores_always, "fused_attention_never_writes"),
        (Layer.elements, "counted_in_elements that"),
        (Layer.half, "half_counted_in_16_bit"),
        (Layer.no_batch, "batch_missing"),
        (Layer.twenty_four, "inputs_missing"),
        (Layer.checkpointed, "checkpoint_only"),
        (Layer.of_the_block_that_was_shown, "mask_scores_missing"),
        (Layer.scores_of_one_sequence, "scores_counted_for_one_sequence"),
        (Layer.no_mask_of_scores, "mask_scores_missing"),
        (Layer.scores_in_16_bits, "mask_scores_counted_two_bytes"),
        (Layer.no_masks, "two_dropout_masks"),
        (Layer.with_statistics, "norms_statistics_counted"),
        (Layer.fused_has_no_attention, "inputs_missing"),
        (Layer.with_one_head, "wrong_number attention")]),
    *(((right.layer_activations, whole), words) for whole, words in [
        (Whole.no_logits, "logits_missing without"),
        (Whole.logits_in_16_bits, "logits_counted_bytes"),
        (Whole.fp32_logits_alone, "logits_counted_bytes"),
        (Whole.without_the_last_gradient, "logits_counted_bytes"),
        (Whole.one_layer, "only_one_layer_counted"),
        (Whole.both_on_top, "logits_recomputed_layer_never"),
        (Whole.never_checkpointed, "nothing_dropped"),
        (Whole.only_checkpoints, "logits_missing"),
        (Whole.no_layer_again, "layer_computed_again_missing"),
        (Whole.inputs_in_elements, "layer_input_counted_in_elements"),
        (Whole.only_the_layer_again, "logits_missing")])]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_activations(*answers), expected)


# right, and written in another way


class Right:
    def layer_by_parts(batch, sequence, hidden, heads, fused):
        tokens = sequence * batch
        attention, feed_forward, norms = 11 * tokens * hidden, 19 * tokens * hidden, 4
        scores = [5, 0][fused] * heads * sequence * tokens
        return attention + scores + feed_forward + norms * tokens * hidden

    def activations_by_lists(m, batch, sequence, checkpointing):
        layer = Right.layer_by_parts(batch, sequence, m.hidden, m.heads, True)
        logits = batch * sequence * m.vocabulary * 12
        kept = sum([layer / 17 if checkpointing else layer] * m.layers)
        return kept + (max(layer, logits) if checkpointing else logits)

    def layer_of_numpy(batch, sequence, hidden, heads, fused):
        return np.float64(right.layer_activations(batch, sequence, hidden, heads, fused))

    def activations_as_tensor(m, batch, sequence, checkpointing):
        return torch.tensor([right.activations(m, batch, sequence, checkpointing)])


@pytest.mark.parametrize("answers", [
    [Right.layer_of_numpy, Right.activations_as_tensor],
    [right.layer_activations, right.activations],
    [Right.layer_by_parts, Right.activations_by_lists]])
def test_a_right_answer_passes(answers):
    verdict = lab.check_activations(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_activations, "1.4", functions=2)

"""What the checks of notebook 01 must reject, with the words that must say why; and what they must
accept."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")

right = definitions("01_memory_math", PRESET=preset("laptop"))
MODELS = lab.model_sizes()


def changed(m, **sizes):
    """The same sizes but for these."""
    return replace(m, **sizes)


# 1.1 block_parameters and model_parameters


class Block:
    def table(m):
        return {(768, 12): 7_087_872, (4096, 32): 218_112_000}[m.hidden, m.layers]

    def table_of_all_that_are_known(m):
        known = {(k.hidden, k.ffn): right.block_parameters(k) for k in MODELS.values()}
        return known[m.hidden, m.ffn]

    def table_with_a_default(m):
        known = {(k.hidden, k.ffn): right.block_parameters(k) for k in MODELS.values()}
        return known.get((m.hidden, m.ffn), 12 * m.hidden**2)

    def twelve_h_squared(m):
        return 12 * m.hidden**2

    def all_heads_have_keys(m):
        return right.block_parameters(changed(m, kv_heads=m.heads))

    def no_biases(m):
        return right.block_parameters(
            changed(m, qkv_bias=False, out_bias=False, mlp_bias=False))

    def no_bias_of_queries(m):
        return right.block_parameters(changed(m, qkv_bias=False))

    def biases_everywhere(m):
        return right.block_parameters(changed(m, qkv_bias=True))

    def no_bias_of_output(m):
        return right.block_parameters(changed(m, out_bias=False))

    def two_biases(m):
        return right.block_parameters(m) - (m.family != "gpt2") * m.mlp_bias * m.ffn

    def no_norms(m):
        return right.block_parameters(m) - m.hidden * (4 if m.family == "gpt2" else 2)

    def norms_without_biases(m):
        return right.block_parameters(m) - (2 * m.hidden if m.family == "gpt2" else 0)

    def layernorm_everywhere(m):
        return right.block_parameters(m) + (0 if m.family == "gpt2" else 2 * m.hidden)

    def two_matrices(m):
        return right.block_parameters(m) - (0 if m.family == "gpt2" else m.hidden * m.ffn)

    def three_matrices(m):
        return right.block_parameters(m) + (m.hidden * m.ffn if m.family == "gpt2" else 0)

    def four_times_as_wide(m):
        return right.block_parameters(m) + (
            2 if m.family == "gpt2" else 3) * m.hidden * (4 * m.hidden - m.ffn)

    def heads_share_hidden(m):
        return right.block_parameters(changed(m, head_dim=m.hidden // m.heads))

    def in_bytes(m):
        return 4 * right.block_parameters(m)

    def one_norm(m):
        return right.block_parameters(m) - m.hidden * (2 if m.family == "gpt2" else 1)

    def no_output_matrix(m):
        return right.block_parameters(m) - m.heads * m.head_dim * m.hidden

    def keys_without_values(m):
        return right.block_parameters(m) - (m.hidden + m.qkv_bias) * m.kv_heads * m.head_dim

    def biases_as_wide_as_the_model(m):
        wide = (m.heads + 2 * m.kv_heads) * m.head_dim
        return right.block_parameters(m) + m.qkv_bias * (3 * m.hidden - wide)

    def bias_of_down_alone(m):
        return right.block_parameters(m) - m.mlp_bias * m.ffn * (1 if m.family == "gpt2" else 2)

    def rotary_frequencies(m):
        return right.block_parameters(m) + (0 if m.family == "gpt2" else m.head_dim // 2)

    def of_all_layers(m):
        return m.layers * right.block_parameters(m)

    def prints(m):
        print(right.block_parameters(m))

    def a_word(m):
        return "many"


def blocks_of(block):
    """A model formula that is right, around another block's."""
    def model(m):
        return right.model_parameters(m) + m.layers * (block(m) - right.block_parameters(m))

    return block, model


class Model:
    def head_always(m):
        return right.model_parameters(changed(m, tied=False))

    def head_never(m):
        return right.model_parameters(changed(m, tied=True))

    def no_positions(m):
        return right.model_parameters(changed(m, positions=0))

    def no_final_norm(m):
        return right.model_parameters(m) - m.hidden * (2 if m.family == "gpt2" else 1)

    def final_norm_without_bias(m):
        return right.model_parameters(m) - (m.hidden if m.family == "gpt2" else 0)

    def one_block(m):
        return right.model_parameters(changed(m, layers=1))

    def only_blocks(m):
        return m.layers * right.block_parameters(m)

    def positions_twice(m):
        return right.model_parameters(m) + m.positions * m.hidden

    def bias_of_the_head(m):
        return right.model_parameters(m) + m.vocabulary

    def two_final_norms(m):
        return right.model_parameters(m) + m.hidden * (2 if m.family == "gpt2" else 1)

    def in_billions(m):
        return right.model_parameters(m) / 1e9

    def round_number(m):
        return round(right.model_parameters(m), -6)

    def one_argument_more(m, bias):
        return right.model_parameters(m)


WRONG = {}
WRONG[lab.check_parameters] = [
    *((blocks_of(block), words) for block, words in [
        (Block.table, "wrong_number 1.078x"),
        (Block.table_of_all_that_are_known, "raised_KeyError"),
        (Block.table_with_a_default, "wrong_number sizes"),
        (Block.twelve_h_squared,
         "all_biases_missing norms"),
        (Block.all_heads_have_keys,
         "keys_values_counted_wide_queries"),
        (Block.no_biases, "all_biases_missing"),
        (Block.no_bias_of_queries, "biases_queries"),
        (Block.biases_everywhere, "queries_keys_values_no_bias"),
        (Block.no_bias_of_output, "bias_attention_output_matrix"),
        (Block.two_biases, "one_bias_feed_forward_part"),
        (Block.no_norms, "two_norms_missing"),
        (Block.norms_without_biases, "half_norms_parameters_missing"),
        (Block.layernorm_everywhere, "norms_no_bias"),
        (Block.two_matrices, "one_matrix_feed_forward_part"),
        (Block.three_matrices, "one_matrix_too_in_feed"),
        (Block.four_times_as_wide, "feed_forward_part_taken_4"),
        (Block.heads_share_hidden, "head_dim_taken_hidden_heads"),
        (Block.in_bytes, "wrong_number"),
        (Block.one_norm, "half_norms_parameters_missing"),
        (Block.no_output_matrix, "attention_output_matrix_missing"),
        (Block.keys_without_values, "keys_values_missing"),
        (Block.biases_as_wide_as_the_model, "wrong_number Qwen2-0.5B"),
        (Block.bias_of_down_alone, "two_norms_missing"),
        (Block.rotary_frequencies, "wrong_number"),
        (Block.of_all_layers, "wrong_number 12x"),
        (Block.prints, "not_a_number"),
        (Block.a_word, "not_a_number str")]),
    *(((right.block_parameters, model), words) for model, words in [
        (Model.head_always, "head_counted"),
        (Model.head_never, "embedding_head_vocabulary_x_hidden"),
        (Model.no_positions, "learned_positions_missing"),
        (Model.no_final_norm, "final_norm_missing"),
        (Model.final_norm_without_bias, "final_norm_bias_missing"),
        (Model.one_block, "only_one_block_counted"),
        (Model.only_blocks, "wrong_number"),
        (Model.in_billions, "wrong_number"),
        (Model.positions_twice, "wrong_number 1.006x"),
        (Model.bias_of_the_head, "wrong_number"),
        (Model.two_final_norms, "wrong_number"),
        (Model.round_number, "wrong_number"),
        (Model.one_argument_more, "wrong_signature")])]


# 1.2 bytes_per_parameter


class Bytes:
    def always_fp32(weights, gradients, moments, master):
        return 4, 4, 8

    def mixed_precision(weights, gradients, moments, master):
        return 2, 2, 12

    def table(weights, gradients, moments, master):
        size = {torch.float32: 4, torch.bfloat16: 2}
        return size[weights], size[gradients], 2 * size[moments] + 4 * master

    def master_is_a_weight(weights, gradients, moments, master):
        return weights.itemsize + 4 * master, gradients.itemsize, 2 * moments.itemsize

    def one_moment(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, moments.itemsize + 4 * master

    def master_forgotten(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 2 * moments.itemsize

    def master_always(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 2 * moments.itemsize + 4

    def moments_as_weights(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 2 * weights.itemsize + 4 * master

    def moments_as_fp32(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, 8 + 4 * master

    def gradients_as_weights(weights, gradients, moments, master):
        return weights.itemsize, weights.itemsize, 2 * moments.itemsize + 4 * master

    def master_as_moments(weights, gradients, moments, master):
        return weights.itemsize, gradients.itemsize, (2 + master) * moments.itemsize

    def master_as_weights(weights, gradients, moments, master):
        state = 2 * moments.itemsize + master * weights.itemsize
        return weights.itemsize, gradients.itemsize, state

    def a_sum(weights, gradients, moments, master):
        return weights.itemsize + gradients.itemsize + 2 * moments.itemsize + 4 * master

    def in_bits(weights, gradients, moments, master):
        return weights.itemsize * 8, gradients.itemsize * 8, moments.itemsize * 16 + 32 * master


class Names:
    def the_first(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, billions, recipes)[:1]

    def one_name(gigabytes, billions, recipes):
        return next(iter(right.recipes_behind(gigabytes, billions, recipes)), "none")

    def none_for_none(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, billions, recipes) or None

    def exactly(gigabytes, billions, recipes):
        return [name for name, types in recipes.items()
                if sum(right.bytes_per_parameter(*types)) == gigabytes / billions]

    def nearly(gigabytes, billions, recipes):
        return [name for name, types in recipes.items() if abs(
            sum(right.bytes_per_parameter(*types)) * billions - gigabytes) < 0.1 * gigabytes]

    def of_7b(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, 7, recipes)

    def weights_alone(gigabytes, billions, recipes):
        return [name for name, types in recipes.items()
                if round(types[0].itemsize * billions) == gigabytes]

    def in_gib(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes * 2**30 / 1e9, billions, recipes)

    def types(gigabytes, billions, recipes):
        return [recipes[name] for name in right.recipes_behind(gigabytes, billions, recipes)]

    def the_notebooks(gigabytes, billions, recipes):
        return right.recipes_behind(gigabytes, billions, right.RECIPES)

    def rounded_down(gigabytes, billions, recipes):
        return [name for name, types in recipes.items()
                if int(billions * sum(right.bytes_per_parameter(*types))) == gigabytes]


NAMES = [
    (Names.the_first, "missing_entry master'"),
    (Names.one_name, "wrong_type moments'"),
    (Names.none_for_none, "wrong_type nothing"),
    (Names.exactly, "missing_entry 'bf16'"),
    (Names.nearly, "extra_entry|missing_entry"),
    (Names.of_7b, "missing_entry 156"),
    (Names.weights_alone, "missing_entry"),
    (Names.in_gib, "missing_entry"),
    (Names.types, "unknown_name"),
    (Names.the_notebooks, "missing_entry|unknown_name"),
    (Names.rounded_down, "missing_entry 'bf16'")]

WRONG[lab.check_bytes_per_parameter] = [
    *(((answer, right.recipes_behind), words) for answer, words in [
    (Bytes.always_fp32, "wrong_number bfloat16"),
    (Bytes.mixed_precision, "wrong_number"),
    (Bytes.table, "raised_KeyError"),
    (Bytes.master_is_a_weight, "master_copy_counted_among_weights"),
    (Bytes.one_moment, "only_one_moment_counted"),
    (Bytes.master_forgotten, "fp32_master_copy_missing"),
    (Bytes.master_always, "no_master_copy"),
    (Bytes.moments_as_weights, "moments_taken_in_weights_type"),
    (Bytes.moments_as_fp32, "moments_taken_fp32"),
    (Bytes.gradients_as_weights, "weights_type"),
    (Bytes.master_as_moments, "master_copy_taken_in_moments"),
    (Bytes.master_as_weights, "master_copy_taken_in_weights"),
    (Bytes.a_sum, "wrong_count"),
    (Bytes.in_bits, "wrong_number")]),
    *(((right.bytes_per_parameter, answer), words) for answer, words in NAMES)]


# 1.3 per_rank


def shares(*first):
    """A function that divides parameters, gradients and optimizer state from these stages on."""
    def per_rank(count, recipe, stage, ranks):
        return [count * size / (ranks if stage >= at else 1)
                for size, at in zip(recipe, first, strict=True)]

    return per_rank


class Rank:
    def gradients_forgotten(count, recipe, stage, ranks):
        p, g, o = right.per_rank(count, recipe, stage, ranks)
        return p, g if stage < 2 else 0, o

    def one_parameter(count, recipe, stage, ranks):
        return right.per_rank(1, recipe, stage, ranks)

    def table(count, recipe, stage, ranks):
        known = {(7.5e9, 64), (70e9, 8)}
        if (count, ranks) not in known:
            raise KeyError(count)
        return right.per_rank(count, recipe, stage, ranks)

    def known_recipe(count, recipe, stage, ranks):
        return right.per_rank(count, (2, 2, 8 if ranks == 8 else 12), stage, ranks)

    def a_sum(count, recipe, stage, ranks):
        return sum(right.per_rank(count, recipe, stage, ranks))

    def rounded_down(count, recipe, stage, ranks):
        return [int(value) for value in right.per_rank(count, recipe, stage, ranks)]

    def in_gb(count, recipe, stage, ranks):
        return [value / 1e9 for value in right.per_rank(count, recipe, stage, ranks)]


class Fewest:
    def everything_divided(count, recipe, stage, room):
        return math.ceil(count * sum(recipe) / room)

    def rounded_down(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found and max(1, found - 1)

    def one_more(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found and found + (stage > 0)

    def not_rounded(count, recipe, stage, room):
        divided = sum(count * size for size, at in zip(recipe, (3, 2, 1), strict=True)
                      if stage >= at)
        left = room - count * sum(recipe) + divided
        return None if left < 0 or left == 0 < divided else divided / left if divided else 1

    def negative(count, recipe, stage, room):
        divided = sum(count * size for size, at in zip(recipe, (3, 2, 1), strict=True)
                      if stage >= at)
        left = room - count * sum(recipe) + divided
        return math.ceil(divided / left) if left else 1

    def infinity(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return float("inf") if found is None else found

    def zero_for_none(count, recipe, stage, room):
        return right.fewest_ranks(count, recipe, stage, room) or 0

    def strictly(count, recipe, stage, room):
        for ranks in range(1, 2000):
            if sum(right.per_rank(count, recipe, stage, ranks)) < room:
                return ranks
        return None

    def always_stage_3(count, recipe, stage, room):
        return right.fewest_ranks(count, recipe, 3, room)

    def at_least_two(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found and max(2, found)

    def powers_of_two(count, recipe, stage, room):
        for power in range(20):
            if sum(right.per_rank(count, recipe, stage, 2**power)) <= room:
                return 2**power
        return None

    def none_at_once(count, recipe, stage, room):
        return None

    def kept_counted_twice(count, recipe, stage, room):
        kept = sum(count * size for size, at in zip(recipe, (3, 2, 1), strict=True) if stage < at)
        return math.ceil(count * sum(recipe) / (room - kept)) if kept < room else None

    def a_tuple(count, recipe, stage, room):
        return right.fewest_ranks(count, recipe, stage, room), stage


FEWEST = [
    (Fewest.everything_divided, "impossible_room"),
    (Fewest.rounded_down, "one_rank_too_few"),
    (Fewest.one_more, "equal_does_not_fit"),
    (Fewest.not_rounded, "everything_divided"),
    (Fewest.negative, "impossible_room"),
    (Fewest.infinity, "impossible_room"),
    (Fewest.zero_for_none, "impossible_room"),
    (Fewest.strictly, "equal_does_not_fit"),
    (Fewest.always_stage_3, "impossible_room"),
    (Fewest.at_least_two, "equal_does_not_fit 10B"),
    (Fewest.powers_of_two, "wrong_number fewest"),
    (Fewest.none_at_once, "nothing_returned"),
    (Fewest.kept_counted_twice, "undivided_part_twice"),
    (Fewest.a_tuple, "impossible_room tuple")]

WRONG[lab.check_per_rank] = [
    *(((answer, right.fewest_ranks), words) for answer, words in [
    (shares(9, 9, 9), "not_divided 560"),
    (shares(1, 1, 1),
     "divided_though_stage_keeps"),
    (shares(0, 0, 0), "divided_though_stage_keeps"),
    (shares(9, 9, 1), "not_divided"),
    (shares(9, 2, 1), "not_divided"),
    (shares(1, 2, 3), "divided_though_stage_keeps"),
    (Rank.gradients_forgotten,
     "nothing_counted missing"),
    (Rank.one_parameter,
     "wrong_number 2e-09"),
    (Rank.table, "raised_KeyError"),
    (Rank.known_recipe, "wrong_number job"),
    (Rank.a_sum, "wrong_count"),
    (Rank.rounded_down,
     "rounded"),
    (Rank.in_gb, "wrong_number")]),
    *(((right.per_rank, answer), words) for answer, words in FEWEST)]


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


WRONG[lab.check_activations] = [
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


# 1.5 step_flops

WRONG[lab.check_step_flops] = [((answer,), words) for answer, words in [
    (lambda b, x, h, t, c: 6 * (b + h) * t, "nothing_computed_again"),
    (lambda b, x, h, t, c: 8 * (b + h) * t, "forward_runs_twice"),
    (lambda b, x, h, t, c: (8 if c else 6) * (b + h) * t, "all_products_again"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * b * t * c, "last_product_again"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * (b - x + h) * t * c,
     "head_product_again|last_product_again"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * (b - x) * t, "forward_runs_twice"),
    (lambda b, x, h, t, c: (12 if c else 6) * (b + h) * t, "step_done_twice"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 6 * (b - x) * t * c, "backward_computed_again"),
    (lambda b, x, h, t, c: 4 * (b + h) * t + 2 * (b - x) * t * c, "backward_like_forward"),
    (lambda b, x, h, t, c: 2 * (b + h) * t, "forward_alone"),
    (lambda b, x, h, t, c: 3 * (b + h) * t + (b - x) * t * c, "one_flop_for_two"),
    (lambda b, x, h, t, c: 6 * b * t + 2 * (b - x) * t * c, "head_missing"),
    (lambda b, x, h, t, c: 6 * (b + x + h) * t + 2 * b * t * c,
     "last_matrices_counted_twice|forward_runs_twice"),
    (lambda b, x, h, t, c: (8 if c else 6) * (b + h), "wrong_number"),
    (lambda b, x, h, t, c: 4 / 3 if c else 1, "wrong_number"),
    (lambda b, x, h, t, c: None, "not_a_number"),
    (lambda p, t, c: 6 * p * t, "wrong_signature")]]


# 1.6 bytes_left


class Left:
    def no_overhead(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing,
                                gpu) + lab.overhead(ranks)

    def no_nccl(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing,
                                gpu) + lab.overhead(ranks) - lab.overhead(1)

    def no_activations(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing,
                                gpu) + right.activations(m, batch, sequence, checkpointing)

    def no_states(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, (0, 0, 0), stage, ranks, batch, sequence, checkpointing, gpu)

    def data_sheet(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing,
                                gpu) - gpu.usable + gpu.nominal

    def not_divided(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, 0, ranks, batch, sequence, checkpointing, gpu)

    def all_divided(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, 3, ranks, batch, sequence, checkpointing, gpu)

    def always_checkpointed(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, stage, ranks, batch, sequence, True, gpu)

    def what_is_missing(*job):
        return -right.bytes_left(*job)

    def what_is_needed(*job):
        return job[-1].usable - right.bytes_left(*job)

    def yes_or_no(*job):
        return right.bytes_left(*job) >= 0

    def all_sequences(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return right.bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu) + (
            right.activations(m, batch, sequence, checkpointing)
            - right.activations(m, batch * ranks, sequence, checkpointing))

    def parameters_alone(m, recipe, *job):
        return right.bytes_left(m, (recipe[0], 0, 0), *job)

    def nothing_below_zero(*job):
        return max(0, right.bytes_left(*job))

    def in_gb(*job):
        return right.bytes_left(*job) / 1e9

    def in_gib(*job):
        return right.bytes_left(*job) / 2**30

    def a_share(*job):
        return right.bytes_left(*job) / job[-1].usable

    def of_all_gpus(m, recipe, stage, ranks, *job):
        return right.bytes_left(m, recipe, stage, ranks, *job) + job[-1].usable * (ranks - 1)

    def twice_the_overhead(m, recipe, stage, ranks, *job):
        return right.bytes_left(m, recipe, stage, ranks, *job) - lab.overhead(ranks)

    def one_recipe(m, recipe, *job):
        return right.bytes_left(m, (2, 2, 8), *job)

    def blocks_alone(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        states = sum(right.per_rank(m.layers * right.block_parameters(m), recipe, stage, ranks))
        kept = right.activations(m, batch, sequence, checkpointing)
        return gpu.usable - lab.overhead(ranks) - states - kept

    def activations_divided(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        kept = right.activations(m, batch, sequence, checkpointing)
        return right.bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing,
                                gpu) + kept - kept / ranks


WRONG[lab.check_bytes_left] = [((answer,), words) for answer, words in [
    (Left.no_overhead, "cuda_nccl_take_missing"),
    (Left.no_nccl, "nccl_buffers_missing"),
    (Left.no_activations, "activations_missing"),
    (Left.no_states, "model_states_missing"),
    (Left.data_sheet, "data_sheet_capacity_not_cuda"),
    (Left.not_divided, "nothing_divided_among_ranks"),
    (Left.all_divided, "everything_divided_ranks"),
    (Left.always_checkpointed, "activations_if_checkpointing"),
    (Left.what_is_missing, "missing"),
    (Left.what_is_needed, "needed"),
    (Left.yes_or_no, "not_a_number bool"),
    (Left.all_sequences, "sequences_all_ranks_counted"),
    (Left.parameters_alone, "model_states_only_parameters"),
    (Left.nothing_below_zero, "nothing_left"),
    (Left.in_gb, "in_gb"), (Left.in_gib, "in_gib"),
    (Left.a_share, "share_gpu_memory"), (Left.of_all_gpus, "wrong_number 178.8"),
    (Left.twice_the_overhead, "wrong_number -78.6"),
    (Left.one_recipe, "wrong_number"), (Left.blocks_alone, "wrong_number -72.5"),
    (Left.activations_divided, "wrong_number -74.0")]]


# 1.7 rank_states


def states(**by_strategy):
    """A function of (count, ranks) for each strategy; the right answer where none is given."""
    def rank_states(count, strategy, ranks):
        answer = by_strategy.get(strategy)
        return answer(count, ranks) if answer else right.rank_states(count, strategy, ranks)

    return rank_states


WRONG[lab.check_rank_states] = [((answer,), words) for answer, words in [
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 0)),
     # or 4 bytes more, when gloo's thread frees a number unseen
     "nothing_counted buffers"),
    (states(DDP=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 0)),
     "divided_ranks parameters"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n * r / 2)), "wrong_number 1.5x"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 8 * n / r)), "wrong_number 0.66"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n / r)),
     "divided_ranks"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 2 * n)), "in_16_bits DDP"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 8 * n * (r - 1) / r)), "wrong_number 1.333x"),
    (states(FSDP2=lambda n, r: (4 * n, 4 * n, 8 * n, 0)),
     "no_such_copy"),
    (states(FSDP2=lambda n, r: (4 * n / 2, 4 * n / 2, 8 * n / 2, 0)),
     "divided_by_2"),
    (states(FSDP2=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 4 * n)),
     "no_such_copy"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 4 * n, 0)), "one_moment"),
    (states(DDP=lambda n, r: (4 * n, 0, 8 * n, 4 * n)), "nothing_counted"),
    (states(DDP=lambda n, r: (8 * n, 4 * n, 8 * n, 0)), "wrong_number"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n / r, 4 * n)),
     "divided_ranks optimizer"),
    (states(FSDP2=lambda n, r: (4 * n, 4 * n / r, 8 * n / r, 0)), "no_such_copy"),
    (states(FSDP2=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 4 * n / r)),
     "divided_ranks FSDP2"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 12 * n, 0)), "wrong_number"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n)), "no_such_copy"),
    (states(plain=lambda n, r: {"parameters": 4 * n}), "wrong_count dict"),
    (states(plain=lambda n, r: (n, n, 2 * n, 0)), "counted_in_elements"),
    (states(plain=lambda n, r: (2 * n, 2 * n, 4 * n, 0)), "in_16_bits"),
    (states(plain=lambda n, r: (4 * n, 0, 8 * n, 0)), "nothing_counted"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 9 * n, 0)), "wrong_number"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 8 * n)), "wrong_count tuple")]]


@pytest.mark.parametrize("check, answers, words", [
    (check, answers, words) for check, rows in WRONG.items() for answers, words in rows])
def test_a_wrong_answer_is_rejected_in_words(check, answers, words):
    verdict = check(*answers)
    assert_rejected(verdict, words)


def test_every_exercise_has_at_least_five_wrong_answers():
    assert all(len(rows) >= 5 for rows in WRONG.values())


# right, and written in another way


class Right:
    def block_by_matrices(m):
        wide, narrow = m.heads * m.head_dim, m.kv_heads * m.head_dim
        matrices = [(m.hidden, wide, m.qkv_bias), (m.hidden, narrow, m.qkv_bias),
                    (m.hidden, narrow, m.qkv_bias), (wide, m.hidden, m.out_bias),
                    (m.hidden, m.ffn, m.mlp_bias), (m.ffn, m.hidden, m.mlp_bias)]
        if m.family != "gpt2":
            matrices.append((m.hidden, m.ffn, m.mlp_bias))
        vectors = 4 if m.family == "gpt2" else 2
        return sum(a * b + b * bias for a, b, bias in matrices) + vectors * m.hidden

    def model_by_addition(m):
        total = m.vocabulary * m.hidden + m.positions * m.hidden
        for _ in range(m.layers):
            total += Right.block_by_matrices(m)
        if not m.tied:
            total += m.vocabulary * m.hidden
        return float(total + m.hidden + (m.hidden if m.family == "gpt2" else 0))

    def bytes_by_finfo(weights, gradients, moments, master):
        each = [torch.zeros((), dtype=kind).element_size() for kind in (weights, gradients)]
        return [*each, torch.zeros(2, dtype=moments).nbytes + [0, 4][master]]

    def per_rank_by_cases(count, recipe, stage, ranks):
        p, g, o = (size * count for size in recipe)
        if stage > 0:
            o /= ranks
        if stage > 1:
            g /= ranks
        if stage > 2:
            p /= ranks
        return [p, g, o]

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

    def left_in_one(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        count = Right.model_by_addition(m)
        needed = [count * recipe[i] / (ranks if stage > 2 - i else 1) for i in range(3)]
        needed += [right.activations(m, batch, sequence, checkpointing), lab.overhead(ranks)]
        return gpu.usable - sum(needed)

    def block_as_tensor(m):
        return torch.tensor(right.block_parameters(m))

    def model_of_numpy(m):
        return np.int64(right.model_parameters(m))

    def names_in_a_set(gigabytes, billions, recipes):
        return {name for name in recipes if abs(
            billions * sum(right.bytes_per_parameter(*recipes[name])) - gigabytes) <= 0.5}

    def names_one_by_one(gigabytes, billions, recipes):
        for name, (weights, gradients, moments, master) in recipes.items():
            each = weights.itemsize + gradients.itemsize + 2 * moments.itemsize + 4 * master
            if f"{each * billions:.0f}" == str(gigabytes):
                yield name

    def fewest_by_search(count, recipe, stage, room):
        if sum(right.per_rank(count, recipe, stage, 10**15)) > room + 1e-3:
            return None
        ranks = 1
        while sum(right.per_rank(count, recipe, stage, ranks)) > room:
            ranks += 1
            if ranks > 10**4:
                return None
        return ranks

    def bytes_as_tensor(weights, gradients, moments, master):
        return torch.tensor([weights.itemsize, gradients.itemsize, 2 * moments.itemsize]) + (
            torch.tensor([0, 0, 4]) * master)

    def bytes_as_array(weights, gradients, moments, master):
        return np.array([weights.itemsize, gradients.itemsize,
                         2 * moments.itemsize + 4 * bool(master)], dtype=np.uint8)

    def per_rank_in_float32(count, recipe, stage, ranks):
        divisors = torch.tensor([ranks if stage >= first else 1 for first in (3, 2, 1)])
        return torch.tensor(recipe, dtype=torch.float32) * count / divisors

    def per_rank_as_array(count, recipe, stage, ranks):
        return np.multiply(recipe, count) / np.where(np.array([3, 2, 1]) <= stage, ranks, 1)

    def per_rank_as_fractions(count, recipe, stage, ranks):
        return [Fraction(int(count) * size, ranks if stage >= first else 1)
                for size, first in zip(recipe, (3, 2, 1), strict=True)]

    def left_in_float32(*job):
        return torch.tensor(right.bytes_left(*job), dtype=torch.float32)

    def left_as_fraction(*job):
        return Fraction(right.bytes_left(*job))

    def states_as_array(count, strategy, ranks):
        return np.array(right.rank_states(count, strategy, ranks))

    def states_as_tensor(count, strategy, ranks):
        return torch.tensor(right.rank_states(count, strategy, ranks))

    def layer_of_numpy(batch, sequence, hidden, heads, fused):
        return np.float64(right.layer_activations(batch, sequence, hidden, heads, fused))

    def activations_as_tensor(m, batch, sequence, checkpointing):
        return torch.tensor([right.activations(m, batch, sequence, checkpointing)])

    def flops_by_phase(blocks, last, head, tokens, checkpointing):
        forward = 2 * tokens * np.array([blocks - last, last, head])
        total = 3 * forward
        if checkpointing:
            total[0] += forward[0]
        return total.sum()

    def fewest_of_numpy(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found if found is None else np.float64(found)

    def states_by_cases(count, strategy, ranks):
        size = 4 * count / (ranks if strategy == "FSDP2" else 1)
        return [size, size, 2 * size, size if strategy == "DDP" else 0]


@pytest.mark.parametrize("check, answers", [
    (lab.check_parameters, [right.block_parameters, right.model_parameters]),
    (lab.check_parameters, [Right.block_by_matrices, Right.model_by_addition]),
    (lab.check_parameters, [Right.block_by_matrices, right.model_parameters]),
    (lab.check_parameters, [Right.block_as_tensor, Right.model_of_numpy]),
    (lab.check_parameters, [lambda m: Fraction(right.block_parameters(m)), right.model_parameters]),
    (lab.check_parameters, [lambda m: np.array([right.block_parameters(m)]),
                            lambda m: torch.tensor(float(right.model_parameters(m)))]),
    (lab.check_bytes_per_parameter, [right.bytes_per_parameter, right.recipes_behind]),
    (lab.check_bytes_per_parameter, [Right.bytes_by_finfo, Right.names_in_a_set]),
    (lab.check_bytes_per_parameter, [right.bytes_per_parameter, Right.names_one_by_one]),
    (lab.check_bytes_per_parameter, [Right.bytes_as_tensor, right.recipes_behind]),
    (lab.check_bytes_per_parameter, [Right.bytes_as_array, right.recipes_behind]),
    (lab.check_per_rank, [right.per_rank, right.fewest_ranks]),
    (lab.check_per_rank, [Right.per_rank_in_float32, right.fewest_ranks]),
    (lab.check_per_rank, [Right.per_rank_as_array, right.fewest_ranks]),
    (lab.check_per_rank, [Right.per_rank_as_fractions, right.fewest_ranks]),
    (lab.check_activations, [Right.layer_of_numpy, Right.activations_as_tensor]),
    (lab.check_step_flops, [Right.flops_by_phase]),
    (lab.check_bytes_left, [Right.left_in_float32]),
    (lab.check_bytes_left, [Right.left_as_fraction]),
    (lab.check_rank_states, [Right.states_as_array]),
    (lab.check_rank_states, [Right.states_as_tensor]),
    (lab.check_per_rank, [shares(3, 2, 1), Right.fewest_by_search]),
    (lab.check_per_rank, [Right.per_rank_by_cases, Right.fewest_of_numpy]),
    (lab.check_activations, [right.layer_activations, right.activations]),
    (lab.check_activations, [Right.layer_by_parts, Right.activations_by_lists]),
    (lab.check_step_flops, [right.step_flops]),
    (lab.check_step_flops, [lambda b, x, h, t, c: 2 * t * (3 * h + (3 + c) * b - c * x)]),
    (lab.check_bytes_left, [right.bytes_left]), (lab.check_bytes_left, [Right.left_in_one]),
    (lab.check_rank_states, [right.rank_states]),
    (lab.check_rank_states, [Right.states_by_cases])])
def test_a_right_answer_passes(check, answers):
    verdict = check(*answers)
    assert verdict.passed is True, str(verdict)


@pytest.mark.parametrize("check", list(WRONG))
def test_an_unfilled_exercise_waits(check):
    def unfilled(*_):
        raise NotImplementedError("Exercise 1.1")

    count = 1 if check in (lab.check_step_flops, lab.check_bytes_left,
                           lab.check_rank_states) else 2
    verdict = check(*[unfilled] * count)
    assert verdict.passed is None and "1.1" in str(verdict)

"""What the checks of notebook 01 must reject, with the words that must say why; and what they must
accept."""

import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from _build.definitions import definitions

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
        (Block.table, "Llama-2-7B, one block: .*, 1.078x"),
        (Block.table_of_all_that_are_known, "A table holds only the models it was made for"),
        (Block.table_with_a_default, "of sizes drawn at random, one block: you say"),
        (Block.twelve_h_squared,
         "GPT-2, one block.*all biases are missing and the two norms are missing"),
        (Block.all_heads_have_keys,
         "Llama-3-8B, one block.*keys and values are counted as wide as queries"),
        (Block.no_biases, "GPT-2, one block.*all biases are missing"),
        (Block.no_bias_of_queries, "the biases of queries, keys and values are missing"),
        (Block.biases_everywhere, "Llama-2-7B.*queries, keys and values have no bias here"),
        (Block.no_bias_of_output, "the bias of attention's output matrix is missing"),
        (Block.two_biases, "Llama of sizes drawn.*one bias of the feed-forward part is missing"),
        (Block.no_norms, "GPT-2, one block.*the two norms are missing"),
        (Block.norms_without_biases, "half of the norms' parameters are missing"),
        (Block.layernorm_everywhere, "Llama-2-7B.*the norms have no bias here"),
        (Block.two_matrices, "one matrix of the feed-forward part is missing"),
        (Block.three_matrices, "one matrix too many in the feed-forward part"),
        (Block.four_times_as_wide, "taken as 4 times as wide"),
        (Block.heads_share_hidden, "drawn at random.*head_dim is taken as hidden / heads"),
        (Block.in_bytes, "GPT-2, one block: .*, 4x"),
        (Block.one_norm, "half of the norms' parameters are missing"),
        (Block.no_output_matrix, "attention's output matrix is missing"),
        (Block.keys_without_values, "keys or values are missing"),
        (Block.biases_as_wide_as_the_model, "Qwen2-0.5B, one block: .*, 1,536 too much"),
        (Block.bias_of_down_alone, "or the bias of the feed-forward part's first matrix"),
        (Block.rotary_frequencies, "Llama-2-7B, one block: .*, 64 too much"),
        (Block.of_all_layers, "GPT-2, one block: .*, 12x"),
        (Block.prints, "it returned nothing .None., not a number"),
        (Block.a_word, "it returned a str, not a number")]),
    *(((right.block_parameters, model), words) for model, words in [
        (Model.head_always, "GPT-2: .*the head is counted, though it is tied"),
        (Model.head_never, "Llama-2-7B: .*vocabulary x hidden is missing"),
        (Model.no_positions, "GPT-2: .*the learned positions are missing"),
        (Model.no_final_norm, "GPT-2: .*the final norm is missing"),
        (Model.final_norm_without_bias, "GPT-2: .*the final norm's bias is missing"),
        (Model.one_block, "GPT-2: .*only one block is counted"),
        (Model.only_blocks, "GPT-2: you say 85,054,464 parameters, it is 124,439,808"),
        (Model.in_billions, "GPT-2: you say 0.1"),
        (Model.positions_twice, "GPT-2: .*, 1.006x"),
        (Model.bias_of_the_head, "GPT-2: .*, 5.026e.04 too much"),
        (Model.two_final_norms, "GPT-2: .*, 1,536 too much"),
        (Model.round_number, "GPT-2: you say 124,000,000 parameters"),
        (Model.one_argument_more, "cannot be called")])]


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
    (Names.the_first, "112 GB for 7B: 'bf16, fp32 master' is missing, which makes 112 GB"),
    (Names.one_name, "returned one name, 'bf16, fp32 moments', not a list"),
    (Names.none_for_none, "120 GB for 7B: it returned nothing .None., not a list of names"),
    (Names.exactly, "54 GB for 6.74B: 'bf16' is missing, which makes 53.92 GB"),
    (Names.nearly, "112 GB for 7B: 'megatron' makes 126 GB|120 GB for 7B: '.*' makes 1"),
    (Names.of_7b, "156 GB for 13B: 'bf16, fp32 moments' is missing"),
    (Names.weights_alone, "84 GB for 7B: 'bf16, fp32 moments' is missing"),
    (Names.in_gib, "'bf16, fp32 moments' is missing"),
    (Names.types, "is no recipe's name"),
    (Names.the_notebooks, "is no recipe's name|is missing, which makes"),
    (Names.rounded_down, "54 GB for 6.74B: 'bf16' is missing, which makes 53.92 GB")]

WRONG[lab.check_bytes_per_parameter] = [
    *(((answer, right.recipes_behind), words) for answer, words in [
    (Bytes.always_fp32, "weights bfloat16, .*: parameters: you say 4 bytes, it is 2"),
    (Bytes.mixed_precision, "weights float32, .*: parameters: you say 2 bytes"),
    (Bytes.table, "KeyError"),
    (Bytes.master_is_a_weight, "the master copy is counted among the weights"),
    (Bytes.one_moment, "only one moment is counted"),
    (Bytes.master_forgotten, "the fp32 master copy is missing"),
    (Bytes.master_always, "there is no master copy here"),
    (Bytes.moments_as_weights, "the moments are taken in the weights' type"),
    (Bytes.moments_as_fp32, "the moments are taken as fp32"),
    (Bytes.gradients_as_weights, "gradients: .*that is the weights' type"),
    (Bytes.master_as_moments, "the master copy is taken in the moments' type"),
    (Bytes.master_as_weights, "the master copy is taken in the weights' type"),
    (Bytes.a_sum, "it returned an int, not 3 numbers"),
    (Bytes.in_bits, "you say 32 bytes, it is 4, 8x")]),
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
    (Fewest.everything_divided, "70B, 80 GB of room, stage 0: fewest ranks: it returned 11, but"),
    (Fewest.rounded_down, "stage 3: fewest ranks: you say 10, it is 11: on so many ranks the "
     "states take more than the room"),
    (Fewest.one_more, "11 are enough"),
    (Fewest.not_rounded, "stage 3: fewest ranks: you say 10.5, it is 11: as if the stage divided|"
     "Ranks are whole numbers"),
    (Fewest.negative, "stage 0: fewest ranks: it returned 0, but on any number of ranks|"
     "stage 1: fewest ranks: it returned -2"),
    (Fewest.infinity, "it returned .*, but on any number of ranks a rank holds more than that"),
    (Fewest.zero_for_none, "stage 0: fewest ranks: it returned 0, but on any number"),
    (Fewest.strictly, "1B, 5 GB of room, stage 1: fewest ranks: you say 13, it is 12: 12 are"),
    (Fewest.always_stage_3, "stage 0: fewest ranks: it returned 11, but"),
    (Fewest.at_least_two, "10B, 170 GB of room, stage 0: fewest ranks: you say 2, it is 1"),
    (Fewest.powers_of_two, "stage 3: fewest ranks: you say 16, it is 11"),
    (Fewest.none_at_once, "stage 3: fewest ranks: it returned None, but 11 ranks are enough"),
    (Fewest.kept_counted_twice, "what every rank keeps is in both places"),
    (Fewest.a_tuple, "it returned a tuple of 2")]

WRONG[lab.check_per_rank] = [
    *(((answer, right.fewest_ranks), words) for answer, words in [
    (shares(9, 9, 9), "70B on 8 ranks, stage 1: optimizer state: you say 560 GB .*: not divided"),
    (shares(1, 1, 1),
     "stage 1: parameters: you say 17.5 GB .*divided, though this stage keeps it whole"),
    (shares(0, 0, 0), "stage 0: parameters: you say 17.5 GB .*divided, though"),
    (shares(9, 9, 1), "stage 2: gradients: you say 140 GB per rank, it is 17.5: not divided"),
    (shares(9, 2, 1), "stage 3: parameters: you say 140 GB per rank, it is 17.5: not divided"),
    (shares(1, 2, 3), "stage 1: parameters: .*divided, though"),
    (Rank.gradients_forgotten,
     "stage 2: gradients: .*missing: 210 GB in all, where a rank holds 227.5"),
    (Rank.one_parameter,
     "70B on 8 ranks, stage 0: parameters: you say 2e-09 GB per rank, it is 140"),
    (Rank.table, "KeyError"),
    (Rank.known_recipe, "a job drawn at random, stage 0"),
    (Rank.a_sum, "it returned a float, not 3 numbers"),
    (Rank.rounded_down,
     "a job drawn at random, stage 1: optimizer state: .*off by less than a byte"),
    (Rank.in_gb, "stage 0: parameters: ")]),
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
        (Layer.no_scores, "eager attention: .*the scores inside attention, 5as/h, are missing"),
        (Layer.scores_always, "fused attention never writes the scores out"),
        (Layer.elements, "2x: that is as if 34 counted elements"),
        (Layer.half, "half: counted in 16-bit elements"),
        (Layer.no_batch, "the batch is missing"),
        (Layer.twenty_four, "10sbh is missing"),
        (Layer.checkpointed, "2sbh is what checkpointing keeps"),
        (Layer.of_the_block_that_was_shown, "a real block, .*eager attention: you say"),
        (Layer.scores_of_one_sequence, "eager attention: .*the scores are counted for one seq"),
        (Layer.no_mask_of_scores, "eager attention: .*the mask of the scores is missing"),
        (Layer.scores_in_16_bits, "eager attention: .*mask of the scores is counted with two"),
        (Layer.no_masks, "fused attention: .*two dropout masks"),
        (Layer.with_statistics, "the norms' statistics are counted"),
        (Layer.fused_has_no_attention, "fused attention: .*10sbh is missing"),
        (Layer.with_one_head, "a real block, .*4 heads, eager attention")]),
    *(((right.layer_activations, whole), words) for whole, words in [
        (Whole.no_logits, "GPT-2, 1 x 1024 tokens, without checkpointing.*logits are missing"),
        (Whole.logits_in_16_bits, "the logits are counted with 2 bytes each"),
        (Whole.fp32_logits_alone, "the logits are counted with 4 bytes each"),
        (Whole.without_the_last_gradient, "the logits are counted with 8 bytes each"),
        (Whole.one_layer, "only one layer is counted"),
        (Whole.both_on_top, "never there together"),
        (Whole.never_checkpointed, "with checkpointing: .*nothing was dropped"),
        (Whole.only_checkpoints, "with checkpointing: .* missing"),
        (Whole.no_layer_again, "a GPT-2 over bytes, 1 x 1024 tokens, with checkpointing: .*the "
                               "layer that is computed again is missing"),
        (Whole.inputs_in_elements, "with checkpointing: .*input is counted in elements"),
        (Whole.only_the_layer_again, "with checkpointing: .*the logits are missing")])]


# 1.5 step_flops

WRONG[lab.check_step_flops] = [((answer,), words) for answer, words in [
    (lambda b, x, h, t, c: 6 * (b + h) * t, "with checkpointing: .*nothing is computed again"),
    (lambda b, x, h, t, c: 8 * (b + h) * t, "without checkpointing: .*forward runs twice"),
    (lambda b, x, h, t, c: (8 if c else 6) * (b + h) * t, "as if every product of forward ran"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * b * t * c, "a block's last product ran again"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * (b - x + h) * t * c, "the head's product ran"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * (b - x) * t, "without checkpointing: .*forward "
     "runs twice, though nothing is dropped here"),
    (lambda b, x, h, t, c: (12 if c else 6) * (b + h) * t, "the whole step is done twice"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 6 * (b - x) * t * c, "backward is computed again"),
    (lambda b, x, h, t, c: 4 * (b + h) * t + 2 * (b - x) * t * c, "backward count as much"),
    (lambda b, x, h, t, c: 2 * (b + h) * t, "that is forward alone"),
    (lambda b, x, h, t, c: 3 * (b + h) * t + (b - x) * t * c, "and an addition are two"),
    (lambda b, x, h, t, c: 6 * b * t + 2 * (b - x) * t * c, "the head is missing"),
    (lambda b, x, h, t, c: 6 * (b + x + h) * t + 2 * b * t * c, "last matrices are counted twice"),
    (lambda b, x, h, t, c: (8 if c else 6) * (b + h), "you say"),
    (lambda b, x, h, t, c: 4 / 3 if c else 1, "you say 1 FLOPs, torch counts"),
    (lambda b, x, h, t, c: None, "it returned nothing"),
    (lambda p, t, c: 6 * p * t, "cannot be called")]]


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
    (Left.no_overhead, "Llama-2-13B, stage 0 .*what CUDA and NCCL take is missing"),
    (Left.no_nccl, "NCCL's buffers are missing"),
    (Left.no_activations, "the activations are missing"),
    (Left.no_states, "the model states are missing"),
    (Left.data_sheet, "the data sheet's capacity is not what CUDA gives"),
    (Left.not_divided, "Llama-2-13B, stage 3 .*nothing is divided among the ranks"),
    (Left.all_divided, "Llama-2-13B, stage 0 .*everything is divided by the ranks"),
    (Left.always_checkpointed, "GPT-2, .*activations as if checkpointing were on"),
    (Left.what_is_missing, "that is what is missing, not what is left"),
    (Left.what_is_needed, "that is what is needed, not left"),
    (Left.yes_or_no, "it returned a bool, not a number"),
    (Left.all_sequences, "Llama-2-13B, stage 0 .*the sequences of all ranks are counted"),
    (Left.parameters_alone, "of the model states only parameters are counted"),
    (Left.nothing_below_zero, "nothing is left, but how much is missing"),
    (Left.in_gb, "you say -7.*that is in GB"), (Left.in_gib, "that is in GiB"),
    (Left.a_share, "that is a share of the GPU's memory"), (Left.of_all_gpus, "you say 178.8"),
    (Left.twice_the_overhead, "Llama-2-13B, stage 0 .*you say -78.6"),
    (Left.one_recipe, "GPT-2, stage 0 on 1 x T4"), (Left.blocks_alone, "you say -72.5"),
    (Left.activations_divided, "Llama-2-13B, stage 0 .*you say -74.0")]]


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
     "DDP on 3 ranks, buffers: you say 0 bytes, a rank holds 136,70[48]: there are some"),
    (states(DDP=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 0)),
     "DDP on 3 ranks, parameters: .*DDP divides nothing"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n * r / 2)), "DDP on 3 ranks.*, 1.5x"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 8 * n / r)), "DDP on 3 ranks, buffers: .*0.66"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n / r)),
     "DDP on 3 ranks, buffers: .*divided by the ranks, and DDP divides nothing"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 2 * n)), "DDP on 3 .*as in 16 bits"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n, 8 * n * (r - 1) / r)), "DDP on 3 .*1.333x"),
    (states(FSDP2=lambda n, r: (4 * n, 4 * n, 8 * n, 0)),
     "FSDP2 on 4 ranks, parameters: .*not divided"),
    (states(FSDP2=lambda n, r: (4 * n / 2, 4 * n / 2, 8 * n / 2, 0)),
     "FSDP2 on 4 .*divided by 2, not by 4"),
    (states(FSDP2=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 4 * n)),
     "buffers: you say .*there is no such copy here"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 4 * n, 0)), "AdamW keeps two moments"),
    (states(DDP=lambda n, r: (4 * n, 0, 8 * n, 4 * n)), "DDP on 3 ranks, gradients: .*\n.*Backwa"),
    (states(DDP=lambda n, r: (8 * n, 4 * n, 8 * n, 0)), "DDP on 3 ranks, parameters: .*, 2x"),
    (states(DDP=lambda n, r: (4 * n, 4 * n, 8 * n / r, 4 * n)),
     "DDP on 3 ranks, optimizer state: .*DDP divides nothing"),
    (states(FSDP2=lambda n, r: (4 * n, 4 * n / r, 8 * n / r, 0)), "FSDP2 on 4 .*not divided"),
    (states(FSDP2=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 4 * n / r)), "FSDP2 on 4 .*buff"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 12 * n, 0)), "plain on 1 rank, optimizer state: "),
    (states(plain=lambda n, r: (4 * n, 4 * n, 8 * n, 4 * n)), "there is no such copy here"),
    (states(plain=lambda n, r: {"parameters": 4 * n}), "it returned a dict, not 4 numbers"),
    (states(plain=lambda n, r: (n, n, 2 * n, 0)), "counted in elements"),
    (states(plain=lambda n, r: (2 * n, 2 * n, 4 * n, 0)), "as in 16 bits"),
    (states(plain=lambda n, r: (4 * n, 0, 8 * n, 0)), "gradients: you say 0 bytes"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 9 * n, 0)), "optimizer state: you say"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 8 * n)), "it returned a tuple of 3, not 4 numbers")]]


@pytest.mark.parametrize("check, answers, words", [
    (check, answers, words) for check, rows in WRONG.items() for answers, words in rows])
def test_a_wrong_answer_is_rejected_in_words(check, answers, words):
    verdict = check(*answers)
    assert verdict.passed is False
    assert re.search(words, str(verdict)), str(verdict)


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

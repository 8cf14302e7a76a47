"""What the check of exercise 1.1 must reject, and what it must accept."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

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


WRONG = [
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


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_parameters(*answers), expected)


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

    def block_as_tensor(m):
        return torch.tensor(right.block_parameters(m))

    def model_of_numpy(m):
        return np.int64(right.model_parameters(m))


@pytest.mark.parametrize("answers", [
    [right.block_parameters, right.model_parameters],
    [Right.block_by_matrices, Right.model_by_addition],
    [Right.block_by_matrices, right.model_parameters],
    [Right.block_as_tensor, Right.model_of_numpy],
    [lambda m: Fraction(right.block_parameters(m)), right.model_parameters],
    [lambda m: np.array([right.block_parameters(m)]),
                            lambda m: torch.tensor(float(right.model_parameters(m)))]])
def test_a_right_answer_passes(answers):
    verdict = lab.check_parameters(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_parameters, "1.1", functions=2)

"""What the checks of notebook 01 must reject, with the words that must say why; and what they must
accept."""

import re
from dataclasses import replace

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


WRONG[lab.check_bytes_per_parameter] = [((answer,), words) for answer, words in [
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
    (Bytes.master_as_moments, "with a master: optimizer state: "),
    (Bytes.master_as_weights, "the master copy is taken in the weights' type"),
    (Bytes.a_sum, "it returned an int, not 3 numbers"),
    (Bytes.in_bits, "you say 32 bytes, it is 4, 8x")]]


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


WRONG[lab.check_per_rank] = [((answer,), words) for answer, words in [
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
    (Rank.in_gb, "stage 0: parameters: ")]]


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

    def with_one_head(batch, sequence, hidden, heads, fused):
        return right.layer_activations(batch, sequence, hidden, 1, fused)


class Whole:
    def no_logits(m, batch, sequence, checkpointing):
        return right.activations(changed(m, vocabulary=0), batch, sequence, checkpointing)

    def logits_in_16_bits(m, batch, sequence, checkpointing):
        return right.activations(m, batch, sequence, checkpointing) - (
            0 if checkpointing else 2 * batch * sequence * m.vocabulary)

    def one_layer(m, batch, sequence, checkpointing):
        return right.activations(changed(m, layers=1), batch, sequence, checkpointing)

    def both_on_top(m, batch, sequence, checkpointing):
        layer = right.layer_activations(batch, sequence, m.hidden, m.heads, True)
        logits = 4 * batch * sequence * m.vocabulary
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
        return batch * sequence * (2 * m.layers * m.hidden + 4 * m.vocabulary)

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
        (Layer.with_one_head, "a real block, .*4 heads, eager attention")]),
    *(((right.layer_activations, whole), words) for whole, words in [
        (Whole.no_logits, "GPT-2, 1 x 1024 tokens, without checkpointing.*logits are missing"),
        (Whole.logits_in_16_bits, "the logits are counted in 16 bits"),
        (Whole.one_layer, "only one layer is counted"),
        (Whole.both_on_top, "never there together"),
        (Whole.never_checkpointed, "with checkpointing: .*nothing was dropped"),
        (Whole.only_checkpoints, "with checkpointing: .* missing"),
        (Whole.no_layer_again, "Llama-2-7B, 1 x 1024 tokens, with checkpointing: .*the layer that "
                               "is computed again is missing"),
        (Whole.inputs_in_elements, "with checkpointing: .*input is counted in elements"),
        (Whole.only_the_layer_again, "with checkpointing: .*the logits are missing")])]


# 1.5 step_flops

WRONG[lab.check_step_flops] = [((answer,), words) for answer, words in [
    (lambda p, t, c: 6 * p * t, "with checkpointing: .*nothing is computed again"),
    (lambda p, t, c: 8 * p * t, "without checkpointing: .*forward runs twice"),
    (lambda p, t, c: (12 if c else 6) * p * t, "the whole step is done twice"),
    (lambda p, t, c: 6 * p * t * (1.33 if c else 1), "a third more is 4/3, not 1.33"),
    (lambda p, t, c: (10 if c else 6) * p * t, "backward is computed again"),
    (lambda p, t, c: (6 if c else 4) * p * t, "forward and backward count as much"),
    (lambda p, t, c: 2 * p * t, "that is forward alone"),
    (lambda p, t, c: (4 if c else 3) * p * t, "a multiplication and an addition are two"),
    (lambda p, t, c: (8 if c else 6) * p, "you say"),
    (lambda p, t, c: 4 / 3 if c else 1, "you say 1 FLOPs, torch counts"),
    (lambda p, t, c: None, "it returned nothing")]]


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
    (Left.in_gb, "you say -7.56.*that is in GB")]]


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
     "DDP on 2 ranks, buffers: you say 0 bytes, a rank holds 136,70[48]: there are some"),
    (states(DDP=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 0)),
     "DDP on 2 ranks, parameters: .*DDP divides nothing"),
    (states(FSDP2=lambda n, r: (4 * n, 4 * n, 8 * n, 0)),
     "FSDP2 on 2 ranks, parameters: .*not divided"),
    (states(FSDP2=lambda n, r: (4 * n / 2, 4 * n / 2, 8 * n / 2, 0)), "FSDP2 on 4 ranks"),
    (states(FSDP2=lambda n, r: (4 * n / r, 4 * n / r, 8 * n / r, 4 * n)),
     "buffers: you say .*there is no such copy here"),
    (states(plain=lambda n, r: (4 * n, 4 * n, 4 * n, 0)), "AdamW keeps two moments"),
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
        logits = batch * sequence * m.vocabulary * 4
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

    def states_by_cases(count, strategy, ranks):
        size = 4 * count / (ranks if strategy == "FSDP2" else 1)
        return [size, size, 2 * size, size if strategy == "DDP" else 0]


@pytest.mark.parametrize("check, answers", [
    (lab.check_parameters, [right.block_parameters, right.model_parameters]),
    (lab.check_parameters, [Right.block_by_matrices, Right.model_by_addition]),
    (lab.check_parameters, [Right.block_by_matrices, right.model_parameters]),
    (lab.check_parameters, [Right.block_as_tensor, Right.model_of_numpy]),
    (lab.check_bytes_per_parameter, [right.bytes_per_parameter]),
    (lab.check_bytes_per_parameter, [Right.bytes_by_finfo]),
    (lab.check_per_rank, [right.per_rank]), (lab.check_per_rank, [shares(3, 2, 1)]),
    (lab.check_per_rank, [Right.per_rank_by_cases]),
    (lab.check_activations, [right.layer_activations, right.activations]),
    (lab.check_activations, [Right.layer_by_parts, Right.activations_by_lists]),
    (lab.check_step_flops, [right.step_flops]),
    (lab.check_step_flops, [lambda p, t, c: 2 * p * t * (3 + c)]),
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

    count = 2 if check in (lab.check_parameters, lab.check_activations) else 1
    verdict = check(*[unfilled] * count)
    assert verdict.passed is None and "1.1" in str(verdict)

"""What the check of exercise 1.6 must reject, and what it must accept."""

from fractions import Fraction

import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))
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


WRONG = [((answer,), words) for answer, words in [
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
    (Left.a_share, "share_gpu_memory"), (Left.of_all_gpus, "wrong_number 178.4"),
    (Left.twice_the_overhead, "wrong_number -79.2"),
    (Left.one_recipe, "wrong_number"), (Left.blocks_alone, "wrong_number -72.8"),
    (Left.activations_divided, "wrong_number -74.3")]]




def states(**by_strategy):
    """A function of (count, ranks) for each strategy; the right answer where none is given."""
    def rank_states(count, strategy, ranks):
        answer = by_strategy.get(strategy)
        return answer(count, ranks) if answer else right.rank_states(count, strategy, ranks)

    return rank_states


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_bytes_left(*answers), expected)


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

    def left_in_one(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        count = Right.model_by_addition(m)
        needed = [count * recipe[i] / (ranks if stage > 2 - i else 1) for i in range(3)]
        needed += [right.activations(m, batch, sequence, checkpointing), lab.overhead(ranks)]
        return gpu.usable - sum(needed)

    def left_in_float32(*job):
        return torch.tensor(right.bytes_left(*job), dtype=torch.float32)

    def left_as_fraction(*job):
        return Fraction(right.bytes_left(*job))


@pytest.mark.parametrize("answers", [
    [Right.left_in_float32],
    [Right.left_as_fraction],
    [right.bytes_left], [Right.left_in_one]])
def test_a_right_answer_passes(answers):
    verdict = lab.check_bytes_left(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_bytes_left, "1.6")

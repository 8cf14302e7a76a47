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


class Batch:
    """Of 1.6's second half. They call the right bytes_left."""

    def left_with(job, batch):
        m, recipe, stage, ranks, *rest = job
        return right.bytes_left(m, recipe, stage, ranks, batch, *rest)

    def one(*job):
        return 1

    def none_always(*job):
        return 0

    def first_that_does_not_fit(*job):
        return right.largest_batch(*job) + 1

    def leaves_one_free(*job):
        return max(0, right.largest_batch(*job) - 1)

    def at_least_one(*job):
        return max(1, right.largest_batch(*job))

    def nothing_for_none(*job):
        return right.largest_batch(*job) or None

    def at_most_1000(*job):
        return max((batch for batch in range(1, 1001) if Batch.left_with(job, batch) >= 0),
                   default=0)

    def powers_of_two(*job):
        batch = 1
        while Batch.left_with(job, 2 * batch) >= 0:
            batch *= 2
        return batch if Batch.left_with(job, batch) >= 0 else 0

    def a_fraction(*job):
        empty, one = Batch.left_with(job, 0), Batch.left_with(job, 1)
        return empty / (empty - one)

    def below_zero(*job):
        return int(Batch.a_fraction(*job))

    def of_all_ranks(*job):
        return right.largest_batch(*job) * job[3]

    def of_one_rank_alone(m, recipe, stage, ranks, *job):
        return right.largest_batch(m, recipe, stage, 1, *job)

    def yes_or_no(*job):
        return right.largest_batch(*job) > 0

    def the_bytes_left(*job):
        return Batch.left_with(job, right.largest_batch(*job))

    def with_a_batch(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
        return batch


BATCHES = [((right.bytes_left, answer), words) for answer, words in [
    (Batch.one, "first_too_large|wrong_number"),
    (Batch.none_always, "wrong_number|one_too_few"),
    (Batch.first_that_does_not_fit, "first_too_large"),
    (Batch.leaves_one_free, "one_too_few"),
    (Batch.at_least_one, "first_too_large"),
    (Batch.nothing_for_none, "not_a_number"),
    (Batch.at_most_1000, "wrong_number GPT-2"),
    (Batch.powers_of_two, "wrong_number|one_too_few"),
    (Batch.a_fraction, "not_rounded_down"),
    (Batch.below_zero, "wrong_number"),
    (Batch.of_all_ranks, "sequences_all_ranks_counted"),
    (Batch.of_one_rank_alone, "wrong_number|one_too_few"),
    (Batch.yes_or_no, "not_a_number bool"),
    (Batch.the_bytes_left, "wrong_number"),
    (Batch.with_a_batch, "wrong_signature")]]
WRONG = [((answer, right.largest_batch), words) for answer, words in [
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
    (Left.activations_divided, "wrong_number -74.3")]] + BATCHES


@pytest.mark.parametrize("answers, expected", [
    pytest.param(answers, expected, id=f"{'-'.join(one.__name__ for one in answers)}")
    for answers, expected in WRONG])
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

    def batch_by_division(*job):
        empty, one = Batch.left_with(job, 0), Batch.left_with(job, 1)
        return max(0, empty // (empty - one))

    def batch_by_doubling(*job):
        low, high = 0, 1  # low fits, or is 0; high is doubled until it does not fit
        while Batch.left_with(job, high) >= 0:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if Batch.left_with(job, middle) >= 0 else (low, middle)
        return low

    def batch_as_tensor(*job):
        return torch.tensor(right.largest_batch(*job))


@pytest.mark.parametrize("answers", [
    *([answer, right.largest_batch] for answer in (
        Right.left_in_float32, Right.left_as_fraction, right.bytes_left, Right.left_in_one)),
    *([right.bytes_left, answer] for answer in (
        Right.batch_by_division, Right.batch_by_doubling, Right.batch_as_tensor))])
def test_a_right_answer_passes(answers):
    verdict = lab.check_bytes_left(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_bytes_left, "1.6", functions=2)
    assert lab.check_bytes_left(right.bytes_left, ...).passed is None

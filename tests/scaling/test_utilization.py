"""What the check of exercise 6.9 must reject, and what it must accept."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab

right = definitions("06_scaling")
utilization = right.utilization


def shares_times(factor):
    """The right FLOPs, and shares that are so many times the right ones."""
    def answer(run):
        six_n, flops, mfu, hfu = utilization(run)
        return six_n, flops, mfu * factor(run), hfu * factor(run)
    return answer


def changed(**changes):
    """The right answer to another run than the one that is asked for."""
    return lambda run: utilization(replace(run, **{name: change(run)
                                                   for name, change in changes.items()}))


def flops_by(change):
    """Other FLOPs per token, and the shares that follow from them."""
    def answer(run):
        six_n, flops, mfu, hfu = utilization(run)
        mine = change(run, six_n, flops - six_n)
        return six_n, mine, mfu * mine / flops, hfu * mine / flops
    return answer


def again(selective=lambda n, a: a / 3, full=lambda n, a: (n + a) / 3, combine=lambda f, b: f + b):
    """The right answer, but for what runs again: by (6N, attention's FLOPs)."""
    def answer(run):
        six_n, flops, mfu, _ = utilization(run)
        count = {"none": lambda n, a: 0, "selective": selective, "full": full}[run.recompute]
        return six_n, flops, mfu, mfu * combine(flops, count(six_n, flops - six_n)) / flops
    return answer


def six_n_by(parameters):
    """6 x other parameters, and what follows from them."""
    def answer(run):
        six_n, flops, mfu, hfu = utilization(run)
        mine = 6 * parameters(run, run.vocabulary * run.hidden)
        by = (flops - six_n + mine) / flops
        return mine, flops * by, mfu * by, hfu * by
    return answer


class Utilization:
    def nothing(run):
        return None

    def table(run):
        return {"MPT-7b on 8 A100-80": (1, 1, 0.6423, 0.6423)}[run.name]

    def table_with_a_default(run):
        return {"MPT-7b on 8 A100-80": utilization(run)}.get(run.name, (1, 1, 0.4, 0.5))

    def no_flops(run):
        return utilization(run)[2:]

    def all_parameters(run):
        return 6 * run.parameters, *utilization(run)[1:]

    def two_n(run):
        return utilization(run)[0] / 3, *utilization(run)[1:]

    def eight_n(run):
        return utilization(run)[0] * 8 / 6, *utilization(run)[1:]

    def hfu_called_mfu(run):
        six_n, flops, _, hfu = utilization(run)
        return six_n, flops, hfu, hfu

    def mfu_called_hfu(run):
        six_n, flops, mfu, _ = utilization(run)
        return six_n, flops, mfu, mfu

    def exchanged(run):
        six_n, flops, mfu, hfu = utilization(run)
        return six_n, flops, hfu, mfu

    def always_full(run):
        six_n, flops, mfu, _ = utilization(run)
        return six_n, flops, mfu, mfu * 4 / 3

    def changes_the_run(run):
        found = utilization(run)
        object.__setattr__(run, "tokens_per_s", run.tokens_per_s / run.gpus)
        return found

    def needs_more(run, peak):
        return utilization(run)


def halved_always(run):
    return 1 if run.sparse else 2


class Right:
    def by_product(run):
        """12h² of a layer are not needed: what is multiplied is all but a look-up."""
        multiplied = run.parameters - (not run.tied) * run.vocabulary * run.hidden
        forward = 2 * multiplied, 4 * run.layers * run.hidden * run.sequence
        needed = 3 * sum(forward)
        again = dict(none=0, selective=forward[1], full=sum(forward))[run.recompute]
        seconds = run.gpus / run.tokens_per_s
        dense = run.sheet_tflops / (1 + run.sparse) * 10**12
        return [3 * forward[0], needed, needed / seconds / dense,
                (needed + again) / seconds / dense]

    def as_array(run):
        return np.array(utilization(run))

    def as_tensor(run):
        return torch.tensor(utilization(run), dtype=torch.float64)

    def as_fractions(run):
        return tuple(map(Fraction, utilization(run)))


WRONG = [
    (Utilization.nothing, "wrong_count nothing"),
    (Utilization.table, "raised_KeyError"),
    (Utilization.table_with_a_default, "wrong_number"),
    (Utilization.no_flops, "wrong_count tuple"),
    (Utilization.all_parameters, "look_up_embedding_counted_product"),
    (Utilization.two_n, "forward_alone"),
    (Utilization.eight_n, "forward_counted_twice"),
    (changed(tied=lambda run: False), "head_product_left_out"),
    (flops_by(lambda run, n, a: n), "attention_products_missing"),
    (flops_by(lambda run, n, a: n + a / 3), "attention_forward_alone"),
    (flops_by(lambda run, n, a: n + a / 2), "half_attention"),
    (flops_by(lambda run, n, a: n + a / run.layers), "attention_one_layer_alone"),
    (flops_by(lambda run, n, a: (n + a) * run.sequence), "for_sequence"),
    (changed(sparse=lambda run: False), "sparse_peak"),
    (shares_times(halved_always), "data_sheet_rate_halved_though"),
    (changed(gpus=lambda run: 1), "one_gpu_peak"),
    (shares_times(lambda run: 1 / run.gpus), "divided_gpus_twice"),
    (shares_times(lambda run: 1e12 / 2**40), "binary_tflop"),
    (shares_times(lambda run: 100), "in_percent"),
    (shares_times(lambda run: 1e12), "tflop_s_taken_flop_s"),
    (Utilization.hfu_called_mfu, "hfu_counts_recomputed"),
    (Utilization.exchanged, "hfu_counts_recomputed"),
    (Utilization.mfu_called_hfu, "mfu_recomputed_missing"),
    (Utilization.always_full, "all_forward_again"),
    (again(selective=lambda n, a: a), "wrong_recomputed_flops"),
    (again(selective=lambda n, a: a / 9), "wrong_recomputed_flops"),
    (again(selective=lambda n, a: 0), "wrong_recomputed_flops missing"),
    (again(full=lambda n, a: n / 3), "wrong_recomputed_flops"),
    (again(full=lambda n, a: a / 3), "wrong_recomputed_flops alone"),
    (again(full=lambda n, a: n + a), "wrong_recomputed_flops once"),
    (again(lambda n, a: (n + a) / 3, lambda n, a: a / 3), "wrong_recomputed_flops exchanged"),
    (again(combine=lambda flops, more: flops - more), "runs_again_subtracted"),
    (again(combine=lambda flops, more: more), "share_runs_again_alone"),
    (again(full=lambda n, a: (n + a) / 5), "wrong_number again"),
    (six_n_by(lambda run, matrix: run.parameters - 2 * matrix * (not run.tied)),
     "head_product_left_out_together"),
    (six_n_by(lambda run, matrix: run.parameters - 2 * matrix),
     "two_matrices_vocabulary_left_out"),
    (six_n_by(lambda run, matrix: run.parameters - matrix * run.tied),
     "matrix_left_out_where_tied"),
    (flops_by(lambda run, n, a: n + 2 * a), "attention_counted_twice"),
    (Utilization.changes_the_run, "changes_input"),
    (Utilization.needs_more, "wrong_signature")]
RIGHT = [utilization, Right.by_product, Right.as_array, Right.as_tensor,
                        Right.as_fractions]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_utilization(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_utilization(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_utilization, "6.9")

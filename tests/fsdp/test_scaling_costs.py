"""What the check of exercise 4.11 must reject, with the words that must say why, and what it must
accept."""

from fractions import Fraction

import numpy as np
import pytest
from fsdp_answers import accepted, rejected, right

import labs.fsdp as lab

efficiency, ratio, offload = right.efficiency, right.communication_ratio, right.offload


def changed(**functions):
    return tuple(functions.get(name, usual) for name, usual in
                 (("efficiency", efficiency), ("ratio", ratio), ("offload", offload)))


EFFICIENCY = {
    "speed_up_all_gpus_together": lambda few, many: many[1] / many[2] / (few[1] / few[2]),
    "few_not_always_one_gpu": lambda few, many: (
        many[1] / many[2] / (few[1] / few[2]) / many[0]),
    "two_steps_may_different_numbers": lambda few, many: few[2] / many[2],
    "how_much_longer_step_takes": lambda few, many: many[2] / few[2],
    "upside_down": lambda few, many: 1 / efficiency(few, many),
    "in_percent": lambda few, many: 100 * efficiency(few, many),
    "wrong_number": lambda few, many: 1,
    "not_a_number": lambda few, many: None,
    "wrong_signature": lambda few: 1}
RATIO = {
    "rank_one_n_parts_already": lambda psi, ranks, tokens, flops, link: (
        12 * psi / link / (6 * psi * tokens / flops)),
    "ddp_bytes": lambda *case: 2 / 3 * ratio(*case),
    "one_collective_three": lambda *case: ratio(*case) / 3,
    "in_fp32_parameter_4_bytes": lambda *case: ratio(*case) / 4,
    "computing_one_rank": lambda psi, ranks, *case: ratio(psi, ranks, *case) / ranks,
    "forward_computing_alone": lambda *case: 3 * ratio(*case),
    "upside_down": lambda *case: 1 / ratio(*case) if case[1] > 1 else 0,
    "wrong_number": lambda *case: 0}
OFFLOAD = {
    "rank_copies_shard": lambda psi, ranks, pcie, host: (12 * psi / pcie, 80 * psi / host),
    "two_copies_shard": lambda psi, ranks, pcie, host: (
        8 * psi / ranks / pcie, 80 * psi / host),
    "one_copy_shard": lambda psi, ranks, pcie, host: (
        4 * psi / ranks / pcie, 80 * psi / host),
    "copies_pass_pcie": lambda psi, ranks, pcie, host: (
        12 * psi / ranks / host, 80 * psi / host),
    "in_fp32_parameter_4_bytes": lambda psi, ranks, pcie, host: (
        3 * psi / ranks / pcie, 80 * psi / host),
    "own_host_bandwidth": lambda psi, ranks, pcie, host: (
        12 * psi / ranks / pcie, 80 * psi / ranks / host),
    "fused_adamw_bytes": lambda psi, ranks, pcie, host: (12 * psi / ranks / pcie, 28 * psi / host),
    "resident_bytes": lambda psi, ranks, pcie, host: (12 * psi / ranks / pcie, 16 * psi / host),
    "resident_bytes_of_states": lambda psi, ranks, pcie, host: (
        12 * psi / ranks / pcie, 12 * psi / host),
    "adamw_runs_on_host": lambda psi, ranks, pcie, host: (
        12 * psi / ranks / pcie, 80 * psi / pcie),
    "wrong_count": lambda *case: sum(offload(*case)),
    "wrong_number copies": lambda *case: offload(*case)[::-1]}


@pytest.mark.parametrize("name, words, answer", [
    (name, words, answer) for name, wrong in
    (("efficiency", EFFICIENCY), ("ratio", RATIO), ("offload", OFFLOAD))
    for words, answer in wrong.items()])
def test_wrong_scaling_costs(name, words, answer):
    rejected(lab.check_scaling_costs, changed(**{name: answer}), words)


@pytest.mark.parametrize("answers", [
    changed(), changed(efficiency=lambda few, many: Fraction(many[1], few[1]) * few[0] * few[2] / (
        many[0] * many[2])),
    changed(ratio=lambda psi, ranks, tokens, flops, link: np.float64(2) * (1 - 1 / ranks) * flops
            / link / tokens),
    changed(offload=lambda psi, ranks, pcie, host: np.array([12 / ranks / pcie, 80 / host]) * psi)])
def test_right_scaling_costs(answers):
    accepted(lab.check_scaling_costs, answers)

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
    "the speed-up of all GPUs together": lambda few, many: many[1] / many[2] / (few[1] / few[2]),
    "the few are not always one GPU": lambda few, many: (
        many[1] / many[2] / (few[1] / few[2]) / many[0]),
    "different numbers of tokens": lambda few, many: few[2] / many[2],
    "how much longer a step takes": lambda few, many: many[2] / few[2],
    "upside down": lambda few, many: 1 / efficiency(few, many),
    "in percent": lambda few, many: 100 * efficiency(few, many),
    "you say 1": lambda few, many: 1,
    "not a number": lambda few, many: None,
    "cannot be called": lambda few: 1}
RATIO = {
    "sends the rest": lambda psi, ranks, tokens, flops, link: (
        12 * psi / link / (6 * psi * tokens / flops)),
    "DDP's bytes": lambda *case: 2 / 3 * ratio(*case),
    "one collective of three": lambda *case: ratio(*case) / 3,
    "a parameter has 4 bytes": lambda *case: ratio(*case) / 4,
    "on its own tokens": lambda psi, ranks, *case: ratio(psi, ranks, *case) / ranks,
    "forward's computing alone": lambda *case: 3 * ratio(*case),
    "upside down": lambda *case: 1 / ratio(*case) if case[1] > 1 else 0,
    "you say 0": lambda *case: 0}
OFFLOAD = {
    "not the model": lambda psi, ranks, pcie, host: (12 * psi / pcie, 80 * psi / host),
    "there are three": lambda psi, ranks, pcie, host: (
        8 * psi / ranks / pcie, 80 * psi / host),
    "one copy of the shard": lambda psi, ranks, pcie, host: (
        4 * psi / ranks / pcie, 80 * psi / host),
    "slower than the host's memory": lambda psi, ranks, pcie, host: (
        12 * psi / ranks / host, 80 * psi / host),
    "a parameter has 4 bytes": lambda psi, ranks, pcie, host: (
        3 * psi / ranks / pcie, 80 * psi / host),
    "share the host's memory": lambda psi, ranks, pcie, host: (
        12 * psi / ranks / pcie, 80 * psi / ranks / host),
    "one fused pass": lambda psi, ranks, pcie, host: (12 * psi / ranks / pcie, 28 * psi / host),
    "16 bytes": lambda psi, ranks, pcie, host: (12 * psi / ranks / pcie, 16 * psi / host),
    "12 bytes": lambda psi, ranks, pcie, host: (12 * psi / ranks / pcie, 12 * psi / host),
    "do not pass PCIe": lambda psi, ranks, pcie, host: (
        12 * psi / ranks / pcie, 80 * psi / pcie),
    "not 2 numbers": lambda *case: sum(offload(*case)),
    "seconds of copies": lambda *case: offload(*case)[::-1]}


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

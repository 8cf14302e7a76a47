"""ZeRO's figure 1 and table 1, LOMO's table 1, and what common material gets wrong."""

import math
from decimal import ROUND_HALF_UP, Decimal

import pytest

from labs.predictions.memory.recipes import RECIPES, model_states, recipe_of
from labs.training.memory_categories import GB, GiB, Memory

ZERO = "bf16, fp32 master"  # the paper's fp16 has the same bytes: 2 + 2 + K, K = 12


def megatron(parameters: float, ranks: int = 1, distributed: bool = False) -> Memory:
    """Bytes of model states under Megatron's bf16 recipe: 18 per parameter; 6 + 12/N with its
    distributed optimizer, which shards like ZeRO-1 (bf16 parameters and fp32 gradients stay)."""
    return model_states(parameters, "megatron", ranks=ranks, stage=1 if distributed else 0)


def saving(ranks: int, stage: int, recipe="bf16, fp32 master") -> float:
    """How many times fewer bytes of model states a rank keeps under ZeRO `stage`. The often quoted
    4 and 8 times are the limits of stages 1 and 2 for N -> infinity with K = 12."""
    whole = model_states(1, recipe).total
    return whole / model_states(1, recipe, ranks=ranks, stage=stage).total


def lomo(parameters: float, largest: float) -> Memory:
    """Bytes of model states under LOMO (Lv et al., 2023, arXiv 2306.09782, section 3.1): fused
    with backward, it keeps no state and only one tensor's gradient; `largest` is its elements."""
    return Memory(parameters=2 * parameters, gradients=2 * largest)


@pytest.mark.parametrize("name, total", [
    ("fp32", 16), ("bf16", 8), ("bf16, fp32 moments", 12), ("bf16, fp32 master", 16),
    ("bf16 policy", 16), ("megatron", 18), ("fp32 momentum", 12), ("fp32 sgd", 8)])
def test_bytes_per_parameter(name, total):
    assert RECIPES[name].total == total


@pytest.mark.parametrize("billions, recipe, gigabytes", [
    (7, "bf16, fp32 moments", 84), (13, "bf16, fp32 moments", 156), (7, ZERO, 112)])
def test_much_quoted_totals(billions, recipe, gigabytes):
    assert model_states(billions * 1e9, recipe).total / GB == gigabytes


def test_28_gb_of_optimizer_for_7b_is_two_bf16_moments():
    # Often printed beside "12 bytes per parameter", which needs 56 GB of fp32 moments.
    assert model_states(7e9, "bf16").optimizer_state / GB == 28
    assert model_states(7e9, "bf16, fp32 moments").optimizer_state / GB == 56


def test_figure_1_of_zero():
    found = [model_states(7.5e9, ZERO, ranks=64, stage=stage).total / GB for stage in range(4)]
    assert [round(gigabytes, 1) for gigabytes in found] == [120, 31.4, 16.6, 1.9]


# Rajbhandari et al., table 1, GB per device: (ranks: stage 1, 2, 3), for 7.5B, 128B and 1T.
TABLE_1 = {
    7.5e9: {1: "120 120 120", 4: "52.5 41.3 30", 16: "35.6 21.6 7.5", 64: "31.4 16.6 1.88",
            256: "30.4 15.4 0.47", 1024: "30.1 15.1 0.12"},
    128e9: {1: "2048 2048 2048", 4: "896 704 512", 16: "608 368 128", 64: "536 284 32",
            256: "518 263 8", 1024: "513 257 2"},
    1e12: {1: "16000 16000 16000", 4: "7000 5500 4000", 16: "4750 2875 1000",
           64: "4187 2218 250", 256: "4046 2054 62.5", 1024: "4011 2013 15.6"},
}
CELLS = [(size, ranks, stage, cell) for size, table in TABLE_1.items()
         for ranks, row in table.items() for stage, cell in enumerate(row.split(), start=1)]
# The paper cuts these off where it rounds all others: 513.5 is printed 513, 2218.75 as 2218.
CUT_OFF = {(128e9, 1024, 1), (128e9, 1024, 2), (1e12, 64, 1), (1e12, 64, 2),
           (1e12, 256, 1), (1e12, 256, 2), (1e12, 1024, 1), (1e12, 1024, 2)}


def printed(value: float, cell: str, cut: bool) -> float:
    digits = len(cell.partition(".")[2])
    if cut:
        return math.floor(value * 10**digits) / 10**digits
    return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


@pytest.mark.parametrize("size, ranks, stage, cell", CELLS)
def test_table_1_of_zero(size, ranks, stage, cell):
    gigabytes = model_states(size, ZERO, ranks=ranks, stage=stage).total / GB
    cut = (size, ranks, stage) in CUT_OFF
    assert printed(gigabytes, cell, cut) == float(cell)
    # A cell is listed as cut off only where rounding would have printed something else.
    assert (printed(gigabytes, cell, False) != float(cell)) == cut


def test_table_1_has_54_cells():
    assert len(CELLS) == 54


def test_70b_on_8_ranks():
    found = [model_states(70e9, "bf16, fp32 moments", ranks=8, stage=s).total / GB
             for s in range(4)]
    # 210 is often printed for stage 2; 2 bytes of parameters stay: 140 + 10 * 70 / 8 = 227.5.
    assert found == [840, 350, 227.5, 105]


def test_four_and_eight_times_are_limits():
    assert [round(saving(8, stage), 2) for stage in (1, 2, 3)] == [2.91, 4.27, 8]
    assert [round(saving(10**9, stage), 3) for stage in (1, 2)] == [4, 8]


def test_megatron():
    assert megatron(1, ranks=8).total == 18
    assert megatron(1, ranks=8, distributed=True).total == 6 + 12 / 8


LLAMA_7B = 6_738_415_616


def gib(value):
    return round(value / GiB, 2)


def test_lomo_table_1():
    # Lv et al., table 1: labelled GB, in truth GiB.
    adam = model_states(LLAMA_7B, "bf16, fp32 master")
    assert (gib(adam.parameters), gib(adam.gradients), gib(adam.optimizer_state)) == (
        12.55, 12.55, 75.31)
    # Their SGD keeps an fp32 master copy: 25.10, where SGD as such would keep nothing.
    assert gib(model_states(LLAMA_7B, "bf16 sgd, fp32 master").optimizer_state) == 25.10
    # 0.24 GiB of gradients: the largest tensor, the embedding, 32000 x 4096 in 16 bits.
    fused = lomo(LLAMA_7B, 32000 * 4096)
    assert (gib(fused.parameters), gib(fused.gradients), fused.optimizer_state) == (12.55, 0.24, 0)


def test_bad_input_gets_one_sentence():
    with pytest.raises(ValueError, match="ZeRO has stages 1, 2 and 3"):
        model_states(1e9, stage=4)
    with pytest.raises(ValueError, match="no recipe 'fp8'"):
        recipe_of("fp8")
    with pytest.raises(ValueError, match="at least 1 rank"):
        model_states(1e9, ranks=0)

"""Notebook 04's package: the search, what it measures against the formulas, what it draws."""

import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
from _build.definitions import ROOT, definitions

import labs.fsdp as lab
from labs import launch
from labs.checks.comparison import compare, model_of
from labs.checks.verdicts import Verdict
from labs.fsdp import (
    checkpoint,
    comparisons,
    cost,
    fsdp1,
    limit_charts,
    memory_limits,
    scaffold,
)
from labs.fsdp.cost import collectives, gathered_bytes
from labs.fsdp.limit_charts import count_operations
from labs.fsdp.memory_limits import FORMULAS, LargestModel, ProcessOverhead
from labs.predictions import hardware
from labs.training import models, strategies
from labs.training.presets import preset
from labs.workers import cuda
from labs.workers.failures import LaunchError, RankFailed, failure
from labs.workers.memory import OOMInfo
from labs.workers.outcomes import Kind, Outcome

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
SMALL = preset("laptop", ranks=2, layers=3, hidden=32, heads=2, context=16, batch=2)
linux = pytest.mark.skipif(not memory_limits.can_limit(), reason="this system limits no process")


@pytest.fixture(scope="module")
def solution():
    return definitions("04_fsdp", PRESET=SMALL)


@pytest.fixture(scope="module")
def measured(solution):
    return compare({"DDP": strategies.ddp, "FSDP": solution.shard,
                    "FSDP + checkpointing": solution.checkpointed}, memory_limits.preset(2, 2),
                   tries=2, rounds=1, observe=count_operations)


@pytest.mark.parametrize("most", range(0, 40, 3))
@pytest.mark.parametrize("start", (1, 8, 30))
def test_the_search_finds_the_last_that_holds_and_asks_nothing_twice(most, start):
    asked = []

    def holds(n):
        asked.append(n)
        return n <= most

    assert memory_limits.search(holds, start) == (most, len(asked))
    assert len(asked) == len(set(asked)) <= 14


def test_a_good_guess_costs_two_trainings():
    assert memory_limits.search(lambda n: n <= 24, 24) == (24, 2)


def test_the_predicted_peak_is_the_measured_one(measured):
    """Said in the notebook: the measured bar ends where the formula's tick stands."""
    for name, found in measured.results.items():
        want = memory_limits.predicted_peak(name, 2, 2).total
        assert found.report.step_peak.total == pytest.approx(want, rel=0.02), name


def test_the_rule_counts_what_is_called(solution):
    made = model_of(SMALL)
    chosen = {"whole model": lambda model: [], "each block": lab.blocks,
              "each linear": solution.linears}
    found = compare({name: partial(scaffold.shard_units, select)
                     for name, select in chosen.items()}, SMALL, tries=2)
    for name, result in found.results.items():
        units = scaffold.unit_sizes(chosen[name], made)
        calls, nbytes, _ = solution.cost(units, float, float)
        assert calls == len(result.calls) == collectives(units)
        assert sum(units) == models.count_trainable(made)
        # said in the notebook: to the byte, and the whole model as one unit is there twice
        assert result.report.gathered == nbytes == gathered_bytes(units)
        assert units[1:] or gathered_bytes(units) == 8 * found.parameters


@pytest.mark.slow
def test_fully_shard_is_zero3_by_hand(solution, monkeypatch, capsys):
    """Said in the notebook: the same bytes, in as many calls, once the root is freed too."""
    monkeypatch.chdir(ROOT / "solutions")
    zero3 = lab.your_zero3()
    assert zero3.is_students
    found = comparisons.measure_zero3(zero3, solution.shard, SMALL)
    _, hand, fully, freed = found.results.values()
    counters = [4 * 4, *2 * [4 * sum(1 for _ in model_of(SMALL).parameters())]]  # AdamW's
    for result, steps in zip((hand, fully, freed), counters, strict=True):
        after = result.report.phases["backward"]
        assert after.parameters == after.gradients == 4 * found.parameters / 2
        assert after.optimizer_state == 2 * after.parameters + steps
    _, *travels = map(found.communication_volume, found.results)
    assert travels[0] == travels[2] == 3 > travels[1]
    assert len(hand.calls) == len(freed.calls) == len(fully.calls) + 1
    assert "sent in a step 3 Ψ, predicted 3" in repr(comparisons.draw_zero3(found))
    losses = [r.losses for r in found.results.values()]
    assert losses == 4 * [pytest.approx(losses[0], rel=1e-6)]


def test_what_checkpointing_saves_of_activations_grows_with_the_layers():
    """Said in the notebook."""
    found = [[memory_limits.predicted_peak(name, layers).activations for name in FORMULAS]
             for layers in (6, 12, 24)]
    ratios = [plain / checkpointed for _, plain, checkpointed in found]
    assert ratios[0] > 3 and ratios[1] > 1.9 * ratios[0] and ratios[2] > 1.9 * ratios[1]


def test_the_gain_over_ddp_grows_with_the_ranks():
    """Said in the notebook; activations do not shrink, so with checkpointing it grows more."""
    def most(name, ranks):
        return memory_limits.search(lambda n: memory_limits.needed(name, n, ranks) <= 24e6, 4)[0]

    ddp, fsdp, checkpointed = ([most(name, ranks) for ranks in (2, 8)] for name in FORMULAS)
    assert ddp[0] == ddp[1] and fsdp[1] > fsdp[0] > ddp[0]
    assert checkpointed[1] / checkpointed[0] > 1.3 * fsdp[1] / fsdp[0]


@pytest.mark.slow
def test_by_size_blocks_become_units_or_their_parts_do(capsys):
    """Said in the notebook, of any preset: here with an embedding as large as a linear layer."""
    size = preset("laptop", ranks=2, layers=3, hidden=64, heads=4, context=32, batch=2)
    right = definitions("04_fsdp", PRESET=size)
    found = lab.show_wrap_policies(right.fsdp1, right.fsdp1_by_size, size).data
    by_class, whole, parts = found["collectives"].values
    assert by_class == whole < parts


@pytest.mark.parametrize("gpus", (1, 2, 4, 8))
def test_on_gpus_the_limit_lies_between_what_fsdp_and_ddp_need(gpus, monkeypatch):
    """And the model is so large that a rank's memory is well above a CUDA context."""
    monkeypatch.setattr(cuda, "count", lambda: gpus)
    size, limit = memory_limits.preset(), memory_limits.memory_limit()
    ddp, fsdp, least = (memory_limits.needed(name, size.layers) for name in FORMULAS)
    assert size.ranks == max(2, gpus) and size.hidden >= 1024
    assert ddp > 1.15 * limit > 1.15**2 * fsdp and least > 1e9
    assert memory_limits.can_limit() and memory_limits.size_text(limit) == f"{limit / 1e9:g} GB"
    step = 6 * memory_limits.parameters(size.layers) * size.batch * size.context
    assert step / 19.5e12 > 0.03  # seconds on an A100 at its peak in fp32


def test_without_gpus_the_limit_is_that_of_a_laptop():
    assert memory_limits.memory_limit() == 47e6
    assert str(memory_limits.preset()).startswith("laptop, limit: 4 ranks, GPT-2 with 8 layers of "
                                                  "width 160, 1 × 64 tokens")


@linux
def test_a_model_that_needs_more_than_the_limit_dies_and_a_small_one_does_not():
    assert memory_limits.fits(strategies.ddp, 1, 36e6)
    assert not memory_limits.fits(strategies.ddp, 7, 36e6)


def test_one_rank_that_ran_out_of_memory_explains_one_that_exited(monkeypatch):
    """Under a limit C++ code of another rank may exit with any message, and with code 127."""
    outcomes = [Outcome(0, Kind.OUT_OF_MEMORY, oom=OOMInfo(8, 9, 16)),
                Outcome(1, Kind.PROCESS_EXITED, exit_code=127)]

    def launch(*_, **__):
        raise failure(outcomes)

    monkeypatch.setattr(memory_limits, "launch", launch)
    assert memory_limits.oom_under_limit(strategies.ddp, 1, 16e6) == OOMInfo(8, 9, 16)
    assert not memory_limits.fits(strategies.ddp, 1, 16e6)
    outcomes[0] = Outcome(0, Kind.RAISED, error_type="ValueError")
    with pytest.raises(RankFailed):
        memory_limits.fits(strategies.ddp, 1, 16e6)


def test_the_pictures_say_what_was_measured(measured):
    rows = [LargestModel("DDP", 52e6, 6, 6, 2, ProcessOverhead(0, 0)),
            LargestModel("FSDP + checkpointing", 52e6, 26, 25, 3, ProcessOverhead(0, 0))]
    picture = lab.show_largest_models(measured, *rows)
    assert picture.png().startswith(b"\x89PNG")
    assert "largest that fits not tried\n" in repr(picture)
    assert "Checkpointing, at the peak: " in repr(lab.show_memory_and_arithmetic(measured))
    assert "4%" in repr(lab.show_summary(measured, *rows))
    assert rows[1].off == pytest.approx(0.04, abs=0.005)


def test_where_not_even_one_layer_fits_it_says_so(measured):
    none = LargestModel("DDP", 52e6, 0, 0, 2, ProcessOverhead(0, 0))
    assert repr(none) == ("DDP: predicted that not even one layer fits; found that not even one "
                          "layer fits by 2 trainings under 52 MB a rank")
    one = replace(none, predicted=1)
    assert one.off is None and "predicted 1 layer (" in repr(one)
    assert "DDP: " in repr(lab.show_largest_models(measured, none))
    assert "largest that fits 0 M parameters" in repr(lab.show_largest_models(measured, one))
    assert "–" in repr(lab.show_summary(measured, none))


def test_an_unfilled_exercise_makes_every_picture_wait(capsys):
    def unfilled(*_, **__):
        raise NotImplementedError("Exercise 4.1")

    waiting = [lab.show_beside_zero3(strategies.ddp, unfilled, SMALL),
               lab.show_state_dicts(unfilled),
               lab.largest_model("FSDP", unfilled, 52e6)]
    waiting.append(lab.show_largest_models(waiting[0], waiting[-1]))
    assert all(isinstance(verdict, Verdict) and verdict.passed is None for verdict in waiting)
    assert waiting[1].sentence == "waits for Exercise 4.1"


@pytest.mark.parametrize("module, draw, title", [
    (checkpoint, lambda: lab.show_state_dicts(strategies.ddp), "State dicts"),
    (comparisons, lambda: lab.show_gradient_accumulation(strategies.ddp, SMALL),
     "Gradient accumulation"),
    (comparisons, lambda: lab.show_hsdp(strategies.ddp, SMALL), "HSDP"),
    (limit_charts, lambda: lab.show_offload(strategies.ddp, strategies.ddp), "CPU offload"),
    (fsdp1, lab.show_fsdp1_names, "FSDP1's names"),
    (fsdp1, lambda: lab.show_wrap_policies(strategies.ddp, strategies.ddp, SMALL),
     "FSDP1's wrapping policies"),
    (scaffold, lab.show_underflow, "Underflow")])
def test_a_picture_of_no_exercise_is_called_by_its_title(module, draw, title, monkeypatch, capsys):
    """Where its ranks fail it blames no exercise, because no exercise's code was drawn."""
    def fail(*_, **__):
        raise LaunchError("the ranks failed")

    for name in {"launch", "compare"} & set(vars(module)):
        monkeypatch.setattr(module, name, fail)
    verdict = draw()
    assert (verdict.exercise, verdict.passed) == (title, False)
    assert str(verdict).startswith(f"✗ {title}  the ranks failed")


def test_every_name_of_fsdp1_runs_and_sends_what_its_successor_does(capsys):
    rows = {row[0]: row for row in lab.show_fsdp1_names().rows}
    full, once, none, half = (rows[name] for name in (
        "ShardingStrategy.FULL_SHARD", "ShardingStrategy.SHARD_GRAD_OP",
        "ShardingStrategy.NO_SHARD", "MixedPrecision"))
    assert int(full[2]) > int(once[2]) > int(none[2]) == 0
    assert float(half[4]) == pytest.approx(float(full[4]) / 2, abs=1)
    before, after = (rows[f"BackwardPrefetch.BACKWARD_{name}"] for name in ("PRE", "POST"))
    assert before[2:5] == after[2:5] == full[2:5]  # the same traffic, in another order
    assert (full[5], before[5], after[5], once[5], none[5]) == ("before", "before", "after", "–",
                                                                "–")
    offloaded = rows["CPUOffload(offload_params=True)"]
    assert offloaded[2:] == full[2:] and "–" not in offloaded


@pytest.mark.slow
def test_computing_in_bf16_halves_what_it_computes_with(solution, capsys):
    """Said in the notebook."""
    panels = lab.show_precision(solution.shard, solution.mixed).data
    single, half, _ = panels["peak of forward"].values
    assert half.activations == pytest.approx(single.activations / 2, rel=0.03)
    assert half.buffers == pytest.approx(single.buffers / 2, rel=0.03)
    assert (half.parameters, half.optimizer_state) == (single.parameters, single.optimizer_state)
    single, half, both = panels["gathered and reduced"].values
    assert 2 * half["all_gather"] == single["all_gather"]
    assert 2 * both["reduce_scatter"] == half["reduce_scatter"] == single["reduce_scatter"]
    assert sum(half.values()) == pytest.approx(8, rel=0.05)  # the root is gathered once


def test_a_scaled_loss_brings_back_what_fp16_lost_and_nothing_in_bf16(capsys):
    """Said in the notebook."""
    rows = {row[0]: row for row in lab.show_underflow().rows}
    half, brain = ([float(text.rstrip("%").replace(",", "")) for text in rows[name][1:]]
                   for name in ("fp16", "bf16"))
    assert half[0] == 6e-8 and half[2] > 5 and half[3] < half[1] / 1000
    assert brain[2] < 0.5 and brain[3] == brain[1]


def test_arithmetic_of_checkpointing_is_less_than_a_second_forward(measured):
    """Said in the notebook: less than 4/3, because some of a block is not computed again."""
    ddp, plain, checkpointed = (max(one.observed) for one in measured.results.values())
    assert ddp == plain and 1.1 < checkpointed / plain < 4 / 3


def numbers(table, column) -> list[float]:
    return [float(row[column].split()[0].replace(",", "")) for row in table.rows]


@pytest.mark.slow
def test_reducing_once_holds_whole_gradients(solution, capsys):
    """Said in the notebook: fewer bytes sent, 4Ψ bytes of gradients instead of 4Ψ/N."""
    table = lab.show_gradient_accumulation(
        solution.shard, preset("laptop", hidden=64, layers=3), parts=3)
    sent, held = numbers(table, 3), numbers(table, 4)
    assert sent[0] > sent[1] > sent[2] == 2
    assert held[0] < held[1] < held[2]
    psi = models.count_trainable(model_of(preset("laptop", hidden=64, layers=3)))
    assert held[1] - held[0] == pytest.approx(4 * psi / 2 / 1e6, abs=0.1)


@pytest.mark.slow
def test_two_replicas_hold_twice_as_much_and_all_reduce_a_shard(solution, capsys):
    """Said in the notebook."""
    table = lab.show_hsdp(solution.shard, SMALL)
    held, reduced = numbers(table, 2), numbers(table, 5)
    assert held[1] == pytest.approx(2 * held[0], rel=0.1) and reduced == [0, 0.5]
    assert numbers(table, 3) == [pytest.approx(2, abs=0.4)] * 2


def test_one_unit_loses_most_and_blocks_least(solution, capsys):
    """Said in the notebook, for each link."""
    rows = {row[0]: row[3:] for row in lab.show_exposed(solution.cost).rows}
    for place in range(len(cost.LINKS)):
        lost = {name: float(row[place].split()[0].replace(",", "")) for name, row in rows.items()}
        assert max(lost, key=lost.get) == "whole model" and min(lost, key=lost.get) == "each block"
        assert rows["each block"][place].endswith("←")


def test_on_a_slow_link_all_small_units_lose_alike():
    """The notebook's numbers: what is saved on NVLink, and seconds on 100 GbE."""
    wrappings = cost.llama_wrappings()
    nvlink, _, ethernet = ({name: cost.exposed(units, cost.a100_on(link))
                            + cost.OVERHEAD * len(units)
                            for name, units in wrappings.items()} for link in cost.LINKS)
    saved = {name: 1 - seconds / nvlink["whole model"] for name, seconds in nvlink.items()}
    assert round(saved["each block"], 2) == 0.91 and round(saved["each linear"], 2) == 0.82
    alike = [ethernet[name] for name in ("2 blocks", "each block", "each linear")]
    assert 1.475 < min(alike) < max(alike) < 1.495


def test_the_units_of_llama_are_its_parameters():
    for units in cost.llama_wrappings().values():
        assert sum(units) == 6_738_415_616


def test_offload_costs_a_faster_gpu_more(capsys):
    """Said in the notebook: of a step, by year of the GPU."""
    # of those that are for training: an L4 is newer than an A100, and slower
    shares = [float(row[-1].rstrip("%")) for row in lab.show_offload_on_gpus().rows
              if hardware.gpu(row[0]).nvlink or row[0] == "T4"]
    assert shares == sorted(shares) and shares[-1] > 5 * shares[0]
    table = lab.show_offload_on_gpus()  # the Notice names both
    assert "1.5 s on a DGX A100" in table.note
    assert next(row for row in table.rows if row[0] == "A100-80")[3] == "1.33"


@pytest.mark.slow
@linux
def test_training_under_the_limit_is_drawn_from_one_launch_for_each(solution, monkeypatch, capsys):
    launches = []

    def counted(*args, **options):
        launches.append(options.get("memory_limit"))
        return launch(*args, **options)

    monkeypatch.setattr(memory_limits, "launch", counted)
    words = repr(lab.show_training_under_limit(
        {"DDP": strategies.ddp, "FSDP": solution.shard}, 36e6, layers=7))
    assert launches == [36e6, 36e6]
    assert "DDP: out of memory" in words and "FSDP: measured" in words


def test_a_loop_that_does_not_clip_shows_in_its_table(solution, capsys):
    """Said in the notebook: the norm that the optimizer used, and the distance that grows."""
    found, fixed = (lab.show_loop(loop) for loop in (solution.found_loop, solution.loop))
    assert min(numbers(found, 1)) > 0.51 and set(numbers(fixed, 1)) == {0.5}
    assert min(numbers(found, 3)) > 1e-2 > 1e-5 > max(numbers(fixed, 3))


def test_hugging_faces_init_weights_forgets_the_scaling_of_a_sharded_model():
    """Said in the notebook: fully_shard changes the class, which is taken for custom code."""
    by_apply, by_method, usual = launch(_deviations, ranks=2, quiet=True, device="cpu")[0]
    assert by_apply == pytest.approx(usual, rel=0.2) and by_method > 2 * usual


def _deviations() -> list[float]:
    def empty():
        import torch

        with torch.device("meta"):
            model = models.gpt2(4, 48, 2, 22)
        return scaffold.shard_blocks(model, torch.optim.SGD)[0].to_empty(device="cpu")

    first, second = empty(), empty()
    first.apply(first._init_weights)
    second.init_weights()
    weights = [model.transformer.h[0].mlp.c_proj.weight for model in (first, second)]
    usual = models.gpt2(4, 48, 2, 22).transformer.h[0].mlp.c_proj.weight
    return [float(w.full_tensor().std()) for w in weights] + [float(usual.std())]

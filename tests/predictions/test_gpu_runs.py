"""Public runs on GPUs: read into jobs, and predicted within what the scoreboard promises."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from labs.predictions.code_bases import CODE_BASES, NANOTRON, PYTORCH_EAGER
from labs.predictions.gpu_runs import fit as fits
from labs.predictions.gpu_runs import scoreboard
from labs.predictions.gpu_runs.folder import ROWS, FolderError, load
from labs.predictions.gpu_runs.intervals import factors
from labs.predictions.gpu_runs.scoreboard import CALIBRATED, HELD_OUT, OURS, compare
from labs.predictions.hardware import gpu
from labs.predictions.plans.calibration import NoCalibration, calibrated
from labs.predictions.plans.intervals import NEW, memory_factors, seconds_factors
from labs.predictions.plans.job import Job, Plan, impossible
from labs.predictions.plans.memory import rank_memory
from labs.predictions.plans.models import shape_named
from labs.predictions.plans.search import step_parts, step_seconds
from labs.predictions.plans.stages import layers_by_cost


@pytest.fixture(scope="module")
def runs():
    return load()


@pytest.fixture(scope="module")
def board(runs):
    return compare(runs)


def test_every_row_is_a_job_or_says_why_not(runs):
    assert len(runs) > 2000
    for run in runs:
        assert bool(run.job) != bool(run.refused), run.id
        assert not run.refused.endswith(".") and "\n" not in run.refused
        if run.job:
            assert not impossible(run.job, run.plan) and run.plan.gpus == run.job.gpus


def test_a_row_of_nanotron_is_the_run_that_it_prints(runs):
    content = json.loads((ROWS / "ultrascale.json").read_text())
    row = dict(zip(content["fields"], content["rows"][0], strict=True))
    run = next(run for run in runs if run.id == "nanotron 0")
    assert (run.plan.data, run.plan.tensor, run.plan.pipeline) == (row["dp"], row["tp"], row["pp"])
    assert run.plan.sharding == "DDP" and row["zero"] == 0
    tokens = row["tokens_per_s_per_gpu"] * run.job.gpus * run.seconds
    assert tokens == pytest.approx(row["global_batch"] * 4096)
    assert run.memory == pytest.approx(row["memory_gib"] * 2**30)


@pytest.mark.parametrize("quantity, group, bound", [
    ("seconds", "nanotron, up to 16 GPUs", 4),
    ("seconds", "nanotron, up to 256 GPUs", 5),
    ("seconds", "nanotron, pipeline or TP across nodes", 15),
    ("seconds", "this workbook, up to 16 GPUs", 15),
    ("memory", "nanotron, DP and ZeRO-1", 2), ("memory", "nanotron, TP", 7),
    ("memory", "nanotron, PP", 7), ("memory", "nanotron, TP and PP", 7),
    ("memory", "Megatron-LM, dense GPT", 4), ("memory", "prime-rl, FSDP2", 4),
    ("seconds", "Megatron-LM, experts", 10), ("memory", "Megatron-LM, experts", 4),
    ("memory", "prime-rl, experts, LoRA", 7), ("memory", "prime-rl, experts, FSDP2", 5),
    ("memory", "this workbook, FSDP2, a rank of 8", 10)])
def test_the_median_error_of_a_group_is_within_its_bound(board, quantity, group, bound):
    ours = board.scores(quantity, group)[OURS]
    assert ours.rows >= 4 and ours.median <= bound


def test_we_are_nearer_than_what_knows_no_host_and_no_code_base(board):
    for quantity, group in board.groups():
        scores = board.scores(quantity, group)
        if OURS not in scores or scores[OURS].rows < 20:
            continue
        for other in set(scores) - {OURS, CALIBRATED}:
            assert scores[OURS].median <= scores[other].median, (group, other)


@pytest.mark.parametrize("quantity", ["seconds", "memory"])
def test_an_interval_of_80_percent_holds_about_as_many(board, quantity):
    rows = [row for row in board.rows if row.quantity == quantity]
    assert 0.75 < sum(row.is_held for row in rows) / len(rows) < 0.9
    for _, group in board.groups():
        found = board.scores(quantity, group).get(OURS)
        if found and found.rows >= 50:
            assert 0.7 < found.held < 0.95, group


def test_what_ran_is_said_to_fit(board):
    fit = board.fit
    ran = fit["ran, said to fit"] + fit["ran, said not to fit"]
    failed = fit["failed, said to fit"] + fit["failed, said not to fit"]
    assert fit["ran, said to fit"] > 0.99 * ran and fit["failed, said not to fit"] > 0.7 * failed


def test_the_chosen_plan_is_nearly_the_fastest_that_was_measured(board):
    few = [share for (_, gpus), share in board.choices.items() if gpus <= 64]
    many = [share for (_, gpus), share in board.choices.items() if gpus > 64]
    assert np.median(few) > 0.95 and np.median(many) > 0.9
    assert all(0 < share <= 1 for share in board.choices.values())


def test_constants_of_one_model_predict_the_other():
    """Rows of 8B with constants that were fitted to 1B alone."""
    own = [run for run in fits.measured_runs("nanotron", fits.SECONDS)
           if run.plan.pipeline == 1 and run.plan.tensor <= 8 and run.gpus <= 64]
    ones = [run for run in own if run.job.name == "nanotron 1B"]
    others = [run for run in own if run.job.name == "nanotron 8B"]
    far = fits.with_constants(NANOTRON, {"launch": 6e-3, "traffic": 2.0})
    fitted = fits.fit(ones, far, fits.SECONDS)
    errors = np.abs(np.expm1(fits.log_errors(others, fits.SECONDS, fitted)))
    before = np.abs(np.expm1(fits.log_errors(others, fits.SECONDS, far)))
    assert np.median(errors) < 0.07 < np.median(before)
    assert fits.value_of(fitted, "launch") == pytest.approx(4.4e-3, rel=0.05)


@pytest.mark.parametrize("content, says", [
    ("no JSON", "cannot read"), ("[]", "of that no rows can be read"),
    ('{"about": {"source": "somebody"}}', "'somebody'"),
    ('{"about": {"source": "nanotron"}}', "lacks what its rows are read with"),
    ('{"about": {"source": "nanotron"}, "models": {}, "fields": ["model"], "rows": [["1B"]]}',
     "lacks what its rows are read with")])
def test_a_bad_file_gets_one_sentence(tmp_path, content, says):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(FolderError, match=says) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


def test_an_empty_folder_gets_one_sentence(tmp_path):
    with pytest.raises(FolderError, match="has no JSON file: name a folder of runs"):
        load(tmp_path)


def test_the_folder_can_have_models_that_are_not_among_ours(tmp_path):
    content = json.loads((ROWS / "ultrascale.json").read_text())
    content["models"]["3B"] = {"layers": 28, "hidden": 3072, "heads": 24, "ffn": 8192, "tied": True}
    content["rows"] = [["3B", *row[1:]] for row in content["rows"][:20] if row[0] == "1B"]
    content["rows"].append(["7B", *content["rows"][0][1:]])
    (tmp_path / "half.json").write_text(json.dumps(content))
    *known, unknown = load(tmp_path)
    assert all(run.refused or run.job.shape.layers == 28 for run in known)
    assert unknown.refused == "model '7B' has no sizes in the file"


# 1B has 16 layers and a head of 4 layers' products; 8B 32 and one of 2.2.
@pytest.mark.parametrize("layers, layer, head, stages, cut", [
    (16, 1, 4, 2, (10, 6)), (16, 1, 4, 4, (5, 5, 5, 1)), (16, 1, 4, 1, (16,)),
    (32, 1, 2.2, 2, (18, 14)), (32, 1, 2.2, 4, (9, 9, 8, 6)), (8, 1, 100, 4, (8, 0, 0, 0)),
    (5, 1, 0, 5, (1, 1, 1, 1, 1))])
def test_stages_are_cut_by_cost(layers, layer, head, stages, cut):
    assert layers_by_cost(layers, layer, head, stages) == cut
    assert sum(cut) == layers


def _job(**changes) -> Job:
    return Job(**{"name": "8B", "shape": shape_named("Llama-3-8B"), "sequence": 4096, "batch": 256,
                  "gpu": gpu("H100"), "gpus": 16, "code": NANOTRON} | changes)


def test_memory_belongs_to_the_job_and_seconds_to_the_card():
    plan = Plan(4, 4, sharding="ZeRO-1", recompute="none")
    both = [_job(gpu=gpu(name)) for name in ("H100", "A100-80")]
    one, other = (rank_memory(job, plan) for job in both)
    assert one == other
    slow, fast = step_seconds(both[1], plan), step_seconds(both[0], plan)
    assert slow > 1.3 * fast


def test_a_small_micro_batch_waits_for_the_host_whatever_tensor_parallelism_does():
    waits = {tensor: step_parts(_job(), Plan(16 // tensor, tensor, recompute="none"))
             for tensor in (1, 8)}
    assert waits[1].launch < 0.01 * waits[1].total
    assert waits[8].launch > 0.3 * waits[8].total
    larger = step_parts(_job(), Plan(2, 8, micro_batch=16, recompute="none"))
    assert larger.launch < 0.01 * larger.total and larger.total < 0.8 * waits[8].total


def test_a_pipeline_on_many_nodes_stalls_and_one_on_few_does_not():
    few = step_parts(_job(gpus=64), Plan(16, 2, 2, recompute="none"))
    many = step_parts(_job(gpus=512), Plan(128, 2, 2, recompute="none"))
    assert few.stall == 0 < many.stall


def test_a_row_that_lacks_something_does_not_keep_the_others_from_being_read(tmp_path):
    content = json.loads((ROWS / "megatron.json").read_text())
    first, second = [row for row in content["rows"] if "tp1_pp4_vp1" in row[0]][:2]
    content["configs"] |= {"gpt/short": dict(content["configs"][first[0]])}
    del content["configs"]["gpt/short"]["micro-batch-size"]
    content["rows"] = [["gpt/short", *first[1:]], second, ["gpt/unknown", *first[1:]]]
    (tmp_path / "megatron.json").write_text(json.dumps(content))
    lacking, known, unknown = load(tmp_path)
    assert lacking.refused == "it lacks micro-batch-size" and known.job
    assert unknown.refused == "gpt is no dense GPT"


@pytest.mark.parametrize("stages, says", [
    ((16, 16), "4 pipeline ranks are needed"), ((8, 8, 8, 9), "32 layers on 4"),
    ((-1, 11, 11, 11), "one number for each rank"), ("odd", "choose equal, by cost or list"),
    ((8, 8, 8, 8), ""), ((5, 9, 9, 9), ""), ("equal", ""), ("by cost", "")])
def test_stages_are_listed_or_named(stages, says):
    plan = Plan(4, 1, 4, stages=stages, recompute="none")
    reason = impossible(_job(), plan)
    assert says in reason and bool(says) == bool(reason)
    if not says and not isinstance(stages, str):
        held = [rank_memory(_job(), plan, stage)["parameters"] for stage in (1, 2)]
        assert held[0] == pytest.approx(held[1])


def test_lora_keeps_gradients_of_few_and_computes_no_others():
    plan = Plan(16, sharding="FSDP", recompute="full")
    whole, few = _job(code=PYTORCH_EAGER), _job(code=PYTORCH_EAGER, lora=16)
    # what peft prints for Llama-3-8B with rank 16 on q, k, v, o, gate, up and down
    assert 32 * few.trained * few.layer_parameters == pytest.approx(41_943_040)
    one, other = rank_memory(whole, plan), rank_memory(few, plan)
    assert one["parameters"] == other["parameters"]
    assert other["optimizer state"] < 0.01 * one["optimizer state"] > 0
    slow, fast = step_parts(whole, plan), step_parts(few, plan)
    # of four products with recomputation, that of the weights' gradient goes
    assert fast.matmul == pytest.approx(0.75 * slow.matmul, rel=0.06)


def test_offload_frees_the_gpu_and_takes_longer():
    plan = Plan(16, sharding="FSDP", recompute="full")
    away = replace(plan, offload=True)
    job = _job(code=PYTORCH_EAGER)
    held = rank_memory(job, away)
    assert held["parameters"] == held["optimizer state"] == held["gradients"] == 0
    assert held["gathered parameters"] == rank_memory(job, plan)["gathered parameters"] > 0
    assert step_parts(job, away).host > 0 == step_parts(job, plan).host
    assert "belongs to FSDP" in impossible(job, replace(away, sharding="DDP"))


def test_a_token_computes_its_experts_alone_and_all_are_kept():
    from labs.predictions.memory.shape import Shape

    sizes = ("mixtral", 1024, 8, 16, 8, 64, 2048, 32000)
    dense = Shape("llama", *sizes[1:])
    experts = Shape(*sizes, experts=8, active_experts=2, expert_ffn=1024)
    plan = Plan(16, sharding="FSDP", recompute="none")
    one, other = (_job(shape=shape, code=PYTORCH_EAGER) for shape in (dense, experts))
    assert step_parts(other, plan).matmul == pytest.approx(step_parts(one, plan).matmul)
    assert step_parts(other, plan).sharding > step_parts(one, plan).sharding
    assert rank_memory(other, plan)["parameters"] > 2 * rank_memory(one, plan)["parameters"]


@pytest.mark.parametrize("loss, bytes_each", [("eager", 12), ("in place", 6), ("chunked", 0.6)])
def test_a_kind_of_loss_has_its_bytes_for_each_logit(loss, bytes_each):
    plan = Plan(16, sharding="FSDP", recompute="none")
    held = rank_memory(_job(code=PYTORCH_EAGER, loss=loss), plan)["logits"]
    assert held == pytest.approx(bytes_each * 4096 * 128256)
    assert "choose eager, in place, chunked" in impossible(_job(loss="odd"), plan)


@pytest.mark.parametrize("tensor, micro_batch, name", [(1, 1, "kernels"), (8, 1, "launch")])
@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_one_measured_step_is_then_predicted_to_the_digit(tensor, micro_batch, name, factor):
    job, plan = _job(), Plan(16 // tensor, tensor, micro_batch=micro_batch, recompute="none")
    seconds = factor * step_seconds(job, plan)
    if name == "launch" and factor < 1:
        seconds = 0.9 * step_seconds(job, plan)  # the kernels take more than 0.7
    code = calibrated(job, plan, seconds)
    assert step_seconds(replace(job, code=code), plan) == pytest.approx(seconds, rel=1e-3)
    changed = [key for key, value in vars(code.overheads).items()
               if value != getattr(job.code.overheads, key)]
    assert changed == [name]
    other = Plan(8, 2, micro_batch=4, recompute="none")
    before = step_seconds(job, other)
    after = step_seconds(replace(job, code=code), other)
    assert (after > before) == (factor > 1) or name == "launch"


@pytest.mark.parametrize("factor", [0.01, 100])
def test_a_step_of_another_job_does_not_calibrate(factor):
    job, plan = _job(), Plan(16, recompute="none")
    with pytest.raises(NoCalibration, match="too far apart for a correction"):
        calibrated(job, plan, factor * step_seconds(job, plan))


def test_calibration_helps_where_the_machine_differs():
    """Rows of one model whose GPUs take 1.3 times as long: one of them corrects the others."""
    runs = [replace(run, seconds=1.3 * run.seconds, id=f"slow {run.id}")
            for run in fits.measured_runs("nanotron", fits.SECONDS)
            if run.plan.pipeline == 1 and run.plan.tensor <= 2 and run.gpus <= 16
            and run.job.name == "nanotron 8B"]
    found = compare(runs)
    _, group = found.groups()[0]
    scores = found.scores("seconds", group)
    assert scores[CALIBRATED].median < 8 < 15 < scores[OURS].median


def test_few_rows_give_a_wider_interval_than_they_show():
    few = factors([-0.1, 0.0, 0.1])
    assert few["low"] < np.exp(-0.1) and few["high"] > np.exp(0.1) and few["rows"] == 3
    many = factors(np.linspace(-1, 1, 1001).tolist())
    assert (many["low"], many["high"]) == pytest.approx((np.exp(-0.8), np.exp(0.8)), rel=0.01)


def test_a_code_base_that_was_not_fitted_has_its_own_interval():
    plan = Plan(16, sharding="FSDP", recompute="none")
    known = seconds_factors(_job(), replace(plan, sharding="DDP"))
    new = seconds_factors(_job(code=PYTORCH_EAGER), plan)
    assert new.kind == NEW == memory_factors(_job(code=PYTORCH_EAGER), plan).kind
    assert new.high - new.low > known.high - known.low
    low, high = new.of(2.0)
    assert low < 2 < high


@pytest.mark.parametrize("name", CODE_BASES)
def test_every_code_base_answers(name):
    job = _job(code=CODE_BASES[name])
    plan = Plan(16, sharding="FSDP", recompute="full")
    assert step_seconds(job, plan) > 0 and sum(rank_memory(job, plan).values()) > 0


def test_a_mean_of_nothing_is_no_score(board):
    assert board.scores("seconds", "no such group") == {}
    assert scoreboard.compare([]).rows == []


def test_what_notebook_06_reads_in_the_rows(runs):
    """Memory is the same on two kinds of card; a layer has a floor; over half of the pipelines on
    256 GPUs and more take far longer than kernels, hosts and links."""
    peaks = {}
    for run in runs:
        if run.source == "Megatron-LM" and run.memory and "dracooci" not in run.id and run.job:
            test, record = run.id.split(" ")
            for card in ("a100", "h100"):
                if record == f"dev_dgx_{card}":
                    peaks.setdefault(test, {})[card] = run.memory
    pairs = [both["a100"] / both["h100"] - 1 for both in peaks.values() if len(both) == 2]
    assert len(pairs) > 15 and np.median(np.abs(pairs)) < 0.02
    assert NANOTRON.overheads.launch == pytest.approx(4.4e-3, abs=5e-5)
    free = replace(NANOTRON, overheads=replace(NANOTRON.overheads, stall=0.0))
    many = [run for run in runs if run.source == "nanotron" and run.job and run.seconds
            and run.plan.pipeline > 1 and run.gpus >= 256]
    errors = fits.log_errors(many, fits.SECONDS, free)
    assert len(many) > 200 and np.mean(errors < -np.log(1.5)) > 0.5


def test_a_floor_stands_under_small_micro_batches():
    from labs.scaling.scoreboard_charts import show_launch_floor

    picture = show_launch_floor()
    small = [1e3 * row.measured / row.run.plan.micro_batches(row.run.job) for row in picture.data
             if row.run.plan.micro_batch == 1]
    assert max(small) < 1.1 * min(small)
    assert f"{min(small):.0f} to {max(small):.0f} ms on 2, 4 and 8" in picture.text


def test_the_readme_says_what_the_scoreboard_says(board):
    ours = board.scores("seconds", "nanotron, up to 256 GPUs")[OURS]
    peaks = {row.run.id: abs(row.predicted[OURS] / row.measured - 1) for row in board.rows
             if row.quantity == "memory"}
    text = " ".join(Path("README.md").read_text(encoding="utf-8").split())
    steps = f"half of {ours.rows} public runs on 8 to 256 H100s took within {ours.median:.0f} %"
    assert steps in text
    within = 100 * np.median(list(peaks.values()))
    assert f"half of {len(peaks):,} peaks were within {within:.1f} % of its bytes" in text


def test_the_picture_shows_every_run_and_says_how_near_they_are():
    from labs.scaling.scoreboard_charts import COLOURS, show_gpu_runs

    picture = show_gpu_runs()
    assert {row.run.source for row in picture.data.rows} == set(COLOURS)
    assert picture.text.startswith("Seconds: 1,2") and "half of them within" in picture.text
    for source in COLOURS:
        assert f"seconds, {source}: " in picture.text


def test_rows_are_also_predicted_without_their_own_model_or_code_base(monkeypatch):
    """`scripts/bench gpu-runs --held-out`: beside the usual predictions, which it leaves alone."""
    few = [next(run for run in runs if run.seconds and run.memory)
           for runs in (fits.measured_runs(source, fits.SECONDS)
                        for source in ("nanotron", "Megatron-LM"))]
    fitted_to = []
    monkeypatch.setattr(fits, "fit", lambda runs, code, quantity: (
        fitted_to.append({run.job.name for run in runs}) or code))
    fits.nanotron_without.cache_clear()
    usual, both = compare(few), compare(few, with_held_out=True)
    fits.nanotron_without.cache_clear()
    assert not any(HELD_OUT in row.predicted for row in usual.rows)
    for row, same in zip(both.rows, usual.rows, strict=True):
        assert row.predicted[OURS] == same.predicted[OURS] and row.predicted[HELD_OUT] > 0
    # each quantity is fitted to rows of other models, and to all of those
    assert fitted_to == [
        {run.job.name for run in fits.measured_runs("nanotron", quantity)} - {few[0].job.name}
        for quantity in (fits.SECONDS, fits.MEMORY)]
    megatron = [row for row in both.rows if row.run.source == "Megatron-LM"]
    assert all(row.predicted[HELD_OUT] != row.predicted[OURS] for row in megatron)

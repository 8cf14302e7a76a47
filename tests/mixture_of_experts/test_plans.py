"""The planner's tables of notebook 09: plans of three mixtures, and published runs."""

import pytest

import labs
import labs.mixture_of_experts as lab
from labs.mixture_of_experts import plans as room
from labs.predictions.plans.memory import fits
from labs.predictions.plans.search import step_seconds


def test_every_plan_fits_and_experts_are_worth_most_where_they_are_most():
    gains = {}
    for model, sizes in room._GPUS.items():
        for gpus in sizes:
            job = room.job_of(model, gpus)
            usable = [size for size in room._EXPERT if job.shape.experts % size == 0]
            divided = [room.best_plan(job, size) for size in usable]
            alone = room.best_plan(job, 1)
            assert all(plan is None or fits(job, plan) for plan in (*divided, alone))
            assert alone.expert == 1 and all(plan.expert > 1 for plan in divided if plan)
            gains[model, gpus] = step_seconds(job, alone) / min(
                step_seconds(job, plan) for plan in divided if plan)
    # What the notebook says below the table
    assert all(gains["DeepSeek-V3", gpus] > 3 for gpus in (512, 2048))
    assert all(0.8 < gain < 1.1 for (model, _), gain in gains.items() if model != "DeepSeek-V3")


def test_the_table_has_two_rows_for_each_cluster():
    labs.guess("9.9b", "seconds", 10)
    table = lab.show_plans()
    assert len(table.rows) == 12 and [row[0] for row in table.rows[1::2]] == ["without EP"] * 6
    assert all("EP " in row[1] for row in table.rows[::2])
    assert not any("EP " in row[1] for row in table.rows[1::2])
    assert "You guessed 10, and it is" in table.note
    for row in table.rows:
        low, high = (float(end) for end in row[4].split(" to "))
        assert low < float(row[3]) < high


@pytest.mark.parametrize("layers, pipeline", [(61, 16), (61, 8), (5, 5), (7, 3)])
def test_uneven_stages_differ_by_one_layer_at_most(layers, pipeline):
    stages = room._stages(layers, pipeline)
    assert sum(stages) == layers and len(stages) == pipeline and max(stages) - min(stages) <= 1


def test_deepseek_v3s_step_follows_from_its_gpu_hours():
    # 180K H800 hours, 3.7 days on 2,048, for a trillion tokens: section 1 of the report
    seconds_of_a_trillion = room.deepseek_seconds() * 1e12 / (15360 * 4096)
    assert seconds_of_a_trillion / 86400 == pytest.approx(3.7, abs=0.05)
    assert room.DEEPSEEK_PLAN.gpus == room.DEEPSEEK_GPUS and fits(room.DEEPSEEK, room.DEEPSEEK_PLAN)


def test_published_runs_are_said_to_be_as_far_off_as_they_are():
    picture = lab.show_published_runs()
    runs = picture.data
    assert [len(runs[quantity]) for quantity in ("seconds", "memory")] == [66, 86]
    deepseek = runs["DeepSeek-V3"]
    assert 2.5 < deepseek.predicted / deepseek.measured < 3.1
    assert "DeepSeek-V3's step 2.8 times too long" in picture.text
    small, mixtral, qwen = room._KINDS
    own = {kind: [each.error for each in runs["seconds"] if each.kind == kind]
           for kind in room._KINDS}
    assert len(own[mixtral]) == 3 and all(-25 < error < -18 for error in own[mixtral])
    assert len(own[qwen]) == 10 and max(own[qwen]) < 0
    assert f"{mixtral}: seconds −22 %" in picture.text and f"{qwen}: seconds −41 %" in picture.text
    assert "One constant for seconds was fitted to Megatron-LM's runs" in picture.text
    assert picture.png()

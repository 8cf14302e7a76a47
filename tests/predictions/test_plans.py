"""What a rank of a plan holds, how long its step takes, and which plan that fits is the fastest."""

from dataclasses import replace

import pytest

from labs.predictions.memory.parameters import count
from labs.predictions.plans.job import Plan, impossible, training_run
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.memory import fits, in_flight, largest_rank, rank_memory
from labs.predictions.plans.search import fastest, plans, step_seconds
from labs.predictions.step_time import step_time

LARGE = JOBS["GPT-175B"]
SMALL = JOBS["GPT-1.3B"]


@pytest.mark.parametrize(("recompute", "published"), [("full", 18.13), ("selective", 13.75)])
def test_the_published_step_of_175_billion_parameters(recompute, published):
    """Korthikanti et al., 2022, table 5: 64 A100s. The fit has seen these rows; its mean
    error is 5 %."""
    plan = Plan(1, 8, 8, sharding="DDP", recompute=recompute)
    assert step_seconds(JOBS["GPT-175B on 64"], plan) == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("name", ["GPT-175B", "Llama-3-70B", "Llama-3-405B"])
def test_the_stages_have_all_parameters_together(name):
    """Tied embeddings are there twice once there is more than one stage; norms are on each rank."""
    job = JOBS[name]
    pipeline = 16 if name != "GPT-175B" else 12
    plan = Plan(job.gpus // (8 * pipeline), 8, pipeline, sharding="DDP", recompute="full")
    assert not impossible(job, plan)
    held = 8 * sum(rank_memory(job, plan, stage)["parameters"] for stage in range(pipeline))
    twice = job.embedding_parameters * job.shape.tied
    want = job.bytes_per_parameter.parameters * (count(job.shape) + twice)
    assert held == pytest.approx(want, rel=1e-3)


def test_zero_1_divides_the_optimizer_state_alone_and_fsdp_all_of_it():
    ddp, zero1, fsdp = (rank_memory(SMALL, Plan(8, sharding=sharding, recompute="none"))
                        for sharding in ("DDP", "ZeRO-1", "FSDP"))
    assert zero1 == ddp | {"optimizer state": ddp["optimizer state"] / 8}
    assert fsdp["gradients"] == ddp["gradients"] / 8 and fsdp["gathered parameters"] > 0


def test_hsdp_divides_by_the_ranks_of_a_node():
    job = JOBS["Llama-3-8B"]
    ddp, hsdp, cut = (rank_memory(job, plan)["parameters"] for plan in (
        Plan(64, sharding="DDP"), Plan(64, sharding="HSDP"), Plan(32, 2, sharding="HSDP")))
    assert hsdp == ddp / 8 and cut == pytest.approx(ddp / 8, rel=1e-3)  # 4 ranks, of half a matrix


def test_1f1b_keeps_fewer_micro_batches_on_later_stages_and_never_more_than_there_are():
    plan = Plan(32, 8, 12)
    assert [in_flight(plan, LARGE, stage) for stage in (0, 5, 11)] == [12, 7, 1]
    few = replace(plan, micro_batch=12)  # 4 micro-batches
    assert [in_flight(few, LARGE, stage) for stage in (0, 8, 9, 11)] == [4, 4, 3, 1]
    assert largest_rank(LARGE, plan)[0] == 0


def test_chunks_and_zero_bubble_keep_more_in_flight():
    """The closed forms of the schedules, which tests/pipelines hold against simulated ones."""
    interleaved = Plan(32, 8, 12, chunks=4)
    assert [in_flight(interleaved, LARGE, stage) for stage in (0, 11)] == [59 / 4, 37 / 4]
    zero_bubble = Plan(32, 8, 12, schedule="ZB-H1")
    assert [in_flight(zero_bubble, LARGE, stage) for stage in (0, 11)] == [12, 12]
    for plan in (interleaved, zero_bubble, Plan(32, 8, 12)):
        held = [sum(rank_memory(LARGE, plan, stage).values()) for stage in range(12)]
        assert sum(largest_rank(LARGE, plan)[1].values()) == max(held)


def test_fsdp_keeps_the_unsharded_gradients_of_one_chunk():
    job = JOBS["Llama-3-405B"]
    kept = [rank_memory(job, Plan(128, 8, 16, sharding="FSDP", recompute="none", chunks=chunks),
                        1)["unsharded gradients"] for chunks in (1, 8)]
    assert kept[0] == 8 * kept[1] == pytest.approx(4 * 8 * job.layer_parameters / 8, rel=1e-3)
    assert Plan(64, 8, 16, chunks=8).reduce_rounds(replace(job, gpus=8192)) == 2


def test_the_bubble_of_the_schedules():
    """(p − 1)/v/m of the step's other parts, and under ZB-H1 without gradients of weights."""
    def bubble(**changes):
        return step_time(training_run(LARGE, Plan(32, 8, 12, **changes))).bubble

    assert bubble(chunks=4) < 0.3 * bubble()
    assert 0.3 * bubble() < bubble(schedule="ZB-H1") < 0.75 * bubble()


def test_one_card_a_node_is_shared_by_its_gpus():
    one, own = JOBS["GPT-1.3B, one card"], JOBS["GPT-1.3B"]
    assert one.network == 12.5e9 / 8 and own.network == 25e9
    plan = Plan(64, sharding="DDP", recompute="none")
    faster = replace(one, adapters=8, adapter=12.5e9)
    assert step_time(training_run(one, plan)).all_reduce > 3 * step_time(
        training_run(faster, plan)).all_reduce


def test_full_recomputation_keeps_the_input_of_each_layer():
    plan = Plan(32, 8, 12, recompute="full")
    one = 2 * 2048 * 12288 / 8 * 8 * 12  # bytes, tokens, width, tensor, layers, in flight
    assert rank_memory(LARGE, plan)["activations"] == one


def test_layers_that_the_stages_do_not_divide():
    """126 layers on 16 stages, as Llama 3's: the first and the last have one fewer."""
    plan = Plan(128, 8, 16, sharding="FSDP")
    layers = [plan.layers(JOBS["Llama-3-405B"], stage) for stage in range(16)]
    assert sum(layers) == 126 and layers == [7, *[8] * 14, 7]


@pytest.mark.parametrize(("changes", "says"), [
    ({"data": 31}, "is 2,976 GPUs, the job has 3,072"),
    ({"data": 6, "tensor": 512, "pipeline": 1}, "96 query heads cannot be divided by 512"),
    ({"pipeline": 64, "data": 6}, "96 layers cannot be divided by 64"),
    ({"micro_batch": 7}, "1,536 sequences of a step cannot be divided by 224"),
    ({"sharding": "ZeRO-9"}, "no sharding 'ZeRO-9': choose DDP"),
    ({"recompute": "half"}, "no recompute 'half'"),
    ({"schedule": "DualPipe"}, "no schedule 'DualP"),
    ({"chunks": 3}, "8 layers of a pipeline rank cannot be divided by 3 chunks"),
    ({"chunks": 2, "micro_batch": 3}, "16 micro-batches cannot be divided by 12 pipeline ranks"),
    ({"chunks": 2, "schedule": "ZB-H1"}, "ZB-H1 with 2 chunks: this schedule has one"),
    ({"data": 384, "pipeline": 1, "chunks": 2}, "this plan has one pipeline rank")])
def test_why_a_plan_cannot_be_run(changes, says):
    plan = replace(Plan(32, 8, 12), **changes)
    assert says in impossible(LARGE, plan)
    with pytest.raises(ValueError, match="cannot be divided|GPUs, the job|no |one pipel|one stage"):
        step_seconds(LARGE, plan)


def test_a_stage_that_is_not_there():
    with pytest.raises(ValueError, match="no stage 12: the plan has stages 0 to 11"):
        rank_memory(LARGE, Plan(32, 8, 12), 12)


@pytest.mark.parametrize("name", ["GPT-1.3B", "Llama-3-8B", "Llama-3-8B, long", "GPT-175B on 64"])
def test_the_fastest_plan_fits_and_none_that_fits_is_faster(name):
    job = JOBS[name]
    best = fastest(job)
    fitting = [plan for plan in plans(job) if fits(job, plan)]
    assert best in fitting and not any(impossible(job, plan) for plan in fitting)
    assert step_seconds(job, best) == min(step_seconds(job, plan) for plan in fitting)


def test_what_the_final_table_teaches():
    """A small model on one node needs DDP alone, and a micro-batch that its GPUs compute for longer
    than their hosts take to start it; long sequences need context parallelism; 175B on
    3,072 GPUs cannot be data parallel alone, because its batch has fewer sequences than GPUs."""
    assert fastest(SMALL) == Plan(8, sharding="DDP", micro_batch=8, recompute="none")
    assert fastest(JOBS["Llama-3-8B, long"]).context > 1
    assert LARGE.batch < LARGE.gpus
    assert not any(plan.tensor == plan.pipeline == plan.context == 1 for plan in plans(LARGE))
    assert fastest(JOBS["Llama-3-405B on 8"]) is None

"""The planner's closed form beside the prediction that counts every tensor: one job, one answer."""

import pytest

from labs.predictions.code_bases import PYTORCH_EAGER
from labs.predictions.hardware import gpu
from labs.predictions.memory.predict import predict
from labs.predictions.plans.job import Job, Plan
from labs.predictions.plans.memory import rank_memory
from labs.predictions.plans.models import config_named, shape_named

SHARDING = {"fsdp2": ("FSDP", "bf16 policy"), "ddp": ("DDP", "bf16")}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy, ranks", [("ddp", 8), ("fsdp2", 8), ("fsdp2", 64)])
@pytest.mark.parametrize("model", ["Llama-2-7B", "Llama-3-8B", "Qwen2-7B", "GPT-2 XL"])
def test_the_closed_form_is_within_7_percent(model, strategy, ranks, checkpointing, batch):
    sharding, recipe = SHARDING[strategy]
    exact = predict(config_named(model), batch=batch, sequence=1024, ranks=ranks, recipe=recipe,
                    strategy=strategy, checkpointing=checkpointing, device="cuda")["peak"]
    job = Job(model, shape_named(model), 1024, batch * ranks, gpu("H100"), ranks, recipe=recipe,
              code=PYTORCH_EAGER)
    plan = Plan(ranks, sharding=sharding, micro_batch=batch, recompute=checkpointing)
    assert sum(rank_memory(job, plan).values()) == pytest.approx(exact.total, rel=0.07)


def test_a_sequence_of_another_length_and_a_large_model():
    for model, sequence, ranks in (("Llama-3-8B", 4096, 16), ("Llama-3-70B", 2048, 64)):
        exact = predict(config_named(model), batch=1, sequence=sequence, ranks=ranks,
                        recipe="bf16 policy", strategy="fsdp2", checkpointing="full",
                        device="cuda")["peak"]
        job = Job(model, shape_named(model), sequence, ranks, gpu("H100"), ranks,
                  recipe="bf16 policy", code=PYTORCH_EAGER)
        plan = Plan(ranks, sharding="FSDP", recompute="full")
        assert sum(rank_memory(job, plan).values()) == pytest.approx(exact.total, rel=0.1)

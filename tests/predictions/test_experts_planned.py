"""Expert parallelism in the planner: closed cases by hand, and rows of GPU runs with experts."""

from dataclasses import replace

import pytest

from labs.predictions.code_bases import MEGATRON_CORE, PYTORCH, PYTORCH_EAGER
from labs.predictions.gpu_runs.folder import load
from labs.predictions.hardware import gpu
from labs.predictions.memory.parameters import count
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.answer import Answer, command
from labs.predictions.plans.experts import dispatched_bytes, expert_copies, rank_experts
from labs.predictions.plans.intervals import NEW_EXPERTS, memory_factors, seconds_factors
from labs.predictions.plans.job import Job, Plan, impossible, training_run
from labs.predictions.plans.memory import layer_activations, rank_memory
from labs.predictions.plans.models import shape_named
from labs.predictions.plans.search import fastest, plans, step_parts
from labs.predictions.step_time.communication import all_reduce_seconds, expert_seconds
from labs.predictions.step_time.constants import FITTED, LINK_SHARE

# Jiang et al., 2024 (arXiv 2401.04088), table 1
MIXTRAL = Shape("mixtral", 4096, 32, 32, 8, 128, 14336, 32000, experts=8, active_experts=2,
                expert_ffn=14336)
EXPERT = 3 * 4096 * 14336
REST = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 8 * 4096  # attention and the router of a layer
NORMS, ENDS = 2 * 4096, 2 * 32000 * 4096
TOTAL = 32 * (8 * EXPERT + REST + NORMS) + ENDS + 4096


def job(**changes) -> Job:
    return Job(**{"name": "Mixtral", "shape": MIXTRAL, "sequence": 4096, "batch": 256,
                  "gpu": gpu("H100"), "gpus": 64, "recipe": "bf16 policy", "code": PYTORCH}
               | changes)


def plan(**changes) -> Plan:
    return Plan(**{"data": 64, "sharding": "FSDP", "recompute": "none", "expert": 8} | changes)


def test_the_shape_is_that_of_mixtral_8x7b():
    assert count(MIXTRAL) == TOTAL == 46_702_792_704


def test_fsdp_shards_experts_over_the_ranks_that_have_the_same():
    """Under EP 8 a rank has one expert of a layer, which 8 ranks of 64 shard: 1/64 of all."""
    held = rank_memory(job(), plan())
    assert held["parameters"] == pytest.approx(4 * TOTAL / 64)
    assert held["optimizer state"] == pytest.approx(8 * TOTAL / 64)
    # gathered are two layers of one expert, attention, router and norms in 16 bits
    assert held["gathered parameters"] == pytest.approx(2 * 2 * (EXPERT + REST + NORMS))
    alone = rank_memory(job(), plan(expert=1))
    assert alone["gathered parameters"] == pytest.approx(2 * 2 * (8 * EXPERT + REST + NORMS))
    assert alone["parameters"] == pytest.approx(held["parameters"])


def test_without_fsdp_a_rank_has_its_experts_and_shards_their_optimizer_state():
    """ZeRO-1 of 2 + 4 + 12 bytes: the optimizer state of experts over 64 / 8 ranks."""
    held = rank_memory(job(recipe="megatron"), plan(sharding="ZeRO-1"))
    dense, experts = TOTAL - 32 * 8 * EXPERT, 32 * EXPERT
    assert held["parameters"] == pytest.approx(2 * (dense + experts))
    assert held["gradients"] == pytest.approx(4 * (dense + experts))
    assert held["optimizer state"] == pytest.approx(12 * (dense / 64 + experts / 8))
    ddp = rank_memory(job(recipe="megatron"), plan(sharding="DDP"))
    assert ddp["optimizer state"] == pytest.approx(12 * (dense + experts))


@pytest.mark.parametrize("expert_tensor, experts, copies", [(0, 8 / 4 / 2, 8), (1, 8 / 4, 16)])
def test_an_expert_has_tensor_parallel_ranks_of_its_own(expert_tensor, experts, copies):
    asked = plan(data=32, tensor=2, expert=4, expert_tensor=expert_tensor)
    assert not impossible(job(), asked)
    assert rank_experts(job(), asked) == pytest.approx(experts * EXPERT)
    assert expert_copies(asked) == copies
    # each tensor-parallel rank of an expert needs all that is sent to it
    sent = [dispatched_bytes(job(), each) for each in (asked, plan())]
    assert sent[0] == pytest.approx(sent[1] / (1 if not expert_tensor else 2), rel=0.01)


def test_a_layer_saves_what_its_experts_are_sent():
    """Per token: two copies of the stream for each of two experts, and the router's two numbers."""
    sent = 4096 * (2 * 2 * 2 * 4096 + 8 * 8)
    assert dispatched_bytes(job(), plan()) == sent
    widths = 6 * 4096 + 2 * 1024 + 3 * 2 * 14336
    assert layer_activations(job(), plan()) == 4096 * 2 * widths + sent
    dense = job(shape=replace(MIXTRAL, experts=0))
    assert dispatched_bytes(dense, plan(expert=1)) == 0
    # of a mixture without gates: korthikanti's 34 h, of which the MLP of 4 h is another
    gelu = job(shape=replace(MIXTRAL, mlp_matrices=2))
    own = 4096 * (34 * 4096 + 4 * (2 * 14336 - 4 * 4096))
    assert layer_activations(gelu, plan()) == pytest.approx(own + sent)


def test_recomputed_experts_of_one_layer_are_there_while_its_backward_runs():
    full = rank_memory(job(), plan(recompute="full"))["activations"]
    inputs = 32 * 2 * 4096 * 4096
    assert full == pytest.approx(inputs + layer_activations(job(), plan()))


@pytest.mark.parametrize("recompute, often", [("none", 4), ("full", 6)])
def test_an_all_to_all_sends_each_token_to_its_experts(recompute, often):
    """4,096 tokens × 2 experts × 4,096 × 2 bytes, of which 1/8 stays, over NVLink."""
    run = training_run(job(), plan(recompute=recompute))
    seconds = 4096 * 2 * 4096 * 2 * 7 / 8 / (450e9 * LINK_SHARE) + 7 * FITTED.hop
    assert expert_seconds(run, FITTED) == pytest.approx(often * seconds)
    parts = step_parts(job(), plan(recompute=recompute))
    assert parts.expert == pytest.approx(32 * 4 * often * seconds)
    assert step_parts(job(), plan(expert=1)).expert == 0


def test_across_nodes_the_network_carries_what_is_for_other_nodes():
    wide = job(shape=replace(MIXTRAL, experts=16))
    run = training_run(wide, plan(expert=16))
    seconds = 4096 * 2 * 4096 * 2 * 8 / 16 / (50e9 * LINK_SHARE) + 15 * FITTED.hop
    assert expert_seconds(run, FITTED) == pytest.approx(4 * seconds)


def test_gradients_of_experts_are_reduced_over_fewer_ranks():
    """Under DDP all 64 ranks all-reduce what is no expert, through the 8 adapters of each node; 8
    ranks, one on each node, do so with an expert, through the one adapter of each."""
    def ring(size, ranks, rate):
        return 2 * ((ranks - 1) / ranks * 4 * size / (rate * LINK_SHARE) + (ranks - 1) * FITTED.hop)

    found = all_reduce_seconds(training_run(job(), plan(sharding="DDP")), FITTED)
    dense = 32 * (REST + NORMS) + ENDS / 2
    assert found == pytest.approx(ring(dense, 64, 8 * 50e9) + ring(32 * EXPERT, 8, 50e9))
    alone = all_reduce_seconds(training_run(job(), plan(sharding="DDP", expert=1)), FITTED)
    assert alone == pytest.approx(ring(dense + 32 * 8 * EXPERT, 64, 8 * 50e9))


def test_products_are_the_same_wherever_the_experts_are():
    parts = [step_parts(job(), plan(expert=size)) for size in (1, 2, 8)]
    assert parts[0].matmul == parts[1].matmul == parts[2].matmul
    assert parts[0].attention == parts[2].attention


def test_without_expert_parallelism_nothing_has_changed():
    """Of a mixture the experts are part of each layer's parameters; a dense model has none."""
    run = training_run(job(), plan(expert=1))
    assert run.expert == 0 and run.stored == job().layer_parameters
    assert run.layer_parameters == 8 * EXPERT + REST + NORMS
    dense = Job("8B", shape_named("Llama-3-8B"), 4096, 256, gpu("H100"), 64)
    assert training_run(dense, plan(expert=1)).active_experts == 0
    assert Plan(64) == Plan(64, expert=1) and str(Plan(64)) == str(Plan(64, expert=1))


def test_a_layer_with_experts_starts_more_kernels():
    code = MEGATRON_CORE
    small = replace(MIXTRAL, hidden=512, ffn=1024, expert_ffn=1024, heads=8, kv_heads=8,
                    head_dim=64)
    seconds = [step_parts(job(shape=shape, code=code), plan(expert=1, sharding="DDP")).launch
               for shape in (small, replace(small, experts=0, ffn=2048))]
    assert seconds[0] - seconds[1] == pytest.approx(32 * 4 * code.overheads.experts, rel=0.1)


@pytest.mark.parametrize("changes, says", [
    (dict(expert=3), "8 experts cannot be divided by 3"),
    (dict(data=4, pipeline=16, expert=8), "data 4 × context 1 cannot be divided by expert 8"),
    (dict(data=16, tensor=4, expert=8, expert_tensor=3),
     "14,336 elements of an expert cannot be divided by 3"),
    (dict(data=4, tensor=2, pipeline=8, expert=8, expert_tensor=2),
     "data 4 × context 1 × tensor 2 cannot be divided by expert 8 × expert-tensor 2"),
    (dict(expert=0), "expert 0: a whole number from 1 on is needed"),
    (dict(offload=True), "offload to the host is not modelled beside expert parallelism"),
    (dict(sharding="FSDP, no resharding"), "belongs to plans without expert parallelism"),
    (dict(data=16, tensor=4, expert=8, sharding="HSDP"),
     "HSDP shards over 2 ranks of a node, which cannot be divided by expert 8")])
def test_a_plan_that_cannot_divide_its_experts_gets_one_sentence(changes, says):
    assert says in impossible(job(), plan(**changes))


def test_a_dense_model_has_no_experts_to_divide():
    dense = job(name="Llama-3-8B", shape=shape_named("Llama-3-8B"))
    assert impossible(dense, plan()) == "expert parallelism 8: Llama-3-8B has no experts"
    assert not impossible(dense, plan(expert=1))


def test_a_search_tries_experts_on_one_rank_and_on_a_node():
    sizes = {each.expert for each in plans(job())}
    assert sizes == {1, 2, 4, 8}
    by_tensor = {each.expert for each in plans(job()) if each.tensor == 1 and each.data == 64}
    assert by_tensor == {1, 8}
    assert {each.expert for each in plans(job(), 4)} == {4}
    best, alone = fastest(job()), fastest(job(), expert=1)
    assert best.expert > 1 == alone.expert and f"EP {best.expert}" in str(best)
    dense = Job("8B", shape_named("Llama-3-8B"), 4096, 256, gpu("H100"), 8)
    assert {each.expert for each in plans(dense)} == {1}


def test_the_workbooks_script_trains_no_mixture():
    assert not command(job(), plan()) and not command(job(), plan(expert=1))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_closed_form_is_within_10_percent_of_every_tensor_counted(tmp_path, recompute):
    """With more experts than ranks, so that FSDP2 shards them evenly."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, '
        '"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, '
        '"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}')
    asked = job(name=str(tmp_path), shape=shape_named(str(tmp_path)), code=PYTORCH_EAGER,
                sequence=1024)
    whole = plan(expert=1, micro_batch=4, recompute=recompute)
    counted = Answer(asked, whole)
    assert counted.counted
    closed = Answer(asked, whole, counts_tensors=False)
    assert closed.largest[1] == pytest.approx(counted.largest[1], rel=0.1)
    assert Answer(asked, replace(whole, expert=8)).counted is None


@pytest.fixture(scope="module")
def rows():
    return load()


def test_mixtral_of_megatron_is_the_run_that_its_test_configures(rows):
    run = next(run for run in rows if "mixtral_8x7b" in run.id and "h100" in run.id)
    assert run.plan == Plan(16, 2, 4, recompute="none", expert=4)
    assert run.job.gpus == 128 and run.stage == 3 and run.kind == "experts"
    own = replace(MIXTRAL, family="llama", vocabulary=256000)
    assert run.job.shape == own and run.job.batch == 1024
    assert sum(rank_memory(run.job, run.plan, 3).values()) == pytest.approx(run.memory, rel=0.1)


def test_rows_with_experts_are_read_or_say_why_not(rows):
    own = [run for run in rows if run.source == "Megatron-LM"
           and run.id.split("/")[0] in ("moe", "mixtral")]
    known = [run for run in own if run.job]
    assert len(own) == 101 and len(known) == 76
    assert all(run.job.shape.is_mixture and run.kind == "experts" for run in known)
    reasons = {run.refused for run in own if run.refused}
    assert reasons == {"multi-latent-attention: it has latent attention",
                       "mtp-num-layers: it has further heads", "its optimizer is muon, not Adam",
                       "moe-shared-expert-intermediate-size: it has shared experts"}
    apart = next(run for run in known if "etp1_ep4 dev_dgx_h100" in run.id)
    assert (apart.plan.tensor, apart.plan.expert, apart.plan.expert_tensor) == (2, 4, 1)


def test_qwen3_30b_a3b_of_prime_rl_has_30_billion_parameters(rows):
    own = [run for run in rows if run.source == "prime-rl" and "30B-A3B" in run.id]
    assert len(own) == 13 and all(run.job for run in own)
    assert {run.kind for run in own} == {"experts, LoRA", "experts, FSDP2"}
    assert count(own[0].job.shape) == pytest.approx(30.5e9, rel=0.01)


def test_experts_have_intervals_of_their_own():
    for code, quantity, kind in ((MEGATRON_CORE, seconds_factors, "Megatron-Core, experts"),
                                 (MEGATRON_CORE, memory_factors, "Megatron-Core, experts"),
                                 (PYTORCH, seconds_factors, NEW_EXPERTS),
                                 (PYTORCH_EAGER, memory_factors, NEW_EXPERTS)):
        found = quantity(job(code=code), plan())
        assert found.kind == kind and found.rows >= 20 and found.low < found.high

"""The model of a step's time: limits that can be computed by hand, and directions."""

from dataclasses import replace

import pytest

from labs.predictions.hardware import gpu
from labs.predictions.step_time import FITTED, Constants, TrainingRun, step_time
from labs.predictions.step_time.communication import exposed, link_rate
from labs.predictions.step_time.constants import EXPECTED, LINK_SHARE
from labs.predictions.step_time.efficiency import six_nd
from labs.predictions.step_time.fit import held_out

# no small product is slow, kernels move what they need, no collective has hops
IDEAL = Constants(matmul_a100=0.5, matmul_h100=0.5, half_size=0, traffic=1, unhidden=0, hop=0,
                  throttling=1)
FAST_MEMORY = replace(gpu("H100"), bandwidth=1e30)
ONE = TrainingRun(layers=32, hidden=4096, ffn=16384, heads=32, kv_hidden=4096, vocabulary=50000,
                  mlp_matrices=2, sequence=2048, micro_batch=4, accumulation=1, gpu=gpu("H100"),
                  gpus=1, gpus_per_node=8, network=50e9)
NODE = replace(ONE, gpus=8, sharding=3, shards=8)
NODES = replace(ONE, gpus=256, sharding=3, shards=256)
TENSOR = replace(ONE, gpus=8, tensor=8, sequence_parallel=True)
PIPELINE = replace(ONE, gpus=64, tensor=8, pipeline=8, accumulation=64, reduce_overlaps=False)
CONTEXT = replace(ONE, gpus=8, context=8, sequence=65536, micro_batch=1)
RUNS = {"one GPU": ONE, "DDP": replace(ONE, gpus=64), "FSDP, a node": NODE, "FSDP": NODES,
        "hybrid": replace(NODES, shards=8), "tensor": TENSOR, "pipeline": PIPELINE,
        "context": CONTEXT}


def every(*kinds):
    return pytest.mark.parametrize("run", [RUNS[kind] for kind in kinds or RUNS],
                                   ids=list(kinds or RUNS))


def test_one_gpu_without_memory_traffic_takes_flops_over_rate():
    run = replace(ONE, gpu=FAST_MEMORY)
    found = step_time(run, IDEAL)
    parameters = 12 * 32 * 4096**2 + 50000 * 4096
    assert found.matmul == pytest.approx(six_nd(parameters, 4 * 2048) / (989e12 / 2))
    assert found.total == pytest.approx(found.matmul + found.attention)
    assert found.tokens_per_s(run) == pytest.approx(4 * 2048 / found.total)


def test_attention_is_half_a_square_forward_and_five_quarters_backward():
    square = 4 * 4 * 2048**2 * 4096 * 32
    assert step_time(ONE, IDEAL).attention == pytest.approx(1.75 * square / (989e12 * 0.35))


def test_recomputing_all_adds_a_forward_of_the_layers():
    none, full = (step_time(replace(ONE, recompute=mode), IDEAL) for mode in ("none", "full"))
    head = 6 * 50000 * 4096 * 4 * 2048 / (989e12 / 2)
    assert full.matmul - head == pytest.approx((none.matmul - head) * 4 / 3)
    half = step_time(replace(ONE, recompute="half"), IDEAL)
    early = step_time(replace(ONE, recompute="full", early_stop=True), IDEAL)
    assert none.matmul < half.matmul < early.matmul < full.matmul


def test_one_gpu_communicates_nothing():
    found = step_time(ONE)
    assert found.total == found.matmul + found.attention + found.memory


@every()
def test_twice_the_layers_take_about_twice_as_long(run):
    ratio = step_time(replace(run, layers=2 * run.layers)).total / step_time(run).total
    assert 1.8 < ratio <= 2


@every()
def test_every_cause_is_zero_or_positive(run):
    found = step_time(run)
    assert all(seconds >= 0 for seconds in vars(found).values())
    assert 0.1 < found.mfu(run, 6.6e9) < 0.6


@every("DDP", "FSDP, a node", "FSDP", "hybrid", "tensor", "pipeline", "context")
def test_faster_links_are_never_slower(run):
    seconds = [step_time(replace(run, network=rate * run.network,
                                 gpu=replace(run.gpu, nvlink=rate * run.gpu.nvlink))).total
               for rate in (0.1, 0.5, 1, 2, 10)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


@every()
def test_faster_memory_is_never_slower(run):
    faster = replace(run, gpu=replace(run.gpu, bandwidth=2 * run.gpu.bandwidth))
    assert step_time(faster).total < step_time(run).total


def test_hidden_communication_costs_its_share_and_the_rest_all():
    assert exposed(1.0, 5.0, IDEAL) == 0
    assert exposed(7.0, 5.0, IDEAL) == 2
    assert exposed(7.0, 5.0, replace(IDEAL, unhidden=0.5)) == pytest.approx(4.5)


def test_the_bubble_is_p_minus_1_over_v_m():
    def bubble(run):
        return step_time(replace(run, vocabulary=1), replace(IDEAL, unhidden=1)).bubble

    one = PIPELINE
    busy = step_time(replace(one, vocabulary=1), IDEAL)
    work = busy.matmul + busy.attention + busy.memory + busy.tensor + busy.pipeline
    assert bubble(one) == pytest.approx(7 / 64 * work, rel=1e-3)
    # two chunks hand over twice as often
    assert bubble(replace(one, chunks=2)) == pytest.approx(bubble(one) / 2, rel=0.05)


def test_a_ring_between_nodes_shares_the_nodes_adapters():
    assert link_rate(NODES, 8) == 450e9 * LINK_SHARE
    assert link_rate(NODES, 256) == pytest.approx(8 * 50e9 * LINK_SHARE)
    assert link_rate(NODES, 32, stride=8) == pytest.approx(50e9 * LINK_SHARE)
    assert link_rate(replace(NODES, network=500e9), 256) == 450e9 * LINK_SHARE


def test_hybrid_sharding_gathers_within_the_node_and_reduces_between():
    hybrid, whole = step_time(RUNS["hybrid"]), step_time(NODES)
    assert hybrid.sharding < whole.sharding and hybrid.all_reduce > whole.all_reduce == 0


def test_stage_2_gathers_once():
    assert step_time(replace(NODES, sharding=2)).sharding < step_time(NODES).sharding


def test_eight_bits_speed_up_products_alone():
    found = step_time(replace(ONE, fp8=True), IDEAL)
    plain = step_time(ONE, IDEAL)
    assert plain.matmul / 2 < found.matmul < plain.matmul
    assert found.attention == plain.attention and found.memory > plain.memory


def test_a_power_limit_slows_products_but_not_memory():
    limited, full = step_time(replace(ONE, power=500)), step_time(ONE)
    assert limited.matmul > full.matmul and limited.memory == full.memory
    assert step_time(replace(ONE, power=700)) == full


def test_fitted_constants_are_physical():
    for share in ("matmul_a100", "matmul_h100"):
        assert 0.6 < getattr(FITTED, share) < getattr(EXPECTED, share)  # below the best ever found
    assert 0 < FITTED.unhidden < 1 < FITTED.traffic < 4
    assert 1e-6 < FITTED.hop < 2e-5


@pytest.mark.parametrize("unhidden", [0.0, 1.0])
def test_the_share_that_comes_back_can_be_given_while_the_rest_is_fitted(unhidden):
    given, fitted = held_out(unhidden), held_out()
    assert given.keys() == fitted.keys()
    assert {constants.unhidden for constants in given.values()} == {unhidden}
    assert all(given[row].matmul_h100 != fitted[row].matmul_h100 for row in given)

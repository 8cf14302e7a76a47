"""What the step-time model says of precision and CPU offload, and how far off it is."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.predictions import hardware
from labs.predictions.step_time import step_time
from labs.predictions.step_time.constants import (
    FITTED,
    HOST_OPTIMIZER_BYTES,
    LINK_SHARE,
    MEMORY_SHARE,
)
from labs.predictions.step_time.parts import Part, parts_of
from labs.predictions.step_time.training_run import TrainingRun

RUN = TrainingRun(layers=20, hidden=2048, ffn=8192, heads=16, kv_hidden=2048, vocabulary=256,
                  mlp_matrices=2, sequence=1024, micro_batch=4, accumulation=1,
                  gpu=hardware.gpu("A100-80"), gpus=8, gpus_per_node=8, network=25e9, sharding=3,
                  shards=8)
OFFLOADED = replace(RUN, offload=True, host_bandwidth=50e9)


class _Touched(TorchDispatchMode):
    """Counts the bytes of tensors that operations read and write, each once per operation."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        written = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        self.nbytes += sum(t.nbytes for t in [*read.values(), *written] if t.numel() > 1)
        return found


def test_adamw_on_a_cpu_moves_the_bytes_that_the_model_counts():
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer, parameter.grad = torch.optim.AdamW([parameter]), torch.ones(1000)
    optimizer.step()
    with _Touched() as touched:
        optimizer.step()
    assert touched.nbytes == HOST_OPTIMIZER_BYTES * 1000


def by_name(run) -> dict[str, Part]:
    return {part.name: part for part in parts_of(run)}


def test_offload_pays_for_copies_and_for_the_hosts_memory():
    own = (20 * 12 * 2048**2 + 256 * 2048) / 8
    parts = by_name(OFFLOADED)
    host = parts["optimizer"]
    assert host.cause == "host"
    assert host.seconds == pytest.approx(HOST_OPTIMIZER_BYTES * own / (50e9 * MEMORY_SHARE))
    copied = [parts[name].seconds for name in
              ("shards copied in forward", "shards and gradients copied in backward")]
    shard = 4 * 20 * 12 * 2048**2 / 8
    assert copied == pytest.approx([shard / (32e9 * LINK_SHARE), 2 * shard / (32e9 * LINK_SHARE)])
    assert step_time(OFFLOADED).host > 0 == step_time(RUN).host
    assert not any("copied" in name for name in by_name(RUN))


def test_copies_are_hidden_where_computing_is_longer_and_do_not_slow_it_down():
    long, short = (by_name(replace(OFFLOADED, micro_batch=n)) for n in (64, 0.01))
    assert long["shards copied in forward"].exposed(FITTED) == 0
    few = short["shards copied in forward"]
    assert 0.9 * few.seconds < few.exposed(FITTED) <= few.seconds
    assert long["root copied"].exposed(FITTED) > 0


def test_fp32_gathers_twice_the_bytes_and_computes_at_half_the_rate():
    fp32 = by_name(replace(RUN, fp32=True, param_bytes=4))
    usual = by_name(RUN)
    for name in ("products of the layers", "attention", "memory traffic of the layers"):
        assert fp32[name].seconds == pytest.approx(2 * usual[name].seconds, rel=0.02), name
    hops = 20 * 7 * FITTED.hop  # a latency for each hop of each unit's collective stays
    gathered = "parameters gathered in forward"
    assert fp32[gathered].seconds - hops == pytest.approx(2 * (usual[gathered].seconds - hops))
    assert fp32["optimizer"].seconds == usual["optimizer"].seconds

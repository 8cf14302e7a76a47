"""What the tests of notebook 03's wrong answers share: the solution, strategies that are wrong in
every exercise, and a printed line with the verdict of each wrong answer:

    pytest -q -s tests/zero_stages | grep →
"""

import os
import re

import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from labs.training.presets import preset

right = definitions("03_zero_stages", PRESET=preset("laptop"))


def N():
    return dist.get_world_size()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def averaged(model):
    """All-reduces every gradient, as a hand-made DDP does."""
    for parameter in trainable(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= N()


def plain(model, optimizer_class, **settings):
    return model, optimizer_class(trainable(model), **settings)


def ddp_by_hand(model, optimizer_class, **settings):
    """All gradients averaged, all states everywhere: it trains, and shards nothing."""
    optimizer = optimizer_class(trainable(model), **settings)
    optimizer.register_step_pre_hook(lambda *_: averaged(model))
    return model, optimizer


def torchs_ddp(model, optimizer_class, **settings):
    return DistributedDataParallel(model), plain(model, optimizer_class, **settings)[1]


def torchs_zero(model, optimizer_class, **settings):
    return model, ZeroRedundancyOptimizer(trainable(model), optimizer_class, **settings)


def rejected(verdict, expected):
    assert_rejected(verdict, expected)
    assert "USDT" not in str(verdict)
    name = re.search(r"::(test_\w+\[.*\]|test_\w+)", os.environ["PYTEST_CURRENT_TEST"])[1]
    print(f"\n{name} → {verdict.sentence.splitlines()[0]}")


def accepted(verdict):
    assert verdict.passed is True, verdict


def named(value) -> str:
    """The id of a test's parameter: the name of an answer, nothing for the expected words."""
    return getattr(value, "__name__", "")

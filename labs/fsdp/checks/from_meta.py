"""Exercise 4.6: a model built on the meta device, sharded, and initialised shard by shard."""

import math
from collections.abc import Callable
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from labs.exercises.invariants import judge_outside_torch
from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Wrong, check
from labs.fsdp.checks.common import build, whole_parameters
from labs.meters import memory
from labs.training import data, strategies
from labs.training.models import DeepMLP, count_trainable

RANKS = 4
LAYERS, WIDTH = 8, 62  # 4 ranks do not divide the width
MANY = 1000  # numbers: from here on their standard deviation is a test of how they were drawn


@check("4.6", hints={"meta tensor": "Only shapes are there yet: give the parameters memory with "
                                    "to_empty, then numbers.",
                     "Cannot copy out of meta": "to_empty gives memory; .to(...) would copy "
                                                "numbers that do not exist."})
def check_from_meta(strategy: Callable) -> str:
    """strategy(make_model, optimizer_class, **settings) -> (module, optimizer): make_model() is
    called where it costs no memory, and each rank gets only its shards."""
    on_ranks(_build_and_train, strategy, world_sizes=(RANKS,))
    return (f"no rank of {RANKS} ever held the whole model; every shard has numbers of its own, as "
            "reset_parameters draws them, and they train")


def _make_model():
    return DeepMLP(LAYERS, WIDTH)


def _build(strategy):
    return build(strategy, _make_model, torch.optim.AdamW, lr=1e-2)


def _build_and_train(strategy):
    torch.manual_seed(0)
    own = data.xy_batches(2, 4, seed=dist.get_rank())
    report = memory.record(lambda: _build(strategy), own, strategies.resident_tensors,
                           outside=True)
    raise_on_all_ranks(_check_build, report)
    module, optimizer = _build(strategy)
    raise_on_all_ranks(_check_shards, module)
    before = whole_parameters(module)
    raise_on_all_ranks(_check_numbers, module, before)
    raise_on_all_ranks(_check_layers, before)
    module(**own[0]).loss.backward()
    optimizer.step()
    raise_on_all_ranks(_check_step, before, whole_parameters(module))


def _check_build(report):
    # The peak while building stays near a shard: whoever builds first and shards then held all.
    whole = 4 * count_trainable(_make_model())
    peak = report.peaks["build"].total
    if peak > 0.6 * whole:
        raise Wrong(f"rank {dist.get_rank()} held {peak:,} bytes while the model was built; the "
                    f"whole model is {whole:,}, a quarter of it {whole // RANKS:,}",
                    "Make it inside `with torch.device(\"meta\"):`, shard it, and only then give "
                    "it memory.")
    judge_outside_torch(report)


def _check_shards(module):
    # Every parameter is a shard with memory.
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise Wrong(f"rank {dist.get_rank()}: {name!r} is not sharded",
                        "shard(model, ...) before to_empty.")
        if parameter.device.type == "meta":
            raise Wrong(f"rank {dist.get_rank()}: {name!r} is on the meta device still: it has a "
                        "shape, and no memory", "module.to_empty(device=...) gives it memory.")


def _check_numbers(module, parameters):
    # The numbers are uniform within ±1/√in_features, as torch.nn.Linear.reset_parameters draws
    # them (deviation bound/√3): what to_empty left lying in memory is not.
    for name, value in parameters.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        bound = 1 / math.sqrt(owner.in_features)
        who = f"rank {dist.get_rank()}, parameter {name!r}"
        small = value.numel() > MANY and value.std() < 0.8 * bound / math.sqrt(3)
        if not value.isfinite().all() or value.abs().max() > bound * 1.001 or small:
            raise Wrong(f"{who}: its numbers are not what reset_parameters draws",
                        "to_empty gives memory with whatever lay in it: afterwards call "
                        "reset_parameters() of every module that has it.")
        if value.numel() > MANY:
            _check_ranks_differ(who, value)


def _check_ranks_differ(who, value):
    # On a CPU mesh DTensor's random operators draw with each rank's own generator, so equal seeds
    # give equal shards: the rows of two ranks must differ. The last rank has fewer rows.
    rows = -(-WIDTH // RANKS)
    shards = [value[rank * rows:][:rows - 2] for rank in range(RANKS)]
    for one, other in combinations(range(RANKS), 2):
        if torch.equal(shards[one], shards[other]):
            raise Wrong(f"{who}: ranks {one} and {other} have the same numbers",
                        "A CPU draws each shard with its rank's own generator: give every rank "
                        "another seed, torch.manual_seed(dist.get_rank()), before "
                        "reset_parameters.")


def _check_layers(parameters):
    # Two layers differ too: a seed that is set inside the loop over modules repeats the numbers.
    starts = {}
    for name, value in parameters.items():
        start = tuple(value.flatten()[:4].tolist())
        if start in starts:
            raise Wrong(f"rank {dist.get_rank()}: {starts[start]!r} and {name!r} have the same "
                        "numbers", "Set the seed once, before the loop over the modules.")
        starts[start] = name


def _check_step(before, after):
    # The optimizer holds the parameters that the model has now: one made before sharding does not.
    for name, value in after.items():
        if torch.equal(value, before[name]):
            raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: a step does not change it",
                        "fully_shard replaces the parameters: make the optimizer after it.")

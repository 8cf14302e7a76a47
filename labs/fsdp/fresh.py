"""Check of exercise 4.6: a model that is made as shards, and was never whole on any rank."""

import math
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Wrong, check
from labs.fsdp import trained
from labs.meters import memory
from labs.training import data, strategies
from labs.training.models import DeepMLP, count_trainable

RANKS = 4
LAYERS, WIDTH = 8, 62  # 4 ranks do not divide the width


@check("4.6", hints={"meta tensor": "Only shapes are there yet: give the parameters memory with "
                                    "to_empty, then numbers.",
                     "Cannot copy out of meta": "to_empty gives memory; .to(...) would copy "
                                                "numbers that do not exist."})
def check_from_meta(strategy):
    """strategy(make_model, optimizer_class, **settings) -> (module, optimizer): make_model() is
    called where it costs no memory, and each rank gets only its shards."""
    on_ranks(_fresh, strategy, world_sizes=(RANKS,))
    return (f"no rank of {RANKS} ever held the whole model; every shard has numbers of its own, as "
            "reset_parameters draws them, and they train")


def _make():
    return DeepMLP(LAYERS, WIDTH)


def _fresh(strategy):
    made = {}
    torch.manual_seed(0)

    def build():
        made["pair"] = trained.built(strategy, _make, torch.optim.AdamW, lr=1e-2)
        return made["pair"]

    report = memory.record(build, data.xy_batches(2, 4, seed=dist.get_rank()),
                           held=strategies.resident_tensors)
    raise_on_all_ranks(_judge_build, report)
    module, optimizer = trained.built(strategy, _make, torch.optim.AdamW, lr=1e-2)
    raise_on_all_ranks(_judge_shards, module)
    parts = {name: trained.whole(p) for name, p in trained.names(module).items()}
    raise_on_all_ranks(_judge_numbers, module, parts)
    raise_on_all_ranks(_judge_layers, parts)
    batch = data.xy_batches(1, 4, seed=dist.get_rank())[0]
    before = {name: value.clone() for name, value in parts.items()}
    module(**batch).loss.backward()
    optimizer.step()
    after = {name: trained.whole(p) for name, p in trained.names(module).items()}
    raise_on_all_ranks(_judge_trains, before, after)


def _judge_build(report):
    whole = 4 * count_trainable(_make())
    peak = report.peaks["build"].total
    if peak > 0.6 * whole:
        raise Wrong(f"rank {dist.get_rank()} held {peak:,} bytes while the model was built; the "
                    f"whole model is {whole:,}, a quarter of it {whole // RANKS:,}",
                    "Make it inside `with torch.device(\"meta\"):`, shard it, and only then give "
                    "it memory.")


def _judge_shards(module):
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise Wrong(f"rank {dist.get_rank()}: {name!r} is not sharded",
                        "shard(model, ...) before to_empty.")
        if parameter.device.type == "meta":
            raise Wrong(f"rank {dist.get_rank()}: {name!r} is on the meta device still: it has a "
                        "shape, and no memory", "module.to_empty(device=...) gives it memory.")


def _judge_numbers(module, parts):
    for name, value in parts.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        bound = 1 / math.sqrt(owner.in_features)  # as torch.nn.Linear.reset_parameters
        who = f"rank {dist.get_rank()}, parameter {name!r}"
        small = value.numel() > 1000 and value.std() < 0.8 * bound / math.sqrt(3)
        if not value.isfinite().all() or value.abs().max() > bound * 1.001 or small:
            raise Wrong(f"{who}: its numbers are not what reset_parameters draws",
                        "to_empty gives memory with whatever lay in it: afterwards call "
                        "reset_parameters() of every module that has it.")
        if value.numel() > 1000:
            _judge_own(who, value)


def _judge_own(who, value):
    """Raises Wrong where two ranks have drawn the same numbers for their rows of a weight."""
    rows = -(-WIDTH // RANKS)
    shards = [value[rank * rows:][:rows - 2] for rank in range(RANKS)]  # the last has fewer
    for one, other in combinations(range(RANKS), 2):
        if torch.equal(shards[one], shards[other]):
            raise Wrong(f"{who}: ranks {one} and {other} have the same numbers",
                        "A CPU draws each shard with its rank's own generator: give every rank "
                        "another seed, torch.manual_seed(dist.get_rank()), before "
                        "reset_parameters.")


def _judge_layers(parts):
    """Raises Wrong where two layers begin with the same numbers."""
    starts = {}
    for name, value in parts.items():
        start = tuple(value.flatten()[:4].tolist())
        if start in starts:
            raise Wrong(f"rank {dist.get_rank()}: {starts[start]!r} and {name!r} have the same "
                        "numbers", "Set the seed once, before the loop over the modules.")
        starts[start] = name


def _judge_trains(before, after):
    for name, value in after.items():
        if torch.equal(value, before[name]):
            raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: a step does not change it",
                        "fully_shard replaces the parameters: make the optimizer after it.")

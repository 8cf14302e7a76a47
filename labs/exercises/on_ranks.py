"""What checks on ranks have in common: world sizes, one verdict of all ranks, closeness, and the
refusal of torch's own."""

import contextlib
import sys

import torch
import torch.distributed as dist

from labs.exercises.verdicts import Wrong, kind_of
from labs.training.models import trainable
from labs.workers.launcher import launch

WORLD_SIZES = (2, 3, 4)
TOLERANCE = 1e-5  # of float32 sums in another order
BATCH = 12  # divides by 2, 3 and 4 ranks

# What may not be made inside a check, and the class whose constructor gives it away.
_OWN = {
    "DistributedDataParallel": ("torch.nn.parallel", "DistributedDataParallel"),
    "ZeroRedundancyOptimizer": ("torch.distributed.optim.zero_redundancy_optimizer",
                                "ZeroRedundancyOptimizer"),
    "FullyShardedDataParallel": ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    "fully_shard": ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"),
}


def on_ranks(fn, *args, world_sizes=WORLD_SIZES, hang_after=4.0) -> list:
    """`fn(*args)` on 2, 3 and 4 ranks, one after the other; all results in one list."""
    return [result for ranks in world_sizes
            for result in launch(fn, *args, ranks=ranks, quiet=True, device="cpu",
                                 hang_after=hang_after)]


def raise_on_all_ranks(judge, *args):
    """`judge(*args)` on every rank; where one raises Wrong, all raise it, that of the lowest rank.

    It is where ranks meet after the student's code, so one that is still stuck in there is told
    from one that left: the launcher sees that they are not in the same collective.
    """
    result, wrong = None, None
    try:
        result = judge(*args)
    except Wrong as error:
        wrong = error
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    for first in filter(None, everyone):
        raise first
    return result


def built(strategy, model, optimizer_class, settings: dict) -> tuple:
    """(module, optimizer) of a strategy. Raises Wrong where they are none."""
    pair = strategy(model, optimizer_class, **settings)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise Wrong(f"the strategy returned {kind_of(pair)}, not (module, optimizer)",
                    "return module, optimizer")
    for thing, kind, called in zip(pair, (torch.nn.Module, torch.optim.Optimizer),
                                   ("a module", "an optimizer"), strict=True):
        if not isinstance(thing, kind):
            raise Wrong(f"the strategy returned {kind_of(thing)} where {called} belongs",
                        "return module, optimizer")
    return pair


def gradients(model) -> dict:
    """name -> gradient, zeros where there is none, of the trainable parameters."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for name, p in trainable(model)}


def worst(got, want) -> float:
    """The largest difference; infinite where the shapes differ."""
    return (got - want).abs().max().item() if got.shape == want.shape else float("inf")


def close(got, want) -> bool:
    """Whether two tensors agree up to the order of float32 sums."""
    return worst(got, want) <= TOLERANCE * max(1.0, want.abs().max().item())


@contextlib.contextmanager
def torchs_own_refused(*names):
    """Inside, what torch has ready-made cannot be made: the exercise is to build it. names: which
    of DistributedDataParallel, ZeroRedundancyOptimizer, FullyShardedDataParallel and fully_shard;
    none means all."""
    with contextlib.ExitStack() as stack:
        for name in names or _OWN:
            module, kind = _OWN[name]
            if module in sys.modules:  # what is not loaded is not used; loading costs a second
                stack.enter_context(_refused(name, getattr(sys.modules[module], kind)))
        yield


@contextlib.contextmanager
def _refused(name, kind):
    original = kind.__init__

    def refuse(self, *_, **__):
        raise Wrong(f"torch's own {name} does the work",
                    "Build it from hooks and collectives; torch's is for comparing afterwards.")

    kind.__init__ = refuse
    try:
        yield
    finally:
        kind.__init__ = original

"""How checks run on ranks: world sizes, one verdict of all ranks, closeness of tensors, and the
refusal of torch's ready-made wrappers."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.tolerances import SUMS
from labs.checks.verdicts import Wrong, kind_of
from labs.training.loop import ModuleAndOptimizer
from labs.training.models import trainable
from labs.workers import devices
from labs.workers.collective_kernels import IssuedCollective, around_collectives
from labs.workers.launcher import launch

Result = TypeVar("Result")
# On 2 ranks some mistakes leave the right numbers: an exchange with the next rank is a complete
# all-reduce there. Few sizes are divisible by 3, so padding is needed.
WORLD_SIZES = (2, 3, 4)
_TORCHS_HINT = "Build it from hooks and collectives; torch's is for comparing afterwards."
BATCH = 12  # divides by 2, 3 and 4 ranks

# Wrappers that a check refuses -> (module, class whose constructor shows that one is made).
_READY_MADE = {
    "DistributedDataParallel": ("torch.nn.parallel", "DistributedDataParallel"),
    "ZeroRedundancyOptimizer": ("torch.distributed.optim.zero_redundancy_optimizer",
                                "ZeroRedundancyOptimizer"),
    "FullyShardedDataParallel": ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    "fully_shard": ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"),
}


def on_ranks(fn: Callable, *args, world_sizes: tuple[int, ...] = WORLD_SIZES,
             hang_after: float = 4.0, timeout: float = 30.0) -> list[Any]:
    """What `fn(*args)` returns on each rank of 2, 3 and 4 ranks, one launch after the other, in one
    list. On the device that the check was called with. hang_after: as of `launch`. timeout: seconds
    after which a launch is stopped in which a rank still computes, in an endless loop. Both are
    those of a CPU: see `scaled_timeout`."""
    work = (_with_nccls_rules, fn)
    if devices.gpus():
        work = (_after_a_collective, *work)
    limits = {"hang_after": scaled_timeout(hang_after), "timeout": scaled_timeout(timeout)}
    return [result for ranks in world_sizes
            for result in launch(*work, *args, ranks=ranks, quiet=True, **limits)]


def _with_nccls_rules(fn, *args):
    """On a rank: fn(*args), with a verdict where NCCL would refuse a collective that gloo runs."""
    with around_collectives(_require_contiguous):
        return fn(*args)


def _require_contiguous(collective: IssuedCollective, issue: Callable[[], Any]) -> Any:
    # Invariant: tensors of a collective are contiguous. gloo takes strides, NCCL's group raises
    # "Tensors must be contiguous" (torch, ProcessGroupNCCL.cpp, check_gpu_single_tensor), which a
    # student would meet on the first node that he rents. In send and recv gloo refuses strides, and
    # NCCL warns and moves the bytes as they lie.
    for tensor in (*collective.inputs, *collective.outputs):
        if not (tensor.is_contiguous() or tensor.dim() in (4, 5) and tensor.is_contiguous(
                memory_format=(torch.channels_last, torch.channels_last_3d)[tensor.dim() - 4])):
            said = ("the bytes would be sent as they lie" if collective.peer is not None else
                    "NCCL refuses it, though gloo does not")
            raise Wrong(f"{collective.kind.replace('_', '-')} of a tensor that is not contiguous, "
                        f"shape {list(tensor.shape)} and strides {list(tensor.stride())}: {said}",
                        ".contiguous() makes one that is, and leaves others as they are; "
                        ".clone(memory_format=torch.contiguous_format) is always a copy. After a "
                        "collective that writes into it, use that tensor.", code="not_contiguous")
    return issue()


def scaled_timeout(seconds: float) -> float:
    """Returns how long to wait for ranks where a CPU's are waited for so many seconds: on a GPU,
    contexts, kernels and NCCL's rings are made first."""
    return 3 * seconds if devices.gpus() else seconds


def _after_a_collective(fn, *args):
    """On a rank: fn(*args). NCCL makes its rings in the first collective of a group, in which each
    rank waits for all others, whatever async_op says: a check would take that for a wait of the
    student's."""
    dist.all_reduce(torch.zeros(1, device=devices.device()))
    devices.synchronize()
    return fn(*args)


def raise_on_all_ranks(judge: Callable[..., Result], *args) -> Result:
    """`judge(*args)` on every rank; if it raises Wrong on some, all raise that of the lowest rank.

    The ranks meet here after the student's code: if one is still inside that code, the launcher
    sees ranks in different collectives and names it, instead of a rank that has left.
    """
    # Only Wrong is caught: any other exception leaves the rank at once, with its own traceback.
    result, wrong = None, None
    try:
        result = judge(*args)
    except Wrong as error:
        wrong = error
    # An object collective: a rank without a verdict takes part too, so that no rank waits.
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, wrong)
    for error in filter(None, by_rank):
        raise error
    return result


def module_and_optimizer(strategy: Callable, model: nn.Module, optimizer_class: type,
                         settings: dict[str, Any]) -> ModuleAndOptimizer:
    """The (module, optimizer) that a strategy returns. Raises Wrong if it returns anything else."""
    pair = strategy(model, optimizer_class, **settings)
    # Invariant: a strategy returns (module, optimizer). Catches a strategy that returns the module
    # alone, or the two in the wrong order.
    if not isinstance(pair, tuple | list) or len(pair) != 2:  # a list unpacks as well
        raise Wrong(f"the strategy returned {kind_of(pair)}, not (module, optimizer)",
                    "return module, optimizer", code="wrong_type")
    for thing, kind, called in zip(pair, (nn.Module, torch.optim.Optimizer),
                                   ("a module", "an optimizer"), strict=True):
        if not isinstance(thing, kind):
            raise Wrong(f"the strategy returned {kind_of(thing)} where {called} belongs",
                        "return module, optimizer", code="wrong_type")
    return tuple(pair)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """name -> gradient of each trainable parameter, zeros where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for name, p in trainable(model)}


def largest_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference; infinite where the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    return (got - want).abs().max().item() if got.numel() else 0.0


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors are equal up to the order of float32 sums."""
    return largest_difference(got, want) <= SUMS * max(1.0, want.abs().max().item())


@contextlib.contextmanager
def torchs_own_refused(*names: str) -> Iterator[None]:
    """Refuses torch's ready-made wrappers inside the block: making one raises Wrong, because the
    exercise is to build it. names: some of DistributedDataParallel, ZeroRedundancyOptimizer,
    FullyShardedDataParallel and fully_shard; none means all."""
    with contextlib.ExitStack() as stack:
        for name in names or _READY_MADE:
            module, kind = _READY_MADE[name]
            # The constructor is patched, not the name in torch: a student may have imported the
            # name before.
            if module in sys.modules:  # one that is not imported is not used; importing takes 1 s
                refused = mock.patch.object(getattr(sys.modules[module], kind), "__init__",
                                            _refusal(f"torch's own {name}", _TORCHS_HINT))
                stack.enter_context(refused)
        yield


@contextlib.contextmanager
def labs_own_refused(kinds: Sequence[type], hint: str) -> Iterator[None]:
    """Refuses these classes of a lab's scaffold inside the block: making one raises Wrong with the
    hint, because an exercise without scaffold is to build what they do."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(
                kind, "__init__", _refusal(f"lab.{kind.__name__}", hint)))
        yield


def _refusal(whose, hint) -> Callable:
    def refuse(self, *_, **__):
        raise Wrong(f"{whose} does the work", hint, code="ready_made")

    return refuse

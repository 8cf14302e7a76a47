"""Exercise 2.2, first half: every rank has rank 0's parameters and buffers."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import close, raise_on_all_ranks, torchs_own_refused
from labs.checks.verdicts import Wrong
from labs.checks.waits import WaitTraffic, require_waits
from labs.faults.delayed_rank import delay_rank
from labs.manual_ddp.edge_cases import WORLD_SIZES, NestedModel
from labs.training.models import EdgeCaseModel


def judge_broadcast(broadcast_state: Callable) -> None:
    """On a rank: broadcast_state(model) writes rank 0's parameters and buffers into every rank's
    model, and leaves dtype, requires_grad and the parameters' identity as they were. Raises
    Wrong."""
    for make in (EdgeCaseModel, NestedModel):
        # Each rank begins with other numbers: only a broadcast can make them equal.
        model = make(seed=dist.get_rank())
        parameters = list(model.parameters())
        # The sender is late: who does not wait for an asynchronous broadcast reads its own numbers.
        delay_rank(0, WORLD_SIZES[0])
        with torchs_own_refused("DistributedDataParallel"), WaitTraffic() as traffic:
            broadcast_state(model)
        raise_on_all_ranks(_judge_values, model, make, traffic)
        raise_on_all_ranks(_judge_the_rest, model, make, parameters, traffic)


def _judge_the_rest(model, make, parameters, traffic):
    rank, fresh = dist.get_rank(), make()
    # an optimizer that was built before the broadcast would go on updating the old parameters
    if [id(p) for p in parameters] != [id(p) for p in model.parameters()]:
        raise Wrong(f"rank {rank}: the parameters were replaced by new ones",
                    "Write into the tensors: an optimizer made earlier still holds them.",
                    code="parameters_replaced")
    # equal models by a seed: the state of a training that goes on comes from none
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in _state(fresh).values())
    if traffic.bytes < nbytes:
        raise Wrong(f"only {traffic.bytes:,} bytes were communicated; the state has {nbytes:,}",
                    "Rank 0 must send its state: it need not come from a seed.",
                    code="too_little_sent")
    for name, parameter in fresh.named_parameters():
        # a switch that was moved to write in place, and not put back
        if (got := dict(model.named_parameters())[name].requires_grad) != parameter.requires_grad:
            raise Wrong(f"rank {rank}, parameter {name!r}: requires_grad is now {got}",
                        "Leave it; write into tensor.detach().", code="requires_grad_changed")


def _judge_values(model, make: Callable[..., nn.Module], traffic):
    rank = dist.get_rank()
    # a new seed on every rank would give equal models without any communication
    if not traffic.calls:
        raise Wrong("nothing was communicated: rank 0's state stayed where it was",
                    "Send it to every rank.", code="nothing_sent")
    got, want, before = map(_state, (model, make(seed=0), make(seed=rank)))
    # all state counts: also frozen parameters, which no optimizer touches, and buffers, also those
    # that state_dict() leaves out
    for name, tensor in want.items():
        if got[name].dtype == tensor.dtype and torch.equal(got[name], tensor):
            continue
        is_buffer = name in dict(model.named_buffers())
        who = f"rank {rank}, {'buffer' if is_buffer else 'parameter'} {name!r}"
        if got[name].dtype != tensor.dtype:
            raise Wrong(f"{who} is now {got[name].dtype}, not {tensor.dtype}",
                        "Write into the tensor that is there.", code="wrong_dtype")
        if rank == 0:
            raise Wrong(f"{who}: rank 0's own state changed", "Rank 0 sends, it does not receive.",
                        code="rank_0_changed")
        if traffic.never_waited:
            raise Wrong(f"{who} is read before it has arrived: nothing waits for the asynchronous "
                        "broadcast", "Call .wait() on each handle, or leave async_op out.",
                        code="never_waited")
        if torch.equal(got[name], before[name]):
            raise Wrong(f"{who} is still this rank's own", _kept(name, is_buffer, model),
                        code="not_broadcast")
        if got[name].is_floating_point() and close(got[name], tensor):
            raise Wrong(f"{who} is nearly rank 0's, but not equal",
                        "Was it cast to another dtype on its way?", code="precision_lost")
        raise Wrong(f"{who} is neither rank 0's nor this rank's own", "Broadcast from rank 0.",
                    code="not_from_rank_0")
    require_waits(traffic.never_waited)


def _kept(name, is_buffer, model) -> str:
    if is_buffer and name not in model.state_dict():
        return "state_dict() leaves out buffers with persistent=False; model.buffers() has them."
    return "Buffers and frozen parameters are state too; write into the tensor."


def _state(model) -> dict[str, torch.Tensor]:
    # named_buffers() has all buffers; state_dict() lacks those with persistent=False.
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(),
                                                       *model.named_buffers())}

"""Exercise 2.6: how one bucket is reduced."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from labs.checks.on_ranks import close, on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of
from labs.checks.waits import WaitTraffic, require_waits
from labs.faults.delayed_rank import DELAY_SECONDS, GATE_TIMEOUT, Gate, delay_rank
from labs.manual_ddp.api_hints import API_HINTS
from labs.manual_ddp.edge_cases import WORLD_SIZES
from labs.manual_ddp.gradients import name_mistake
from labs.meters.traffic import CollectiveCall, Mark
from labs.words import listed
from labs.workers import devices

SHAPES = ((3, 5), (7,), (2, 2, 2), (1,))  # of the parameters in a bucket
_WAITS = ("start waits for its all-reduce: backward would stand still",
          "dist.all_reduce(flat, async_op=True) returns at once; wait in finish.")


@check("2.6", hints=API_HINTS | {"missing 1 required positional": "start returns what finish "
                                 "needs: the flat tensor and the handle.",
                                 "collectives_differ": "A gradient that is None is sent as "
                                 "zeros: the flat tensor has the same length on every rank."})
def check_bucket(start, finish):
    """start(bucket) begins one all-reduce of all its gradients, in their dtype; finish(bucket,
    *started) waits and gives every parameter its averaged gradient."""
    on_ranks(_buckets, start, finish, world_sizes=WORLD_SIZES)
    return "one asynchronous all-reduce per bucket; every gradient comes back averaged"


class _Bucket:
    """Parameters with gradients that differ by rank. unused(rank, number): whether that rank has no
    gradient of that parameter."""

    def __init__(self, dtype=torch.float32):
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=devices.device()))
                           for shape in SHAPES]

    def fill(self, salt: float, unused: Callable[[int, int], bool]) -> "_Bucket":
        """Gives the parameters new gradients."""
        ranks = range(dist.get_world_size())
        by_rank = [[None if unused(rank, number) else self._gradient(rank, number, salt)
                    for number in range(len(SHAPES))] for rank in ranks]
        for parameter, gradient in zip(self.parameters, by_rank[dist.get_rank()], strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.alone = [[torch.zeros_like(parameter) if gradients[number] is None else
                       gradients[number] for gradients in by_rank]
                      for number, parameter in enumerate(self.parameters)]
        return self

    def _gradient(self, rank, number, salt):
        parameter = self.parameters[number]
        values = torch.arange(parameter.numel(), dtype=parameter.dtype, device=parameter.device) + 1
        # Squares: with rank + 1 alone the mean on 3 ranks would be rank 1's own gradient.
        return (values * (rank + 1) ** 2 + salt).view(SHAPES[number])

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def bytes(self) -> int:
        return self.elements * self.parameters[0].element_size()


def _buckets(start, finish):
    """On a rank: several buckets through both functions."""
    first = _Bucket().fill(0, unused=lambda rank, number: (rank, number) == (1, 2))
    _reduce(start, finish, [first], Gate())
    # new gradients in the same parameters: what was kept from the first call would be stale; and a
    # bucket that rank 0 did not use at all
    _reduce(start, finish, [first.fill(7, unused=lambda rank, number: rank == 0)])
    # two in flight at the same time, of two dtypes, one of them used by no rank
    other = _Bucket(torch.float64).fill(3, unused=lambda rank, number: number == 3)
    _reduce(start, finish, [other, first.fill(9, unused=lambda rank, number: True)])


def _reduce(start, finish, buckets: Sequence[_Bucket], gate: Gate | None = None):
    """Starts all buckets, then finishes all, and judges them. The last rank begins later than the
    others; with a gate not before rank 0 has left `start`."""
    last, wrong, begun, traffic = dist.get_world_size() - 1, None, [], WaitTraffic()
    # -1 is no rank: with a gate, the gate delays the last one.
    delay_rank(last if gate is None else -1, WORLD_SIZES[0])
    in_time = gate.wait() if gate and dist.get_rank() == last else True
    time.sleep(DELAY_SECONDS if gate and dist.get_rank() == last else 0)
    with traffic:
        for bucket in buckets:
            before = len(traffic.events)
            begun.append(start(bucket.parameters))
            wrong = wrong or _wrong_start(traffic.events[before:], bucket, begun[-1])
        if gate and dist.get_rank() == 0:
            gate.open()
        # the ranks must not meet in between, or a finish that does not wait would go unnoticed
        for bucket, started in zip(buckets, begun, strict=True):
            if wrong is None:
                with _Writes(started, traffic.events) as writes:
                    finish(bucket.parameters, *started)
                wrong = writes.judged()
        # Reading a functional collective's result counts as its wait.
        for parameter in (p for bucket in buckets for p in bucket.parameters):
            parameter.grad = None if parameter.grad is None else parameter.grad + 0
    raise_on_all_ranks(_judge, wrong, in_time, buckets, traffic)


class _Writes(TorchFunctionMode):
    """Sees whether this thread writes into what `start` returned before it waits: gloo sends what
    is there then, all of it or a part. (By its numbers alone such a sum cannot be told.)"""

    def __init__(self, started, events):
        super().__init__()
        self._addresses = {t.untyped_storage().data_ptr() for t in _tensors(started)}
        self._events, self._before, self._early = events, len(events), False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        sent = [tensor for tensor in _tensors((args, kwargs))
                if tensor.untyped_storage().data_ptr() in self._addresses]
        # Autograd's count of writes in place (private). What gloo's thread writes does not come
        # through this method.
        versions = [tensor._version for tensor in sent]
        returned = function(*args, **(kwargs or {}))
        if versions != [tensor._version for tensor in sent] and not self._has_waited():
            self._early = True
        return returned

    def judged(self) -> Wrong | None:
        """What is wrong after `finish`; that it does not wait at all is judged elsewhere."""
        if not self._early or not self._has_waited():
            return None
        return Wrong("finish changes the flat tensor before the sum has arrived",
                     "Call handle.wait() first, then divide.", code="waits_too_late")

    def _has_waited(self):
        return any(isinstance(event, Mark) and event.what.startswith("wait")
                   for event in self._events[self._before:])


def _tensors(nested) -> list[torch.Tensor]:
    # plain ones: a functional collective's wrapper waits by itself when it is used
    return [leaf for leaf in tree_leaves(nested)
            if type(leaf) in (torch.Tensor, nn.Parameter) and not leaf.is_inference()]


def _wrong_start(events, bucket, started) -> Wrong | None:
    calls = [event for event in events if isinstance(event, CollectiveCall)]
    # one call for the whole bucket: each call has a fixed cost, which buckets save
    if len(calls) != 1 or calls[0].kind != "all_reduce":
        kinds = listed([call.kind for call in calls]) if calls else "nothing"
        return Wrong(f"start called {len(calls)} collectives ({kinds}), not one all_reduce",
                     "Put the gradients one after the other in one flat tensor.",
                     code="wrong_collective")
    if calls[0].elements != bucket.elements:
        return Wrong(f"the all-reduce carries {calls[0].elements} elements, the bucket has "
                     f"{bucket.elements}", "A gradient that is None is sent as zeros.",
                     code="too_little_sent" if calls[0].elements < bucket.elements
                     else "too_much_sent")
    # float64 gradients would lose digits in a float32 tensor; bf16 ones would send twice the bytes
    if calls[0].bytes != bucket.bytes:
        return Wrong(f"the all-reduce carries {calls[0].bytes} bytes, the bucket's gradients of "
                     f"{bucket.parameters[0].dtype} have {bucket.bytes}",
                     "The flat tensor has the bucket's dtype, and its device.", code="wrong_dtype")
    # a synchronous call, or a wait right after it, stops backward until the bucket has arrived
    if not calls[0].asynchronous or len(events) > 1:
        return Wrong(*_WAITS, code="waits_too_early")
    if not isinstance(started, tuple | list):
        return Wrong(f"start returned {kind_of(started)}",
                     "Return two things: the flat tensor and the handle.", code="wrong_type")
    return None


def _judge(wrong, in_time, buckets, traffic):
    if wrong:
        raise wrong
    # rank 0 left `start` only when the last rank had begun: it waited, by whatever call
    if not in_time:
        raise Wrong(f"{_WAITS[0]} (rank 0 was in it for {GATE_TIMEOUT:g} s, until the last "
                    "rank came)", _WAITS[1], code="waits_too_early")
    for bucket in buckets:
        _judge_gradients(bucket, traffic.never_waited)
    require_waits(traffic.never_waited)


def _judge_gradients(bucket, never_waited):
    for number, (parameter, alone) in enumerate(zip(bucket.parameters, bucket.alone, strict=True)):
        who = f"rank {dist.get_rank()}, gradient {number} of the bucket"
        # the next step would leave the parameter as it is here, and change it on the other ranks
        if parameter.grad is None:
            raise Wrong(f"{who} is still None",
                        "A rank that did not use a parameter gets the mean, too.",
                        code="gradient_missing")
        if parameter.grad.shape != parameter.shape:
            raise Wrong(f"{who}: shape {tuple(parameter.grad.shape)}, not "
                        f"{tuple(parameter.shape)}",
                        "Cut the flat tensor up again, in the same order, with the same shapes.",
                        code="wrong_shape")
        mean = sum(alone) / len(alone)
        # each parameter gets its own piece of the mean, once the all-reduce has arrived
        if not close(parameter.grad, mean):
            if never_waited:
                raise Wrong(f"{who} was used before it arrived: finish does not wait",
                            "Call handle.wait() before you touch the flat tensor.",
                            code="never_waited")
            code, sentence, hint = name_mistake(parameter.grad, mean, alone)
            raise Wrong(f"{who} {sentence}", hint, code=code)

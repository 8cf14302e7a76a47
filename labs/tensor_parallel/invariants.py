"""What a rank may hold and send under tensor parallelism. Source of the collectives: Megatron-LM
(2019), section 3: two all-reduces of b·s·h elements in a layer's forward, two in its backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn

from labs.checks.invariants import judge_memory, judge_recorded, record_step
from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.verdicts import Wrong
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Traffic
from labs.tensor_parallel.groups import reject_other_ranks
from labs.training.models import trainable
from labs.words import counted

BYTES = 4  # of an fp32 element
HINTS = {
    "parameters": "Does a shard have memory of its own? A view of the whole weight keeps all of "
                  "it: clone the part.",
    "gradients": "Gradients are as large as the parameters: is anything not sharded that should "
                 "be?",
    "optimizer_state": "Make the optimizer after the layers have been replaced, from the "
                       "parameters that the module has now.",
    "rest": "Is something kept that was needed only to make the shards?"}


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that a rank may hold in fp32: 1/ranks of what is sharded, all that is replicated.

    sharded, replicated: elements of the whole model. tensors: how many parameters. buffers: bytes.
    rest: bytes of all else that may be there at the end of a phase; not judged after forward, when
    there are activations. states: numbers that the optimizer keeps for each element, 2 for AdamW.
    padding: elements that the shards may have in addition.
    """

    ranks: int
    sharded: int
    replicated: int
    tensors: int
    buffers: int = 0
    rest: int = 16_384
    states: int = 2
    padding: int = 0

    @classmethod
    def of(cls, model: nn.Module, sharded: Sequence[str], ranks: int, **more) -> "ResidentBytes":
        """Of a whole model, whose parameters with these names are sharded."""
        sizes = {name: p.numel() for name, p in trainable(model)}
        cut = sum(sizes[name] for name in sharded)
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        return cls(ranks, cut, sum(sizes.values()) - cut, len(sizes), buffers, **more)

    @property
    def elements(self) -> int:
        """Of one rank's parameters, or of its gradients."""
        return -(-self.sharded // self.ranks) + self.replicated + self.padding

    def by_category(self, phase: str) -> dict[str, int]:
        """Category -> bytes at the end of a phase."""
        has_gradients = phase in ("backward", "step")
        # AdamW has a step count for each parameter besides its states: one fp32 number a tensor.
        limits = {"parameters": BYTES * self.elements + self.buffers,
                  "gradients": BYTES * self.elements * has_gradients,
                  "optimizer_state": BYTES * (self.states * self.elements + self.tensors)}
        return limits if phase == "forward" else {**limits, "rest": self.rest}

    @property
    def formula(self) -> str:
        """How many elements of parameters that is, in words."""
        return (f" ({self.sharded:,} / {self.ranks} + {self.replicated:,} elements of "
                f"{BYTES} bytes)")


def judge_resident_bytes(build: Callable[[], tuple], batches: list[dict], allowed: ResidentBytes,
                         rule: str = "under tensor parallelism",
                         hints: dict[str, str] = HINTS) -> None:
    """On a rank: raises Wrong on all ranks where one holds more than is allowed after building, or
    at the end of forward, backward or step. build() makes the model, cuts it, and returns (module,
    optimizer): so what the whole model left behind is counted."""
    judge_recorded(partial(memory.record, build, batches, outside=True), _judge_bytes, allowed,
                   rule, hints)


def _judge_bytes(report, allowed, rule, hints):
    limits = {phase: allowed.by_category(phase) for phase in report.phases}
    # Catches views of the whole weight, a copy of it kept aside, layers that were forgotten, and
    # optimizer state for the whole model.
    judge_memory(report, limits, rule, hints,
                 {"parameters": allowed.formula, "gradients": allowed.formula})


def record_last_step(build: Callable[[nn.Module], tuple], model: nn.Module,
                     batches: list[dict]) -> Traffic:
    """On a rank: trains on all batches; the collectives of the step on the last one."""
    return record_step(build, model, batches)


@dataclass(frozen=True)
class Activations:
    """What is sent: activations of b·s·h elements, in each of so many layers."""

    layers: int
    batch: int
    sequence: int
    hidden: int

    @property
    def elements(self) -> int:
        """b·s·h, of one layer's hidden states."""
        return self.batch * self.sequence * self.hidden


def judge_collectives(traffic: Traffic, allowed: dict[str, float], activations: Activations,
                      group: dist.ProcessGroup | None = None, small: int | None = None,
                      hints: dict[str, str] | None = None,
                      outside: dict[str, int] | None = None) -> None:
    """Raises Wrong on all ranks where one sends more in a step than is allowed.

    allowed: kind -> how many collectives of b·s·h elements a layer and step needs, forward and
    backward together; an all-gather is counted by its output, a reduce-scatter by its input. small:
    elements of all other collectives of the step together, by default half of one activation.
    group: the one in which all must be. hints: kind -> what to say where there is too much of it.
    outside: kind -> how many more of b·s·h elements a step needs outside the layers.
    """
    # Half of one activation: less than the smallest collective that is one too many.
    most = activations.elements / 2 if small is None else small
    raise_on_all_ranks(_judge_kinds, traffic, allowed, activations, most, hints or {},
                       outside or {})
    raise_on_all_ranks(reject_other_ranks, traffic, group or dist.group.WORLD,
                       f"rank {dist.get_rank()}")


def _judge_kinds(traffic, allowed, activations, small, hints, outside):
    rank, rest = dist.get_rank(), 0.0
    for kind in dict.fromkeys(call.kind for call in traffic.calls):
        calls = traffic.of(kind)
        # In elements, not calls: whether one activation travels in one piece or two is free.
        sent, due = sum(call.elements for call in calls), allowed.get(kind, 0)
        more = outside.get(kind, 0)
        extra = sent - (due * activations.layers + more) * activations.elements
        rest += max(0.0, extra)
        if extra > small:
            raise Wrong(_too_much(rank, kind, calls, due, more, activations), hints.get(kind, ""),
                        code="wrong_traffic")
    # Catches what is sent beside the activations, each too small to be seen alone.
    if rest > small:
        raise Wrong(f"rank {rank} sends {int(rest):,} elements a step beside the activations' "
                    f"collectives; at most {int(small):,} are needed", hints.get("rest", ""),
                    code="extra_collective")


def _too_much(rank: int, kind: str, calls: list[CollectiveCall], due: float, outside: int,
              activations: Activations) -> str:
    name, size = kind.replace("_", "-"), activations.elements
    usual = [call for call in calls if call.elements == size]
    needed = (f"{due:g} of them are needed" if due else "none is needed")
    if len(usual) - outside > due * activations.layers:
        each = (len(usual) - outside) / activations.layers
        return (f"rank {rank}: {each:g} {name}s of b·s·h = {size:,} elements a layer and step; "
                f"{needed}")
    # No more of the usual size than due, so something of another size is too much; the largest is
    # named.
    other = max((call for call in calls if call.elements != size), key=lambda call: call.elements)
    return (f"rank {rank}: {counted(len(calls), name)} a step, one of {other.elements:,} elements, "
            f"which is no activation of b·s·h = {size:,}; {needed}")

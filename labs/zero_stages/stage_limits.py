"""What each ZeRO stage may hold, in bytes, and send, in elements: the invariants that the checks
hold a submission to.

Source: Rajbhandari et al., "ZeRO", SC 2020 (arXiv 1910.02054), section 5 (memory of the three
stages) and section 7 (traffic: 2Ψ, 2Ψ and 3Ψ elements for stages 1, 2 and 3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist

from labs.checks.invariants import (
    STATES,
    judge_memory,
    judge_recorded,
    positions,
    record_step,
)
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong
from labs.checks.waits import WaitTraffic, require_waits
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Mark, Traffic
from labs.predictions.communication.traffic import passes, stage_passes
from labs.training import data
from labs.training.loop import train
from labs.training.models import DeepMLP, count_trainable, trainable
from labs.workers import devices
from labs.zero_stages.stage_training import SETTINGS, build

BYTES = 4  # of an fp32 element
_REDUCING = ("all_reduce", "reduce", "all_to_all")  # "reduce": and "reduce_scatter"


@dataclass(frozen=True)
class StageLimits:
    """Bytes that one rank may hold under ZeRO `stage` in fp32 with AdamW.

    elements: Ψ. tensors: how many tensors hold them. layer: elements of the largest layer. Padding
    is allowed: an element more per tensor in a shard, N more in a full parameter. rounding: bytes
    that the allocator may add to each tensor.
    """

    stage: int
    ranks: int
    elements: int
    tensors: int
    layer: int
    rounding: int = 0

    @property
    def full(self) -> int:
        """Bytes of all parameters, or of all gradients."""
        return BYTES * (self.elements + self.tensors * self.ranks) + self._rounded

    @property
    def shard(self) -> int:
        """Bytes of one rank's shard of them."""
        return BYTES * (self.elements // self.ranks + self.tensors) + self._rounded

    @property
    def _rounded(self) -> int:
        return self.rounding * self.tensors

    def bytes(self, phase: str) -> dict[str, int]:
        """Category -> bytes at the end of a phase."""
        gradients = self.shard if self.stage > 1 else self.full
        if self.stage == 1 and phase == "step":
            gradients += self.shard  # the reduced shard, until zero_grad forgets the full gradients
        # Backward begins with the last layer of forward, so that one may stay gathered.
        gathered = (BYTES * self.layer + self._rounded
                    if self.stage == 3 and phase == "forward" else 0)
        return {"parameters": gathered + (self.shard if self.stage > 2 else self.full),
                "gradients": gradients if phase in ("backward", "step") else self.shard,
                "optimizer_state": 2 * self.shard + BYTES * self.tensors}  # with AdamW's steps

    @property
    def one_layer(self) -> int:
        """Bytes of a gathered layer, with its padding."""
        return BYTES * (self.layer + self.ranks) + self._rounded

    def formula(self, category: str) -> str:
        """The bytes of a category as the paper writes them, for fp32 with AdamW."""
        sharded = self.stage >= {"optimizer_state": 1, "gradients": 2, "parameters": 3}[category]
        layer = ", and one layer after forward" * (sharded and category == "parameters")
        return ("8Ψ" if category == "optimizer_state" else "4Ψ") + "/N" * sharded + layer


def stage_limits(stage: int, model: DeepMLP) -> StageLimits:
    """On a rank: what it may hold of this model."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    return StageLimits(stage, dist.get_world_size(), count_trainable(model), len(trainable(model)),
                       max(sizes), devices.rounding())


def judge_invariants(strategy: Callable, stage: int, unsharded: memory.Report,
                             overlap: bool = False) -> float:
    """On a rank: how many Ψ a step moves, padding included. Raises Wrong if the strategy sends or
    holds more than its stage allows. unsharded: what `unsharded_memory` returns. overlap: whether
    gradients must be communicated while backward computes, one layer's at a time."""
    limits, batches = stage_limits(stage, DeepMLP()), _batches()
    make = partial(build, strategy, settings=SETTINGS)
    # The last of the three steps is recorded; the moments exist since the first.
    step = record_step(make, DeepMLP(), [*batches, batches[0]])
    volume = raise_on_all_ranks(judge_stage_traffic, step, limits)
    if overlap:
        raise_on_all_ranks(require_overlap, step, limits.layer)
    _require_every_wait(make, batches)
    if stage == 3:
        _require_layers_freed(make, batches[0], limits)
    judge_recorded(lambda: memory.record(lambda: make(DeepMLP()), batches, outside=True),
                   judge_stage_memory, unsharded, limits)
    return volume


def unsharded_memory() -> memory.Report:
    """In the caller: what a rank holds that trains the same model without sharding, on the device
    of the check. It depends neither on the strategy nor on the number of ranks."""
    # The cache's key: a GPU's allocator rounds sizes up, so a report of the CPU is not one of a
    # GPU.
    return _unsharded_memory(devices.gpus())


@cache
def _unsharded_memory(gpus) -> memory.Report:
    return on_ranks(lambda: memory.record(_unsharded, _batches()), world_sizes=(1,))[0]


def _batches() -> list[data.Batch]:
    return data.xy_batches(2, 4, seed=dist.get_rank())


def _unsharded():
    model = DeepMLP()
    return model, torch.optim.AdamW(model.parameters(), **SETTINGS)


def _require_every_wait(make, batches):
    module, optimizer = make(DeepMLP())
    with WaitTraffic() as traffic:
        train(module, optimizer, batches[:1])
        issued = traffic.calls
        train(module, optimizer, batches[1:])
    # Of the first step only: what the last one leaves in flight may be waited for in the next.
    raise_on_all_ranks(require_waits, [call for call in traffic.never_waited if call in issued])


def _require_layers_freed(make, batch, limits):
    model = DeepMLP()
    module, optimizer = make(model)
    built = _bytes_of(model)
    loss = module(**batch).loss
    held = _bytes_of(model)
    loss.backward()
    optimizer.step()
    # One layer and the root, which backward uses first, may stay between forward and backward.
    # Catches layers that are not freed in forward. Memory in general is judged later; there, a
    # gathered parameter is one of many buffers, and what is held from the beginning has its own
    # sentence.
    root = limits.elements - sum(p.numel() for p in model.layers.parameters())
    most = BYTES * (limits.layer + root + limits.tensors * limits.ranks)
    raise_on_all_ranks(_judge_layers_kept, held, most, built > most)


def _judge_layers_kept(held, most, from_the_beginning):
    if held > most and not from_the_beginning:
        raise Wrong(f"rank {dist.get_rank()} holds {held:,} bytes of gathered parameters after "
                    f"forward; under ZeRO-3 one layer and the root may be left, at most {most:,}",
                    "Free a layer's parameters when its forward is done: the layers after it need "
                    "other ones, and backward gathers it again.", code="memory_kept")


def _bytes_of(model) -> int:
    """Bytes of memory that the parameters of a model have now, each storage counted once."""
    # Parameters of one unit are views of one storage, which must not count once for each.
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for p in model.parameters()}
    return sum(storages.values())


def judge_stage_traffic(traffic: Traffic, limits: StageLimits) -> float:
    """How many Ψ are sent. Raises Wrong if it is more than the stage needs, or if gradients are
    sent too late."""
    _require_early_reductions(traffic, limits)
    sent = {}
    for call in traffic.calls:
        sent[call.kind] = sent.get(call.kind, 0) + call.bytes / BYTES * passes(call.kind)
    allowed = sum(passes(kind) * n for kind, n in stage_passes(limits.stage).items())
    # In bytes, not calls: how a stage splits its tensors is free, what it sends is not. Catches
    # all-reduces of gradients, gathers of optimizer state, and parameters gathered twice.
    total = sum(sent.values()) / limits.elements
    if sum(sent.values()) <= allowed * limits.full / BYTES:
        return total
    parts = ", ".join(f"{kind} {elements / limits.elements:.1f}Ψ"
                      for kind, elements in sent.items() if elements)
    code, hint = _traffic_hint(sent, limits)
    raise Wrong(f"rank {dist.get_rank()} moves {total:.1f}Ψ elements per step ({parts}); "
                f"ZeRO-{limits.stage} moves {allowed}Ψ", hint, code=code)


def _traffic_hint(sent, limits) -> tuple[str, str]:
    """(code, hint) where more is sent than the stage needs."""
    # Half of Ψ: all-reduces of losses or flags are far below it, those of gradients above.
    if sent.get("all_reduce", 0) > limits.elements / 2:
        return ("all_reduced_not_scattered", "An all-reduce gives every rank the full sum; a rank "
                "needs only its own shard of it: reduce-scatter.")
    if limits.stage == 3:
        return ("too_much_sent", "Gather a layer once for its forward and once for its backward, "
                "and reduce-scatter its gradients once.")
    return ("too_much_sent", "Only parameters are ever gathered; gradients and optimizer states "
            "stay where they are.")


def _require_early_reductions(traffic, limits):
    # From ZeRO-2 on, gradients are reduced during backward: reduced only after it, all are in
    # memory at once, and the peak is that of ZeRO-1.
    sent, ready = positions(traffic.events, *_REDUCING), positions(traffic.events, "ready")
    if limits.stage < 2 or not ready:
        return
    hint = ("Reduce-scatter a layer's gradients during backward, as soon as they are there, and "
            "free them.")
    if not sent or sent[0] > ready[-1]:
        raise Wrong(f"rank {dist.get_rank()}: no gradient leaves before the last one is ready, so "
                    "all of them are in memory at once", hint, code="leaves_too_late")
    # All layers, not the first alone: when a layer's gradients are complete, those of the layers
    # before it have been sent, but for the last one or two, which may wait to be sent together.
    for done, (name, place) in enumerate(_layers_ready(traffic.events)):
        left = sum(traffic.events[n].bytes for n in sent if n < place) / BYTES
        if left < (done - 2) * limits.layer:
            raise Wrong(f"rank {dist.get_rank()}: when the gradients of {name} are ready, those of "
                        f"{done} layers were ready before, and {left / limits.layer:.1f} layers' "
                        "have left", hint, code="leaves_too_late")


def _layers_ready(events) -> list[tuple[str, int]]:
    """(layer, position in `events` at which its gradients are complete), in order."""
    last = {}
    for place in positions(events, "ready layers."):
        last[events[place].what.removeprefix("ready ").rsplit(".", 1)[0]] = place
    return sorted(last.items(), key=lambda item: item[1])


def require_overlap(traffic: Traffic, layer: int) -> None:
    """Raises Wrong unless a layer's gradients are in flight while the next layer computes, and
    those of one layer only. layer: its elements."""
    end = positions(traffic.events, "backward ends")[0]
    events, waited = traffic.events[:end], {}
    for place, event in enumerate(events):
        if isinstance(event, Mark) and event.call is not None:
            waited[id(event.call)] = place  # marked once, at the first wait
    # (issued, first waited for), as positions; one that backward never waits for is in flight until
    # its end.
    calls = [(place, waited.get(id(events[place]), end)) for place in positions(events, *_REDUCING)
             if isinstance(events[place], CollectiveCall)]
    ready = positions(events, "ready")
    for number, (begun, ended) in enumerate(calls):
        # Catches a wait that follows at once, and a collective that returns when it is done: the
        # rank does nothing else meanwhile. The last one has no computing left that could hide it.
        if not events[begun].asynchronous or not any(begun < moment < ended for moment in ready):
            if begun < ready[-1]:
                raise Wrong(f"rank {dist.get_rank()}: reduce-scatter number {number + 1} of "
                            "backward is waited for before another gradient is ready: nothing "
                            "is in flight while the next layer computes",
                            "Keep what lab.reduce_scatter(...) returns, and call its .wait() when "
                            "the next layer's gradients are there.", code="waits_too_early")
    # Each in flight holds a layer's gradients: several at once, and the memory saved is back.
    for moment in ready:
        flying = sum(events[begun].elements for begun, ended in calls if begun < moment < ended)
        # 1.5: one layer with its padding passes, two layers do not.
        if flying > 1.5 * layer:
            raise Wrong(f"rank {dist.get_rank()}: at {events[moment].what.removeprefix('ready ')} "
                        f"in backward, the gradients of {flying / layer:.1f} layers are in flight",
                        "One at a time: wait for the one before, then begin the next.",
                        code="too_many_in_flight")


def judge_stage_memory(report: memory.Report, unsharded: memory.Report,
                         limits: StageLimits) -> None:
    """Raises Wrong if a rank holds more than its stage allows: at the end of a phase, or, from
    ZeRO-2 on, at any moment. unsharded: the same model without sharding, for its activations."""
    # What is none of the three states may be as much as without sharding, and one gathered layer:
    # catches full copies of states, gradients or parameters kept somewhere else.
    allowed = {phase: {**limits.bytes(phase), "rest": usual.activations + usual.buffers
                       + usual.other + limits.one_layer}
               for phase, usual in unsharded.phases.items()}
    judge_memory(report, allowed, f"under ZeRO-{limits.stage}", _memory_hints(limits.stage),
                 {category: f" ({limits.formula(category)})" for category in STATES})
    if limits.stage > 1:
        _judge_peaks(report, unsharded, limits)


def _memory_hints(stage) -> dict[str, str]:
    gathered = stage == 3
    return {"optimizer_state": "Give the inner optimizer the shards, nothing else.",
            "gradients": "Free what this rank does not own: set the parameters' .grad to None. A "
                         "hook that returns None frees nothing.",
            "parameters": "Free a layer's parameters after its forward and after its backward."
            if gathered else
            "The shard that is updated must be a view of the full parameter, not a second copy.",
            "rest": "Is something not freed that was needed only temporarily"
                    f"{', such as parameters gathered here' * gathered}?"}


def _judge_peaks(report, unsharded, limits):
    # From ZeRO-2 on, a peak is what stays plus a few layers: less than half of all gradients or
    # parameters; less than a third in forward, which has only parameters. Catches a strategy
    # that gathers or reduces layer by layer, but frees at the end.
    for phase, share in (("forward", 3), ("backward", 2), ("step", 2)):
        kept = limits.bytes("backward")
        if phase == "forward":
            kept["gradients"] = min(kept["gradients"], report.phases[phase].gradients)
        stays = (sum(kept.values()) + unsharded.phases["forward"].activations * 2
                 + unsharded.phases[phase].other
                 + (2 * limits.shard if phase == "step" else 0))  # AdamW's temporaries
        room, peak = BYTES * limits.elements // share, report.peaks[phase].total
        if peak > stays + room:
            what = "gathered parameters" if limits.stage == 3 else "gradients"
            raise Wrong(f"rank {dist.get_rank()} holds {peak:,} bytes at the peak of {phase}; what "
                        f"stays is {int(stays):,}, and {what} of a few layers come to less than "
                        f"{room:,}", "One layer after the other: free it before the next but one "
                        "comes. What is only freed at the end is there at the peak.",
                        code="peak_too_high")

"""What each ZeRO stage promises, in bytes and in elements that travel, and whether it is kept.

Source: Rajbhandari et al., "ZeRO", SC 2020 (arXiv 1910.02054), section 5 (memory of the three
stages) and section 7 (traffic: 2Ψ, 2Ψ and 3Ψ elements for stages 1, 2 and 3).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import raise_on_all_ranks
from labs.exercises.verdicts import Wrong
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Traffic
from labs.training import data
from labs.training.models import DeepMLP, count_trainable, trainable
from labs.zero_stages.twin import SETTINGS, built

BYTES = 4  # of one fp32 number
TRIES = 3  # what a thread of gloo frees goes unseen at times: then memory is measured again
PASSES = {1: 2, 2: 2, 3: 3}  # stage -> how many times Ψ elements travel
_WEIGHTS = {"all_reduce": 2, "barrier": 0}  # an all-reduce is a reduce-scatter and an all-gather
_REDUCING = ("all_reduce", "reduce_scatter", "all_to_all", "reduce")
_SHOWN = {"optimizer_state": "optimizer state", "rest": "activations, buffers and the rest"}


@dataclass(frozen=True)
class Promise:
    """Bytes that a rank may hold under ZeRO `stage` in fp32 with AdamW.

    elements: Ψ; tensors: how many tensors hold them; layer: elements of the largest layer. Where a
    shard is padded, one element more per tensor is allowed, and N elements where all is whole.
    """

    stage: int
    ranks: int
    elements: int
    tensors: int
    layer: int

    @property
    def whole(self) -> int:
        return BYTES * (self.elements + self.tensors * self.ranks)

    @property
    def shard(self) -> int:
        return BYTES * (self.elements // self.ranks + self.tensors)

    def bytes(self, phase: str) -> dict:
        """Category -> bytes at the end of a phase."""
        gradients = self.shard if self.stage > 1 else self.whole
        if self.stage == 1 and phase == "step":
            gradients += self.shard  # the reduced piece, beside what zero_grad has yet to forget
        live = self.layer * BYTES if self.stage == 3 and phase == "forward" else 0
        return {"parameters": live + (self.shard if self.stage > 2 else self.whole),
                "gradients": gradients if phase in ("backward", "step") else self.shard,
                "optimizer_state": 2 * self.shard + BYTES * self.tensors}  # with AdamW's steps

    def formula(self, category: str) -> str:
        """How the paper writes it, for fp32 with AdamW."""
        sharded = self.stage >= {"optimizer_state": 1, "gradients": 2, "parameters": 3}[category]
        return ("8Ψ" if category == "optimizer_state" else "4Ψ") + "/N" * sharded


def promise_of(stage: int, model) -> Promise:
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    return Promise(stage, dist.get_world_size(), count_trainable(model), len(trainable(model)),
                   max(sizes))


def keep(strategy, stage: int) -> None:
    """On a rank: raises Wrong where traffic or memory is not what the stage promises."""
    promise = promise_of(stage, DeepMLP())
    plain = memory.record(_plain, _batches())
    for attempt in range(TRIES):
        made = {}
        report = memory.record(lambda made=made: _build(strategy, made), _batches())
        if not attempt:
            raise_on_all_ranks(judge_traffic, _traffic(made), promise)
        try:
            return raise_on_all_ranks(judge_memory, report, plain, promise)
        except Wrong:
            if attempt == TRIES - 1:
                raise


def _plain():
    model = DeepMLP()
    return model, torch.optim.AdamW(model.parameters(), **SETTINGS)


def _batches() -> list:
    """Two steps of this rank's batches."""
    return data.xy_batches(2, 4, seed=dist.get_rank())


def _build(strategy, made):
    model, made["traffic"] = DeepMLP(), Traffic()
    for _, parameter in trainable(model):
        parameter.register_post_accumulate_grad_hook(lambda _: made["traffic"].mark("ready"))
    made["module"], made["optimizer"] = built(strategy, model, SETTINGS)
    return made["module"], made["optimizer"]


def _traffic(made):
    """What one more step communicates."""
    traffic = made["traffic"] = Traffic()
    with traffic:
        made["module"](**_batches()[0]).loss.backward()
        made["optimizer"].step()
    made["optimizer"].zero_grad()
    return traffic


def judge_traffic(traffic, promise) -> None:
    """Raises Wrong where more travels than promised, or gradients leave too late."""
    moved = {}
    for call in traffic.calls:
        each = call.bytes / BYTES * _WEIGHTS.get(call.kind, 1)
        moved[call.kind] = moved.get(call.kind, 0) + each
    _judge_order(traffic, promise)
    passes, total = PASSES[promise.stage], sum(moved.values())
    if total <= passes * promise.whole / BYTES:
        return
    parts = ", ".join(f"{kind} {elements / promise.elements:.1f}Ψ"
                      for kind, elements in moved.items() if elements)
    hint = ("Only parameters are ever gathered; gradients and optimizer states stay where they are."
            if promise.stage != 3 else "Gather a layer once for its forward and once for its "
            "backward, and reduce-scatter its gradients once.")
    if moved.get("all_reduce", 0) > promise.elements / 2:
        hint = ("An all-reduce gives every rank the whole sum; a rank needs only its own shard of "
                "it: reduce-scatter.")
    raise Wrong(f"rank {dist.get_rank()} moves {total / promise.elements:.1f}Ψ elements per step "
                f"({parts}); ZeRO-{promise.stage} moves {passes}Ψ", hint)


def _judge_order(traffic, promise):
    sent = [number for number, event in enumerate(traffic.events)
            if isinstance(event, CollectiveCall) and event.kind in _REDUCING]
    ready = [number for number, event in enumerate(traffic.events)
             if not isinstance(event, CollectiveCall)]
    if promise.stage == 1 or not ready:
        return
    if not sent or sent[0] > ready[-1]:
        raise Wrong(f"rank {dist.get_rank()}: no gradient leaves before the last one is ready, so "
                    "all of them are in memory at once",
                    "Reduce-scatter a layer's gradients during backward, as soon as they are "
                    "there, and free them.")


def judge_memory(report, plain, promise) -> None:
    """Raises Wrong where a rank holds more than promised: at the end of a phase, or, from ZeRO-2
    on, at any moment."""
    for phase in memory.PHASES:
        allowed = promise.bytes(phase)
        held = report.phases[phase]
        for category, most in allowed.items():
            if getattr(held, category) > most:
                _too_much(phase, category, getattr(held, category), most, promise)
        rest = held.total - sum(getattr(held, category) for category in allowed)
        usual = plain.phases[phase]
        usual = usual.activations + usual.buffers + usual.other + promise.layer * BYTES
        if rest > usual:
            _too_much(phase, "rest", rest, usual, promise)
    if promise.stage > 1:
        _judge_peaks(report, plain, promise)


def _too_much(phase, category, held, most, promise):
    name = _SHOWN.get(category, category)
    formula = f" ({promise.formula(category)})" if category != "rest" else ""
    if category == "parameters" and promise.stage == 3 and phase == "forward":
        formula = " (4Ψ/N and one layer)"
    hints = {"optimizer_state": "Hand the inner optimizer the shards, nothing else.",
             "gradients": "Free what this rank does not own: set the parameters' .grad to None. A "
                          "hook that returns None frees nothing.",
             "parameters": "Free a layer's parameters after its forward and after its backward.",
             "rest": "Is something kept that was needed only for a moment" + (
                 ", such as parameters gathered here?" if promise.stage == 3 else "?")}
    if category == "parameters" and promise.stage < 3:
        hints["parameters"] = ("The shard that is updated must be a view of the whole, not a copy "
                               "beside it.")
    when = "when it is built" if phase == "build" else f"after {phase}"
    raise Wrong(f"rank {dist.get_rank()} holds {held:,} bytes of {name} {when}; under "
                f"ZeRO-{promise.stage} on {promise.ranks} ranks it is {int(most):,}{formula}",
                hints[category])


def _judge_peaks(report, plain, promise):
    """From ZeRO-2 on there is never as much as half of all gradients, or of all parameters, more
    than what stays; in forward, where only parameters come and go, never a third."""
    for phase, share in (("forward", 3), ("backward", 2), ("step", 2)):
        stays = dict(promise.bytes("backward"))
        if phase == "forward":
            stays["gradients"] = min(stays["gradients"], report.phases[phase].gradients)
        stays["usual"] = plain.phases["forward"].activations * 2 + plain.phases[phase].other
        stays["AdamW"] = 2 * promise.shard if phase == "step" else 0  # its temporaries
        room, peak = BYTES * promise.elements // share, report.peaks[phase].total
        if peak > sum(stays.values()) + room:
            what = "gathered parameters" if promise.stage == 3 else "gradients"
            raise Wrong(f"rank {dist.get_rank()} holds {peak:,} bytes at the peak of {phase}; what "
                        f"stays is {int(sum(stays.values())):,}, and {what} of a few layers come "
                        f"to less than {room:,}", "One layer after the other: free it before the "
                        "next but one comes. What is only freed at the end is there at the peak.")

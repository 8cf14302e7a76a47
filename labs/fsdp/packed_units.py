"""The collectives of exercise 4.12: one of each kind for each unit that a student packs, in bf16
and fp32, and the next unit's all-gather in flight while this one's gradients are computed."""

from collections import Counter
from dataclasses import replace

import torch.distributed as dist

from labs.checks.verdicts import Wrong
from labs.fsdp import strategy_checks
from labs.fsdp.strategy_checks import Units
from labs.fsdp.units import judge_gathered_alone, require_kinds
from labs.meters.traffic import CollectiveCall, Mark
from labs.training import models
from labs.words import counted

BYTES = {"all_gather": 2, "reduce_scatter": 4}  # of an element: bf16 and fp32


def judge_packed_units(events: list[CollectiveCall | Mark], want: Units) -> None:
    """Raises Wrong where a step's collectives are not one for each unit, of the right type, or
    where the next block's all-gather is not in flight in backward.

    events: of strategy_checks.record_events(..., overlap=True). want: sizes under FSDP2, which pads
    each parameter; other padding is accepted.
    """
    sizes = dict(zip(("block", "root"), _unpadded(), strict=True))
    calls = [_as_reduce_scatter(event) for event in events]
    require_kinds([call for call in calls if isinstance(call, CollectiveCall)])
    for call in filter(lambda event: isinstance(event, CollectiveCall), calls):
        _judge_bytes(call)
    named = [_with_size_of(call, sizes, want) for call in calls]
    counts = Counter((call.kind, call.elements) for call in named
                     if isinstance(call, CollectiveCall))
    _judge_counts(counts, want)
    judge_gathered_alone(named, want, f"rank {dist.get_rank()}", "Free a block after its forward, "
                         "and call one all-gather ahead of the one that computes.")
    _judge_prefetch(named, want)


def _unpadded() -> tuple[int, int]:
    """Elements of a block and of the root, without padding."""
    model = strategy_checks.make_model()
    blocks = models.blocks(model)
    in_blocks = models.count_trainable(blocks)
    return in_blocks // len(blocks), models.count_trainable(model) - in_blocks


def _as_reduce_scatter(event):
    # An all-to-all and a local sum is a reduce-scatter, too: 03's collectives do that on gloo.
    is_one = isinstance(event, CollectiveCall) and event.kind == "all_to_all"
    return replace(event, kind="reduce_scatter") if is_one else event


def _with_size_of(event, sizes, want):
    """The call with the elements of FSDP2's padded unit, where it carries a complete unit; padding
    may be between none and a tenth more than FSDP2's."""
    if isinstance(event, Mark):
        return event if event.call is None else replace(event, call=_with_size_of(
            event.call, sizes, want))
    if event.elements:
        for unit, least in sizes.items():
            most = getattr(want, unit)
            if least <= event.elements <= 1.1 * most:
                return replace(event, elements=most)
    return event


def _judge_bytes(call):
    # bf16 halves what is gathered; a sum of many ranks in bf16 loses what is small.
    if call.bytes != BYTES[call.kind] * call.elements:
        raise Wrong(f"rank {dist.get_rank()}: {call.kind} carries "
                    f"{call.bytes // call.elements} bytes for each element, not "
                    f"{BYTES[call.kind]}", "Cast to bf16 before the all-gather." if call.kind
                    == "all_gather" else "Cast to fp32 before the reduce-scatter.",
                    code="wrong_traffic_dtype")


def _judge_counts(counts, want):
    rank, blocks = f"rank {dist.get_rank()}", strategy_checks.LAYERS
    for kind in ("all_gather", "reduce_scatter"):
        total = sum(n for (one, _), n in counts.items() if one == kind)
        whole = counts[kind, want.block] + counts[kind, want.root]
        # One call carries all parameters of a unit: one for each parameter costs its price 12
        # times a block; one for the whole model has everything in memory at once.
        if whole < total:
            raise Wrong(f"{rank}: {counted(total - whole, kind)} of a step "
                        f"{'carry' if total - whole > 1 else 'carries'} something else than the "
                        "parameters of one block, or of the root",
                        "Pack what belongs to one unit into one buffer.", code="wrong_units")
        # Blocks: gathered for forward and for backward, reduced once. The root may stay whole.
        each, root = (2, (1, 2)) if kind == "all_gather" else (1, (1,))
        if counts[kind, want.block] != each * blocks or counts[kind, want.root] not in root:
            raise Wrong(f"{rank}: {kind} is called {counts[kind, want.block]} times for {blocks} "
                        f"blocks and {counts[kind, want.root]} times for the root; "
                        f"{each * blocks} and {' or '.join(map(str, root))} are needed",
                        _count_hint(counts[kind, want.root]), code="wrong_traffic")


def _count_hint(roots) -> str:
    if not roots:
        return ("What is not freed after backward is still gathered in the next forward, with the "
                "numbers from before the step.")
    return ("A block is freed after forward and gathered again for backward, unless it is in "
            "flight already; its gradients leave once.")


def _judge_prefetch(events, want):
    rank = f"rank {dist.get_rank()}"
    begins = next(place for place, event in enumerate(events) if isinstance(event, Mark)
                  and event.what == "backward begins")
    gathers, waited, computed = [], 0, 0
    for event in events[begins:]:
        if isinstance(event, CollectiveCall) and event.kind == "all_gather":
            gathers += [event] * (event.elements == want.block)
        elif isinstance(event, Mark) and event.what == "wait all_gather":
            waited += event.call.elements == want.block
        elif isinstance(event, Mark) and event.what == "gradients":
            computed += 1
            last = computed == strategy_checks.LAYERS
            # The gather that is called before these gradients are computed can hide behind them.
            if len(gathers) < computed + (not last):
                raise Wrong(f"{rank}: in backward, when block number {computed} from the end "
                            "computes its gradients, the next one's all-gather has not been "
                            "called", "Before a unit's backward: gather it, then start the one "
                            "that came before it in forward.", code="not_prefetched")
            # Called and waited for at once, it hides nothing.
            if not last and (waited > computed or not gathers[computed].asynchronous):
                raise Wrong(f"{rank}: in backward, the all-gather of the block after next is "
                            "waited for before this block computes: nothing is sent meanwhile",
                            "start calls it with async_op=True, and only gather waits.",
                            code="waits_too_early")

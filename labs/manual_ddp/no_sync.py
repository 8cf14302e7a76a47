"""Exercise 2.8: gradients that accumulate before they are synchronized."""

import contextlib
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from labs.checks.guesses import guessed
from labs.checks.on_ranks import BATCH, close, gradients, on_ranks, raise_on_all_ranks
from labs.checks.reference import Step
from labs.checks.verdicts import Wrong, check, shows
from labs.checks.waits import WaitTraffic
from labs.faults.delayed_rank import delay_rank
from labs.manual_ddp import variants
from labs.manual_ddp.api_hints import API_HINTS
from labs.manual_ddp.edge_cases import (
    ALL_BUT_RANK_0,
    CAPS,
    EVERY_RANK,
    NESTED_CAP,
    NO_RANK,
    ONLY_RANK_0,
    WORLD_SIZES,
    NestedModel,
    UseAll,
)
from labs.manual_ddp.gradients import judge_gradients, mean_and_alone, reference_model
from labs.meters.traffic import Traffic
from labs.pictures.bars import Bar, bars
from labs.pictures.marks import format_number
from labs.pictures.picture import Picture
from labs.training import data
from labs.training.models import EdgeCaseModel
from labs.training.presets import Preset
from labs.words import counted
from labs.workers.launcher import launch

_PUT_BACK = "What stands in `finally` runs however the block ends; put back what you found."
# Which ranks use the optional layers in each micro-batch; outside of no_sync is the last one only.
_CASES = ((EdgeCaseModel, CAPS[0], [EVERY_RANK] * 3), (EdgeCaseModel, CAPS[0], [EVERY_RANK] * 2),
          (NestedModel, NESTED_CAP, [EVERY_RANK, ALL_BUT_RANK_0]),
          (EdgeCaseModel, CAPS[1], [EVERY_RANK, ALL_BUT_RANK_0, ONLY_RANK_0]),
          (NestedModel, NESTED_CAP, [ALL_BUT_RANK_0, NO_RANK]))


@check("2.8", hints=API_HINTS | {
    "not an iterator": "no_sync must `yield` once, where the block runs.",
    "generator didn't yield": "no_sync must `yield` once, where the block runs.",
    "generator didn't stop": "no_sync must `yield` once only.",
    "context manager": "Decorate no_sync with @contextlib.contextmanager.",
    "has no attribute 'no_sync'": "Define no_sync(self) in the class."})
def check_no_sync(wrap):
    """In wrap(model, cap_bytes).no_sync() backward communicates nothing; the next backward outside
    synchronizes all that was accumulated. However the block is left, self.synchronize is then what
    it was before."""
    def work():
        made = {}
        for make, cap, uses in _CASES:  # one model twice: a flag that was not put back shows then
            if (make, cap) not in made:
                model = make(seed=0)
                made[make, cap] = model, wrap(model, cap)
            _accumulate(*made[make, cap], make, uses)
        model, module = made[EdgeCaseModel, CAPS[0]]
        _raise_inside(module)
        _nest(module)

    on_ranks(work, world_sizes=WORLD_SIZES)
    return "no_sync communicates nothing; the next backward averages all that was accumulated"


def _accumulate(model: nn.Module, module: nn.Module, make: Callable, uses: Sequence[UseAll]):
    """One backward for each micro-batch, all but the last inside no_sync, from no gradients on."""
    reference, mean, alone = reference_model(make), {}, [{} for _ in range(dist.get_world_size())]

    def backward(step):
        reference.differentiate(step)
        step_mean, step_alone = mean_and_alone(reference)
        # Gradients add up over the micro-batches, so the wanted ones do too.
        for sums, found in zip((mean, *alone), (step_mean, *step_alone), strict=True):
            sums.update({name: sums.get(name, 0) + g for name, g in found.items()})
        if step is last:
            delay_rank(dist.get_world_size() - 1, WORLD_SIZES[0])
        with WaitTraffic() as traffic:
            module(**step.inputs()).loss.backward()
            # now: once the ranks have met, late ones have arrived; and inside, where reading a
            # functional collective's result counts as its wait
            got = gradients(model)
        return traffic, got

    *inside, last = (Step(batch, use_all) for batch, use_all in
                     zip(data.xy_batches(len(uses), BATCH), uses, strict=True))
    # Entered and left by hand, so that the traffic of each is recorded by itself.
    block = contextlib.ExitStack()
    with Traffic() as traffic:
        block.enter_context(module.no_sync())
    raise_on_all_ranks(_judge_silent, traffic, "entering no_sync", "sync_on_entering")
    for number, step in enumerate(inside, 1):
        raise_on_all_ranks(_judge_inside, *backward(step), module, alone[dist.get_rank()], number)
    with Traffic() as traffic:
        block.close()
    # an average on leaving, and another in the next backward, is what accumulation was to save
    raise_on_all_ranks(_judge_silent, traffic, "leaving no_sync", "sync_on_leaving")
    traffic, got = backward(last)
    raise_on_all_ranks(_judge_synchronized, traffic,
                       "after no_sync, backward still communicates nothing", _PUT_BACK,
                       "silent_after_no_sync")
    # what was accumulated inside must be averaged too, not only the last backward's part, and also
    # where the last backward did not use a parameter
    raise_on_all_ranks(judge_gradients, model, mean, alone, "after no_sync, ", traffic, got)
    model.zero_grad()


def _judge_silent(traffic, when, code):
    if traffic.calls:
        raise Wrong(f"{when} calls {counted(len(traffic.calls), 'collective')}",
                    "Only the next backward outside communicates.", code=code)


def _judge_inside(traffic, got, module, own, number):
    # a synchronization in each backward gives right numbers at several times the traffic
    if traffic.calls:
        flag = "self.synchronize is still True, and "
        is_up = getattr(module, "synchronize", False) is True
        raise Wrong(f"inside no_sync, {flag * is_up}{counted(len(traffic.calls), 'collective')} "
                    f"{'was' if len(traffic.calls) == 1 else 'were'} called in backward",
                    "Set self.synchronize to False before the `yield`.", code="sync_inside_no_sync")
    for name in own:
        if not close(got[name], own[name]):
            raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: inside no_sync its gradient "
                        f"is not the sum of this rank's own after {number} backward passes",
                        "Inside no_sync, gradients accumulate locally: neither averaged nor lost.",
                        code="not_accumulated")


def _judge_synchronized(traffic, sentence, hint, code):
    if not traffic.calls:
        raise Wrong(sentence, hint, code=code)


def _raise_inside(module):
    """Leaves no_sync by an exception, as an interrupted cell does."""
    try:
        with module.no_sync():
            raise KeyError("raised in the block by the check")
    except KeyError:
        is_kept_back = False
    else:
        # Only a no_sync that swallows the exception comes here.
        is_kept_back = True
    # the loop must learn of the error: it would train on as if nothing had happened
    raise_on_all_ranks(_judge_raised, is_kept_back)
    # the module must not stay silent for good
    raise_on_all_ranks(_judge_synchronized, _backward(module), "an exception inside no_sync left "
                       "the flag down: nothing communicates any more", _PUT_BACK,
                       "silent_after_exception")


def _judge_raised(is_kept_back):
    if is_kept_back:
        raise Wrong("an exception inside no_sync does not reach the code around it",
                    "Use try and finally, without except.", code="exception_swallowed")


def _nest(module):
    """A block inside of a block, as when a function that accumulates calls another."""
    with module.no_sync():
        with module.no_sync():
            pass
        traffic = _backward(module)
    # the inner block must put back what it found, not what there usually is
    raise_on_all_ranks(_judge_silent, traffic, "inside no_sync, after an inner no_sync has ended, "
                       "backward", "inner_block_ends_outer")
    raise_on_all_ranks(_judge_synchronized, _backward(module),
                       "after nested blocks, backward still communicates nothing", _PUT_BACK,
                       "silent_after_nested_blocks")


def _backward(module) -> Traffic:
    """The traffic of one backward."""
    [batch] = data.xy_batches(1, BATCH)
    with Traffic() as traffic:
        module(**Step(batch, EVERY_RANK).inputs()).loss.backward()
    return traffic


@shows("2.8")
def show_accumulation(wrap: Callable, preset: Preset, parts: int = 4) -> Picture:
    """Draws the all-reduces of a step of `parts` micro-batches, with and without no_sync, the
    numbers that the buckets predict, and the guess."""
    calls, buckets = launch(variants.count_all_reduces, wrap, preset, parts,
                            ranks=preset.ranks, quiet=True)[0]
    each, once = calls
    return bars([Bar("averaged after each micro-batch", each, parts * buckets),
                 Bar("no_sync around all but the last", once, buckets, guessed("2.8"))],
                "calls", f"of all_reduce in a step of {parts} micro-batches",
                lesson=f"With no_sync a step has {format_number(each / once)} times fewer "
                       "all-reduces" if each > once > 0 else "no_sync saves no all-reduces here")

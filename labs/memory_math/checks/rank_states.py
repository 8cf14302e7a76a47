"""Exercise 1.7: what ranks really hold."""

import functools

from labs.exercises.numbers import Cause, judge_number, require_numbers, require_signature
from labs.exercises.verdicts import check
from labs.memory_math.checks import STATES
from labs.memory_math.scaffold import RankMemory, measure_strategies
from labs.training.presets import preset
from labs.workers import cuda, devices

HELD = (*STATES, "buffers")
STEP_COUNTER = 4  # bytes: AdamW counts its steps in one fp32 number for each tensor


@check("1.7")
def check_rank_states(rank_states):
    """Four numbers for plain, DDP and FSDP2, against ranks that really train."""
    require_signature(rank_states, ("count", "strategy", "ranks"))
    for held in rank_memories():
        returned = rank_states(held.count, held.strategy, held.ranks)
        for name, got in zip(HELD, require_numbers(returned, HELD, held.name), strict=True):
            _check_category(name, got, held)
    if devices.gpus():
        return "what ranks hold after backward, except for what blocks have more than their tensors"
    return ("to the byte what ranks hold after backward, except for AdamW's step counters "
            f"({STEP_COUNTER * held.tensors} bytes)")


def rank_memories() -> list[RankMemory]:
    """What ranks hold that train a small GPT-2: plain on one rank, under DDP on 3 and 2, under
    FSDP2 on 4 and 2. On the check's device: the CPU is exact and quick."""
    return _rank_memories(devices.gpus())


@functools.cache
def _rank_memories(gpus) -> list[RankMemory]:
    small = preset("laptop", ranks=1, layers=2, hidden=32, heads=4, context=16, batch=2)
    # 2 ranks come last: there a half may be a rank's share, 16 bits, or N/2 copies. All sizes
    # divide by 4.
    jobs = ((("plain",), 1), (("DDP",), 3), (("FSDP2",), 4), (("DDP", "FSDP2"), 2))
    return [held for strategies, ranks in jobs
            for held in measure_strategies(strategies, small, ranks)]


def _check_category(name, got, held):
    real = held.after_backward.by_name()[name]
    # Two things are not the student's to count: AdamW's step counters, which are state, and the few
    # bytes that DDP or FSDP2 keep in addition to their buckets. And a GPU's blocks are larger than
    # the tensors in them: two moments, so two tensors for each of the model's.
    spare = {"optimizer state": STEP_COUNTER * held.tensors,
             "buffers": 0.02 * 4 * held.count}.get(name, 0)
    spare += 2 * cuda.BLOCK * held.tensors if devices.gpus() else 0
    if abs(got - real) <= spare and (name != "optimizer state" or got <= real):
        return
    judge_number(got, real, _causes(name, held), f"{held.name}, {name}", "bytes",
                 "fp32 and AdamW: 4 + 4 + 8 bytes per parameter; who divides, and who copies?",
                 source="a rank holds")


def _causes(name, held) -> list[Cause]:
    count, ranks, sharded = held.count, held.ranks, held.strategy == "FSDP2"
    buffers, state = name == "buffers", name == "optimizer state"
    whole = count * (8 if state else 4)
    return [
        Cause("nothing_counted", 0, "there are some", {
                  "buffers": "DDP copies all gradients into its buckets.",
                  "optimizer state": "AdamW keeps two moments.",
                  "gradients": "Backward leaves one number for each parameter."}.get(name, "")),
        Cause("no_such_copy", whole, "there is no such copy here" if buffers else "not divided",
              "FSDP divides parameters, gradients and optimizer state; only DDP has buckets."),
        Cause("divided_ranks", whole / ranks, "divided by the ranks, and DDP divides nothing",
              "DDP copies the model."),
        Cause("counted_in_elements", count, "counted in elements", "4 bytes each."),
        *([Cause("one_moment", 4 * count, "AdamW keeps two moments", "8 bytes.")] if state else []),
        Cause("divided_by_2", whole / 2, f"divided by 2, not by {ranks}", "Use `ranks`.")
        if sharded else
        Cause("in_16_bits", whole / 2, "as in 16 bits; this model is fp32", "4 bytes each.")]

"""Exercise 1.7: what ranks really hold."""

import functools

from labs.exercises.verdicts import check
from labs.memory_math import formula_feedback as feedback
from labs.memory_math.checks import STATES
from labs.memory_math.formula_feedback import Cause
from labs.memory_math.scaffold import RankMemory, measure_strategies
from labs.training.presets import preset

HELD = (*STATES, "buffers")
STEP_COUNTER = 4  # bytes: AdamW counts its steps in one fp32 number for each tensor


@check("1.7")
def check_rank_states(rank_states):
    """Four numbers for plain, DDP and FSDP2, against ranks that really train."""
    feedback.require_signature(rank_states, ("count", "strategy", "ranks"))
    for held in rank_memories():
        returned = rank_states(held.count, held.strategy, held.ranks)
        returned = feedback.finite_numbers(returned, HELD, held.name)
        for name, got in zip(HELD, returned, strict=True):
            _check_category(name, got, held)
    return ("to the byte what ranks hold after backward, except for AdamW's step counters "
            f"({STEP_COUNTER * held.tensors} bytes)")


@functools.cache
def rank_memories() -> list[RankMemory]:
    """What ranks hold that train a small GPT-2: plain, under DDP, and under FSDP2 on 2 and 4 ranks.
    On the CPU, where it is exact and quick."""
    small = preset("laptop", ranks=1, layers=2, hidden=32, heads=4, context=16, batch=2)
    jobs = ((("plain",), 1), (("DDP", "FSDP2"), 2), (("FSDP2",), 4))  # all sizes divide by 4
    return [held for strategies, ranks in jobs
            for held in measure_strategies(strategies, small, ranks, device="cpu")]


def _check_category(name, got, held):
    real = held.after_backward.by_name()[name]
    # Two things are not the student's to count: AdamW's step counters, which are state, and the few
    # bytes that DDP or FSDP2 keep in addition to their buckets.
    spare = {"optimizer state": STEP_COUNTER * held.tensors,
             "buffers": 0.02 * 4 * held.count}.get(name, 0)
    if abs(got - real) <= spare and (name != "optimizer state" or got <= real):
        return
    raise feedback.wrong_value(
        f"{held.name}: a rank holds {real:,.0f} bytes of {name}, you say {got:,.10g}", got, real,
        _causes(name, real, held.count, held.ranks),
        "fp32 and AdamW: 4 + 4 + 8 bytes per parameter; who divides, and who copies?")


def _causes(name, real, count, ranks) -> list[Cause]:
    whole = count * (8 if name == "optimizer state" else 4)
    buffers = name == "buffers"

    def returning(value, description, hint):
        return Cause.returning(value, real, description, hint)

    return [
        returning(0, "there are some", "DDP copies all gradients into its buckets." if buffers
                  else "See what AdamW keeps."),
        returning(whole, "there is no such copy here" if buffers else "not divided",
                  "FSDP divides parameters, gradients and optimizer state; only DDP has buckets."),
        returning(whole / ranks, "divided by the ranks, and DDP divides nothing",
                  "DDP copies the model."),
        returning(count, "counted in elements", "4 bytes each."),
        *([returning(4 * count, "AdamW keeps two moments", "8 bytes.")]
          if name == "optimizer state" else []),
        returning(whole / 2, "as in 16 bits; this model is fp32", "4 bytes each.")]

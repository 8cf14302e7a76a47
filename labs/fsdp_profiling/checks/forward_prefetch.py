"""Exercise 5.7: each unit prefetches the next ones in forward."""

from collections.abc import Callable, Sequence
from functools import partial

from labs.exercises.numbers import require_signature
from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling.checks.no_prefetch import SLIPS, of, raise_if_gathered_twice, record_with
from labs.meters import trace_units

HINTS = {part: hint.replace("backward", "forward") for part, hint in SLIPS.items()}


@check("5.7", device=None, hints=HINTS)
def check_forward_prefetch(forward_prefetch):
    """forward_prefetch(blocks, ahead): while a unit computes in forward, the next `ahead` ones have
    been issued, and no more; backward stays as it is."""
    require_signature(forward_prefetch, ("blocks", "ahead"))
    for ahead, traces in zip((1, 2), record_with(
            *(partial(with_ahead, forward_prefetch, ahead) for ahead in (1, 2))), strict=True):
        for trace in traces:
            what = f"{of(trace)}, ahead={ahead}"
            raise_if_gathered_twice(trace)
            _judge_forward(trace, ahead, what)
            _judge_backward(trace, what)
    return ("in forward the next one, or two, are gathered while a unit computes, and no more; "
            "backward is as before, as the traces say")


def with_ahead(forward_prefetch: Callable, ahead: int, blocks: Sequence) -> None:
    """Calls forward_prefetch(blocks, ahead)."""
    forward_prefetch(blocks, ahead)


def _judge_forward(trace, ahead, what):
    order = [unit for unit in trace_units.units(trace) if unit != trace_units.ROOT]
    events = trace_units.order_of_events(trace, "forward")
    names = sorted(order, key=lambda unit: int(unit.rsplit(".", 1)[-1]))
    for number, unit in enumerate(names):
        issued = [name for event, name in events[:events.index(("done", unit))]
                  if event == "gather"]
        wanted = names[:number + 1 + ahead]
        # Too late: the link is idle while the unit computes. Too early: every unit more is memory,
        # and the sum is what the exercise promises.
        if missing := [name for name in wanted if name not in issued]:
            raise Wrong(f"{what}: in forward, the all-gather of {missing[0]} is issued only when "
                        f"{unit} is done",
                        "Each block names the `ahead` blocks that come after it, in a list; those "
                        "at the end name fewer.", code="not_prefetched")
        if extra := [name for name in issued if name not in wanted]:
            raise Wrong(f"{what}: in forward, the all-gather of {extra[0]} is issued before {unit} "
                        f"is done: {len(issued) - number - 1} blocks ahead",
                        "Each block more that is gathered ahead takes its memory.",
                        code="too_far_ahead")


def _judge_backward(trace, what):
    order = [unit for unit in reversed(trace_units.units(trace)) if unit != trace_units.ROOT]
    order.sort(key=lambda unit: -int(unit.rsplit(".", 1)[-1]))
    # Who sets backward's prefetch too turns the default off, or goes further ahead, without
    # noticing.
    want = [("gather", order[0])]
    for unit, following in zip(order, [*order[1:], None], strict=True):
        want += [("gather", following)] if following else []
        want.append(("done", unit))
    got = trace_units.order_of_events(trace, "backward")
    if got != want:
        late = trace_units.late_units(trace)
        raise Wrong(f"{what}: in backward, "
                    + (f"{', '.join(late)} is late now" if late else
                       "the units are gathered in another order than FSDP's default"),
                    "Leave backward's prefetch alone: FSDP's default does it.",
                    code="backward_changed")

"""Exercise 5.6: backward without prefetch."""

from collections.abc import Callable

from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.meters import trace_units
from labs.meters.trace import Trace
from labs.pictures import timelines
from labs.pictures.picture import Picture

SLIPS = {
    "object is not iterable": "It takes a list: unit.set_modules_to_backward_prefetch([other]).",
    "Expects FSDPModule but got": "The list holds the units themselves, as they stand in blocks: "
                                  "unit.set_modules_to_backward_prefetch([other])."}
LAYERS = (2, 5)  # of the models that are recorded: an answer must not count on a number of blocks


@check("5.6", device=None, hints=SLIPS)
def check_no_prefetch(no_prefetch):
    """no_prefetch(blocks): afterwards each unit is gathered only when backward arrives at it."""
    [traces] = record_with(no_prefetch)
    for trace in traces:
        late, order = trace_units.late_units(trace), trace_units.units(trace)
        # The first unit of backward has none before it that could prefetch it. Every other one must
        # be late: plain FSDP2, or an empty list, leaves the default prefetch on.
        want = [unit for unit in reversed(order) if unit != trace_units.ROOT][1:]
        prefetched = [unit for unit in want if unit not in late]
        if prefetched:
            raise Wrong(f"{of(trace)}: the all-gather of {', '.join(prefetched)} is still issued "
                        "ahead, before the gradients of the unit before it are complete",
                        "An empty list means FSDP's default, which prefetches. Name what is there "
                        "already while a unit computes.", code="still_prefetched")
        require_gathered_once(trace)
        # Backward's prefetch is all that the exercise changes: what forward does differently would
        # be taken for the price of backward's.
        if trace_units.order_of_events(trace, "forward") != one_by_one(order):
            raise Wrong(f"{of(trace)}: forward gathers its units in another order than without "
                        "your function", "Leave forward as it is: set_modules_to_backward_prefetch "
                        "is enough.", code="forward_changed")
    return ("without prefetch every unit is gathered late, on every rank of models with "
            f"{' and '.join(map(str, LAYERS))} blocks, as the trace says")


def record_with(*configures: Callable) -> list[list[Trace]]:
    """Records small models, of LAYERS blocks, whose units a function has been applied to; returns
    the traces by function."""
    sizes = [recorded_runs.preset(layers=layers, hidden=64, heads=2, context=32, batch=2)
             for layers in LAYERS]
    configs = [recorded_runs.RunConfig(one, f"for a check of prefetch {number} {one.layers}",
                                   configure=configure)
               for number, configure in enumerate(configures) for one in sizes]
    runs = iter(recorded_runs.record_runs(configs, share=None))  # only the calls' order is judged
    return [[trace for _ in sizes for trace in next(runs)] for _ in configures]


def of(trace: Trace) -> str:
    """Returns how messages call a trace of `record_with`."""
    return f"rank {trace.rank}, {len(trace_units.units(trace)) - 1} blocks"


def one_by_one(order: list[str]) -> list[tuple[str, str]]:
    """Returns the events of a phase in which each unit is gathered when it is needed."""
    return [event for unit in order if unit != trace_units.ROOT
            for event in (("gather", unit), ("done", unit))]


def require_gathered_once(trace: Trace) -> None:
    """Raises Wrong where a unit is gathered more than once in one phase: who prefetches a unit that
    was used and freed pays for a collective that nothing needs."""
    seen = set()
    for one in trace.of("all_gather"):
        owner = trace_units.owner(trace, one)
        if (owner.unit, owner.phase) in seen:
            raise Wrong(f"{of(trace)}: {owner.unit} is gathered twice in {owner.phase}",
                        "A unit that has been used is freed, so prefetching it gathers it again, "
                        "for nothing. A unit itself is there while it computes.",
                        code="gathered_again")
        seen.add((owner.unit, owner.phase))


@shows("Prefetch")
def show_prefetch(*runs: RecordedRun) -> Picture:
    """Draws rank 0's step of each recording, one below the other."""
    recorded_runs.require_usual({one.config.name: one for one in runs})
    return timelines.by_rank({one.config.name: [one[0]] for one in runs})

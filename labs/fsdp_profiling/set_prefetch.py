"""Exercise 5.6: how many units each unit prefetches, in forward and in backward."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from labs.checks.comparison import compare
from labs.checks.gpu_notes import below, speeds
from labs.checks.guesses import guessed
from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.recorded_runs import RecordedRun, RunConfig, configured_fsdp2
from labs.meters import trace_units
from labs.meters.trace import Trace
from labs.pictures import palette, timelines
from labs.pictures.bars import Bar, bars
from labs.pictures.marks import answered
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.training.presets import Preset

SLIPS = {
    "object is not iterable": "It takes a list: unit.set_modules_to_backward_prefetch([other]).",
    "Expects FSDPModule but got": "The list holds the units themselves, as they stand in blocks: "
                                  "unit.set_modules_to_backward_prefetch([other])."}
LAYERS = (2, 5)  # of the models that are recorded: an answer must not count on a number of blocks
# (forward, backward), one at a time away from the defaults, (0, 1): what one does wrong is not
# taken for the other's fault.
CASES = ((0, 0), (1, 1), (2, 1), (0, 2))


@check("5.6", device=None, hints=SLIPS)
def check_set_prefetch(set_prefetch):
    """set_prefetch(blocks, forward, backward): while a unit computes, the next `forward` ones in
    forward, or `backward` ones in backward, have been issued, and no more."""
    require_signature(set_prefetch, ("blocks", "forward", "backward"))
    recorded = record_with(*(partial(with_counts, set_prefetch, *case) for case in CASES))
    for (forward, backward), traces in zip(CASES, recorded, strict=True):
        for trace in traces:
            what = f"{of(trace)}, forward={forward}, backward={backward}"
            if backward == 0:
                _require_late(trace, what)
            _require_gathered_once(trace, what)
            _judge_forward(trace, forward, what)
            if backward:
                _judge_backward(trace, backward, what)
    return (f"on every rank of models with {' and '.join(map(str, LAYERS))} blocks, none, one or "
            "two units are gathered while another one computes, as the traces say")


def with_counts(set_prefetch: Callable, forward: int, backward: int, blocks: Sequence) -> None:
    """Calls set_prefetch(blocks, forward, backward)."""
    set_prefetch(blocks, forward, backward)


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


def _require_late(trace, what):
    late, order = trace_units.late_units(trace), trace_units.units(trace)
    # Invariant: the first unit of backward has none before it that could prefetch it, and every
    # other one is late. Catches plain FSDP2, and an empty list, which leaves the default on.
    want = [unit for unit in reversed(order) if unit != trace_units.ROOT][1:]
    prefetched = [unit for unit in want if unit not in late]
    if prefetched:
        raise Wrong(f"{what}: the all-gather of {', '.join(prefetched)} is still issued "
                    "ahead, before the gradients of the unit before it are complete",
                    "An empty list means FSDP's default, which prefetches. Name what is there "
                    "already while a unit computes.", code="still_prefetched")


def _require_gathered_once(trace, what):
    """Raises Wrong where a unit is gathered more than once in one phase: who prefetches a unit that
    was used and freed pays for a collective that nothing needs."""
    seen = set()
    for one in trace.of("all_gather"):
        owner = trace_units.owner(trace, one)
        if (owner.unit, owner.phase) in seen:
            raise Wrong(f"{what}: {owner.unit} is gathered twice in {owner.phase}",
                        "A unit that has been used is freed, so prefetching it gathers it again, "
                        "for nothing. A unit itself is there while it computes.",
                        code="gathered_again")
        seen.add((owner.unit, owner.phase))


def _judge_forward(trace, ahead, what):
    names, events = _names(trace), trace_units.order_of_events(trace, "forward")
    # Backward's prefetch is all that forward=0 may change: what forward does differently would be
    # taken for the price of backward's.
    if ahead == 0 and events != _expected(names, 0):
        raise Wrong(f"{what}: forward gathers its units in another order than without your "
                    "function", "With forward=0 the list of set_modules_to_forward_prefetch is "
                    "empty, or it is not called.", code="forward_changed")
    for number, unit in enumerate(names):
        issued = [name for event, name in events[:events.index(("done", unit))]
                  if event == "gather"]
        wanted = names[:number + 1 + ahead]
        # Too late: the link is idle while the unit computes. Too early: every unit more is memory,
        # and the sum is what the exercise promises.
        if missing := [name for name in wanted if name not in issued]:
            raise Wrong(f"{what}: in forward, the all-gather of {missing[0]} is issued only when "
                        f"{unit} is done",
                        "Each block names the `forward` blocks that come after it, in a list; "
                        "those at the end name fewer.", code="not_prefetched")
        if extra := [name for name in issued if name not in wanted]:
            raise Wrong(f"{what}: in forward, the all-gather of {extra[0]} is issued before {unit} "
                        f"is done: {len(issued) - number - 1} blocks ahead",
                        "Each block more that is gathered ahead takes its memory.",
                        code="too_far_ahead")


def _judge_backward(trace, ahead, what):
    got, want = (trace_units.order_of_events(trace, "backward"),
                 _expected(_names(trace)[::-1], ahead))
    if got == want:
        return
    # With one unit ahead, which is FSDP's default: catches a function that turns backward's
    # prefetch off, or goes further ahead, while it sets forward's.
    if ahead == 1:
        late = trace_units.late_units(trace)
        raise Wrong(f"{what}: in backward, "
                    + (f"{', '.join(late)} is late now" if late else
                       "the units are gathered in another order than FSDP's default"),
                    "backward=1 is FSDP's default: each unit prefetches the one before it.",
                    code="backward_changed")
    for unit in _names(trace)[::-1]:
        issued, wanted = ({name for event, name in events[:events.index(("done", unit))]
                           if event == "gather"} for events in (got, want))
        if missing := wanted - issued:
            raise Wrong(f"{what}: in backward, the all-gather of {min(missing)} is issued only "
                        f"when {unit} is done", "Each block names the `backward` blocks that "
                        "stand before it; those at the begin name fewer.",
                        code="not_prefetched")
        if extra := issued - wanted:
            raise Wrong(f"{what}: in backward, the all-gather of {min(extra)} is issued before "
                        f"{unit} is done: more than {ahead} blocks ahead",
                        "Each block more that is gathered ahead takes its memory.",
                        code="too_far_ahead")
    raise Wrong(f"{what}: in backward, the right units are gathered ahead, but the one that is "
                "needed last is issued first", "The list is in the order of issue: the block just "
                "before comes first.", code="wrong_order")


def _names(trace) -> list[str]:
    """The blocks in forward order."""
    # By number: events may be in another order, and as texts layer 10 comes before layer 2.
    return sorted((unit for unit in trace_units.units(trace) if unit != trace_units.ROOT),
                  key=lambda unit: int(unit.rsplit(".", 1)[-1]))


def _expected(names, ahead) -> list[tuple[str, str]]:
    """The events of a phase in which each unit, in this order, prefetches the next `ahead`."""
    events, gathered = [], 0
    for number, unit in enumerate(names):
        # A unit before which none prefetches it is gathered when it is needed.
        events += [("gather", name) for name in names[gathered:number + 1 + ahead]]
        gathered = max(gathered, min(len(names), number + 1 + ahead))
        events.append(("done", unit))
    return events


@shows("Prefetch")
def show_prefetch(*runs: RecordedRun) -> Picture:
    """Draws rank 0's step of each recording, one below the other."""
    recorded_runs.require_usual({one.config.name: one for one in runs})
    return timelines.by_rank({one.config.name: [one[0]] for one in runs})


@shows("5.6")
def show_ahead(preset: Preset, set_prefetch: Callable,
               ahead: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Returns a table of recorded steps by how many units forward prefetches ahead: how long the
    ranks wait in forward, and how much memory the gathered blocks take."""
    runs = recorded_runs.record_clearly([
        RunConfig(preset, f"{number} ahead",
                  configure=partial(with_counts, set_prefetch, number, 1))
        for number in ahead], recorded_runs.FEW_ROUNDS, recorded_runs.RECORDINGS,
        measure=trace_units.exposed_in_forward)
    recorded_runs.require_usual({run.config.name: run for run in runs})
    return ahead_table(ahead, [1e3 * fmean(map(trace_units.exposed_in_forward, run))
                               for run in runs],
                       [trace_units.most_gathered(run[0], "forward") for run in runs],
                       [max(one.bytes for one in run[0].of("all_gather")) for run in runs])


def ahead_table(ahead: Sequence[int], exposed: Sequence[float], gathered: Sequence[int],
                sizes: Sequence[int]) -> Table:
    """Returns the table of `show_ahead` with a note that says what each row saved.

    exposed: milliseconds in forward; gathered: blocks at once; sizes: bytes of a block.
    """
    rows = [(number, f"{ms:.1f}", blocks, f"{blocks * size / 1e6:.2f}")
            for number, ms, blocks, size in zip(ahead, exposed, gathered, sizes, strict=True)]
    taken = [blocks * size / 1e6 for blocks, size in zip(gathered, sizes, strict=True)]
    said = [_saving(*one) for one in zip(ahead[1:], exposed, exposed[1:], taken, taken[1:],
                                         strict=False)]
    return Table("recorded steps, by blocks that are gathered ahead",
                 ("ahead", "ms exposed in forward, mean of the ranks",
                  "blocks gathered at once", "MB of them"), rows, note=" ".join(said))


def _saving(number, before, after, mb_before, mb_after) -> str:
    """What one more block ahead saves. Less than a tenth of the wait is no more than noise."""
    saved = before - after
    words = (f"saves {saved:.1f} ms" if saved > 0.1 * before else
             f"saves nothing ({-saved:+.1f} ms)" if saved > -0.1 * before else
             f"costs {-saved:.1f} ms")
    return f"{number} ahead {words} and takes {mb_after - mb_before:.2f} MB more."


@shows("Throughput by prefetch")
def show_throughput(preset: Preset, configures: dict[str, Callable | None],
                    rounds: int = 7) -> Picture:
    """Draws the throughput of each way to prefetch, measured in turns without the profiler, on a
    link chosen as that of the recordings, and the guess.

    configures: name -> function that sets the prefetch of the units, or None.
    """
    strategies = {name: partial(configured_fsdp2, configure=configure)
                  for name, configure in configures.items()}
    default = next(iter(strategies))
    found = compare(strategies, preset, measure_memory=False, rounds=rounds,
                    link=(recorded_runs.BYTES, recorded_runs.LATENCY), quiet=True)
    usual = found.tokens_per_second(default)
    rows = [Bar(name, found.tokens_per_second(name), colour=palette.PLAIN,
                guessed=_guessed_rate(usual, number)) for number, name in enumerate(strategies)]
    changes = [f"{row.name} {100 * (row.measured / usual - 1):+z.0f} %" for row in rows[1:]]
    return bars(rows, "tokens/s", f"of all ranks together (median of {rounds} turns)",
                note=below(speeds(found)), lesson=f"Against {default}: {', '.join(changes)}",
                answer=answered(guessed("5.6"), 100 * (1 - rows[1].measured / usual), "% slower")
                if len(rows) > 1 else None)


def _guessed_rate(default_rate, number) -> float | None:
    """The guess is about the second row: the loss without prefetch, in percent."""
    loss = guessed("5.6")
    return default_rate * (1 - loss / 100) if number == 1 and loss is not None else None

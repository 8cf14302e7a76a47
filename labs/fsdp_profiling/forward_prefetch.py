"""Exercise 5.7: each unit prefetches the next ones in forward."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from labs.checks.comparison import compare
from labs.checks.gpu_notes import below, speeds
from labs.checks.guesses import guessed
from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.no_prefetch import SLIPS, of, record_with, require_gathered_once
from labs.fsdp_profiling.recorded_runs import RunConfig, configured_fsdp2
from labs.meters import trace_units
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.training.presets import Preset

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
            require_gathered_once(trace)
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
    # By number: events may be in another order, and as texts layer 10 comes before layer 2.
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
    # FSDP's default: each unit is gathered before the gradients of the one before it are complete.
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


@shows("5.7")
def show_ahead(preset: Preset, forward_prefetch: Callable,
               ahead: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Returns a table of recorded steps by how many units forward prefetches ahead: how long the
    ranks wait in forward, and how much memory the gathered blocks take."""
    runs = recorded_runs.record_clearly([
        RunConfig(preset, f"{number} ahead",
                  configure=partial(with_ahead, forward_prefetch, number))
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
    return bars(rows, "tokens/s", f"of all ranks together (median of {rounds} turns)\n"
                f"against {default}: {', '.join(changes)}", note=below(speeds(found)))


def _guessed_rate(default_rate, number) -> float | None:
    """The guess is about the second row: the loss without prefetch, in percent."""
    loss = guessed("5.6")
    return default_rate * (1 - loss / 100) if number == 1 and loss is not None else None

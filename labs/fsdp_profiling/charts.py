"""The pictures of notebook 05, each drawn from recorded steps. What runs on ranks stands in other
modules: a rank that imported this one would import matplotlib.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from labs.exercises.comparison import compare
from labs.exercises.gpu_notes import below, speeds
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.fsdp_profiling import recording, step_model
from labs.fsdp_profiling.checks.diagnose import judged_runs
from labs.fsdp_profiling.checks.forward_prefetch import with_ahead
from labs.fsdp_profiling.recording import RecordedRun, RunConfig, configured_fsdp2
from labs.fsdp_profiling.scaffold import SlowRuns
from labs.meters import trace_units
from labs.meters.trace import KINDS, Collective, Trace, subtract, total_seconds, union
from labs.meters.trace_events import kernel_name
from labs.pictures import palette, phases, timelines, widgets
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.training.presets import Preset
from labs.workers.slow_link import link_bytes


@shows("One recorded step")
def show_timeline(run: RecordedRun) -> Picture:
    """Draws every rank's step: what it computes, unit by unit, and which collectives are in
    flight."""
    recording.require_usual({run.config.name: run})
    return timelines.by_rank({run.config.name: list(run)})


@shows("5.1")
def show_shares(run: RecordedRun, communication_share: Callable) -> Picture:
    """Draws the share of the step in each kind of collective, by rank, and the guess."""
    recording.require_usual({run.config.name: run})
    rows = []
    for trace in run:
        shares = communication_share(trace)
        rows += [Bar(f"rank {trace.rank}, {kind.replace('_', '-')}", share)
                 for kind, share in shares.items()]
        both = total_seconds(union(trace.of(*shares))) / trace.seconds  # a moment counts once
        rows.append(Bar(f"rank {trace.rank}, both", both, guessed=guessed("5.1")))
    return bars(rows, "", "of the recorded step")


@shows("5.2")
def show_seconds(run: RecordedRun) -> Table:
    """Returns a table of milliseconds by rank and kind: total, exposed, overlapped."""
    recording.require_usual({run.config.name: run})
    rows = []
    for trace in run:
        for kind in [kind for kind in KINDS if trace.of(kind)]:
            times = trace.seconds_of(kind)
            rows.append((trace.rank, kind, len(trace.of(kind)),
                         *(f"{1e3 * times[part]:.1f}" for part in
                           ("total", "exposed", "overlapped"))))
    return Table("milliseconds of the recorded step", ("rank", "kind", "calls", "total", "exposed",
                                                       "overlapped"), rows, left=1)


@shows("5.3")
def show_all_gathers(run: RecordedRun, attribute: Callable) -> Table:
    """Returns a table of rank 0's all-gathers, as `attribute` explains them, in order of issue."""
    recording.require_usual({run.config.name: run})
    trace = run[0]
    rows = [(number, *attribute(trace, one), f"{1e3 * one.issued:.1f}",
             f"{1e3 * (one.end - one.issued):.1f}", f"{one.bytes / 1e6:.2f}")
            for number, one in enumerate(trace.of("all_gather"))]
    return Table("all-gathers of rank 0", ("#", "unit", "phase", "issued at, ms",
                                           "complete after, ms", "MB"), rows, left=2)


@shows("5.4")
def show_non_fsdp_collectives(run: RecordedRun, call_site: Callable) -> Table:
    """Returns a table of rank 0's collectives that serve no unit of FSDP, with their callers."""
    recording.require_usual({run.config.name: run})
    trace, rows, rate = run[0], [], bytes_per_second(run)
    for one in non_fsdp_collectives(trace):
        alone = link_bytes(one.kind, one.bytes, len(run)) / rate
        rows.append((one.kind, one.bytes, f"{1e3 * alone:.1g}", f"{1e3 * waited(trace, one):.2g}",
                     call_site(one).split("/labs/")[-1]))
    return Table("collectives of rank 0 that are not FSDP's",
                 ("kind", "bytes", "ms for its bytes", "ms that the rank waits",
                  "call site: file(line of its def): function"), rows)


def bytes_per_second(run: RecordedRun) -> float:
    """Returns what the slow link carries; on GPUs, where the real link is used, the most that it
    carried during one of the run's all-gathers or reduce-scatters."""
    if run.link:
        return run.link.bytes_per_second
    return max(link_bytes(one.kind, one.bytes, len(run)) / one.seconds for trace in run
               for one in trace.of("all_gather", "reduce_scatter") if one.seconds)


def waited(trace: Trace, collective: Collective) -> float:
    """Returns the seconds of a collective in which the rank does not compute."""
    return total_seconds(subtract(union([collective]), trace.compute))


def non_fsdp_collectives(trace: Trace) -> list[Collective]:
    """Returns the collectives that serve no unit of FSDP."""
    return [one for one in trace.collectives if not trace_units.owner(trace, one).unit]


@shows("Prefetch")
def show_prefetch(*runs: RecordedRun) -> Picture:
    """Draws rank 0's step of each recording, one below the other."""
    recording.require_usual({one.config.name: one for one in runs})
    return timelines.by_rank({one.config.name: [one[0]] for one in runs})


@shows("5.7")
def show_ahead(preset: Preset, forward_prefetch: Callable,
               ahead: tuple[int, ...] = (0, 1, 2)) -> Table:
    """Returns a table of recorded steps by how many units forward prefetches ahead: how long the
    ranks wait in forward, and how much memory the gathered blocks take."""
    runs = recording.record_runs([
        RunConfig(preset, f"{number} ahead",
                  configure=partial(with_ahead, forward_prefetch, number))
        for number in ahead], recording.RECORDINGS, measure=trace_units.exposed_in_forward)
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
                    link=(recording.BYTES, recording.LATENCY), quiet=True)
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


@shows("Six slow runs")
def explore_slow_runs(slow_runs: SlowRuns) -> widgets.Controls:
    """Draws the slow run chosen from a menu; without a live kernel, the first one."""
    recording.require_usual({f"run {letter}": run for letter, run in slow_runs.runs.items()})

    def picture(run):
        return timelines.by_rank({f"run {run}": list(slow_runs.runs[run])})

    letters = sorted(slow_runs.runs)
    choice = widgets.Choice("run", "run", [(letter, letter) for letter in letters], letters[0],
                            "menu")
    return widgets.Controls([choice], picture)


@shows("5.8")
def show_diagnoses(slow_runs: SlowRuns, diagnose: Callable) -> Table:
    """Returns a table of what `diagnose` says of each run, and its true cause."""
    rows = [(letter, cause, _described(evidence), *rest) for letter, cause, evidence, *rest in
            judged_runs(diagnose, slow_runs)]
    return Table("diagnoses", ("run", "diagnosed", "evidence", "cause", ""), rows, left=3)


def _described(evidence) -> str:
    if not hasattr(evidence, "seconds"):
        return str(evidence)
    size = f", {evidence.bytes / 1e6:.1f} MB" if getattr(evidence, "bytes", 0) else ""
    return (f"{kernel_name(evidence.name.split('#')[0])} at {1e3 * evidence.begin:.0f} ms, for "
            f"{1e3 * evidence.seconds:.1f} ms{size}")


@shows("A slow rank")
def show_waiting(slow_runs: SlowRuns) -> Picture:
    """Draws all ranks of the run with the slow rank."""
    [letter] = [letter for letter, cause in slow_runs.answers.items() if cause == "slow rank"]
    recording.require_usual({f"run {letter}": slow_runs.runs[letter]})
    return timelines.by_rank({f"run {letter}": list(slow_runs.runs[letter])})


@shows("5.9")
def show_links(collective_seconds: Callable, ranks: int = 8, tokens: int = 4096) -> Picture:
    """Draws the modelled step of Llama-2-7B on each link and in each order."""
    step = step_model.llama_7b(tokens)
    title = f"Llama-2-7B on {ranks} A100s, {tokens:,} tokens per rank"
    return phases.modelled_phases({title: step_model.on_links(step, collective_seconds, ranks)},
                                  {title: step.seconds_by_phase}, ranks)

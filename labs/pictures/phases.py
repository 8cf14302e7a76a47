"""Where the time of a step goes, as stacked bars: computing by phase, and exposed communication."""

from collections.abc import Callable
from statistics import fmean

from matplotlib.patches import Patch

from labs.meters.metrics import Metric, name_of
from labs.meters.trace import Trace
from labs.pictures.marks import (
    HEADLINE,
    NOTE_LINE,
    LabelledBar,
    Unit,
    bar_chart,
    draw_legend,
    format_number,
    headline,
    note_below,
)
from labs.pictures.picture import Picture

TIMES = (Unit("seconds"), Unit("milliseconds", 1e-3), Unit("microseconds", 1e-6))


def communication_ratio(communication: float, phases: dict[str, float]) -> float:
    """All communication, overlapped or exposed, over computing: phases without "exposed"."""
    return communication / (sum(phases.values()) - phases["exposed"])


def communication_shares(communication: float, phases: dict[str, float]) -> tuple[float, float]:
    """(communication over computing, the share of communication that is not exposed)."""
    return (communication_ratio(communication, phases),
            (communication - phases["exposed"]) / communication)


def step_phases(by_variant: dict[str, list[Trace]], note: str = "",
                shares: Callable[[float, dict[str, float]], tuple[float, float]] | None = None
                ) -> Picture:
    """Draws the milliseconds of each phase and of exposed communication, mean over the ranks, and
    the shares: the ratio of communication to computing, and how much of it is overlapped. note:
    lines below. shares: of the seconds of all communication and those of the phases by name."""
    shares = shares or communication_shares
    bars, words, metrics = [], [], []
    for variant, traces in by_variant.items():
        seconds = {name: fmean(trace.seconds_by_phase[name] for trace in traces)
                   for name in traces[0].seconds_by_phase}
        communication = fmean(trace.seconds_of()["total"] for trace in traces)
        parts = {name: 1e3 * value for name, value in seconds.items()}
        label = "no communication"  # of which no part could be overlapped
        if communication:
            ratio, overlapped = shares(communication, seconds)
            label = f"communication / computing = {ratio:.2f}, {overlapped:.0%} overlapped"
        bars.append(LabelledBar(parts, label))
        words.append(f"{variant}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts.items())
                     + f"; {bars[-1].label}")
        metrics += [Metric(name_of(variant, name), ms, "ms") for name, ms in parts.items()]
    figure, _ = bar_chart(list(by_variant), [bars],
                          ["milliseconds of a recorded step, mean over ranks"],
                          1.2 + HEADLINE + 0.5 * len(bars) + NOTE_LINE * len(note.splitlines()),
                          size=9.5)
    lesson = _least_exposed(by_variant, bars)
    headline(figure, lesson)
    note_below(figure, note)
    draw_legend(figure, bars)
    return Picture(figure, "\n".join([lesson, *words, *note.splitlines()]), data=by_variant,
                   metrics=metrics)


def _least_exposed(names, bars) -> str:
    """The variants with the most and the least exposed communication."""
    exposed = {name: bar.parts["exposed"] for name, bar in zip(names, bars, strict=True)}
    most, least = (choose(exposed, key=exposed.get) for choose in (max, min))
    if len(exposed) == 1:
        return f"Exposed communication: {format_number(exposed[most])} ms"
    return (f"Exposed communication: {most} {format_number(exposed[most])} ms, {least} "
            f"{format_number(exposed[least])} ms")


def modelled_phases(panels: dict[str, list[tuple[str, str, float, float]]],
                    phases: dict[str, dict[str, float]], ranks: int, note: str = "") -> Picture:
    """Draws modelled steps on several links, one panel for each speed of computing.

    panels: title -> rows (link, order of the collectives, seconds computing, and exposed).
    phases: title -> the seconds of computing in forward, backward and optimizer. note: lines below.
    """
    rows = next(iter(panels.values()))
    links = [link for link, _, _, _ in rows]
    names = [f"{link}, {order}" for link, order, _, _ in rows]
    longest = [max(computing + exposed for *_, computing, exposed in rows)
               for rows in panels.values()]
    units = [next((unit for unit in TIMES if most >= unit.size), TIMES[-1]) for most in longest]
    bars = [[_bar(row, phases[title], unit) for row in rows]
            for (title, rows), unit in zip(panels.items(), units, strict=True)]
    figure, axes = bar_chart(names, bars, [f"{unit.name} (exposed share)" for unit in units],
                             1.25 + HEADLINE + 0.3 * len(rows)
                             + NOTE_LINE * len(note.splitlines()), size=9,
                             places=[row + 0.35 * len(set(links[:row + 1])) - 0.35
                                     for row in range(len(rows))])  # a space between links
    lesson = _exposed_by_link(rows)
    headline(figure, lesson)
    for ax, title in zip(axes, panels, strict=True):
        ax.set_title(title, fontsize=10, loc="left")
    note_below(figure, note)
    draw_legend(figure, sum(bars, []),
                Patch(color="none", label=f"a model for {ranks} ranks, not a measurement"))
    words = [_words(title, rows) for title, rows in panels.items()]
    return Picture(figure, "\n".join([lesson, *words, *note.splitlines()]), data=panels)


def _exposed_by_link(rows) -> str:
    """The share of the step that is exposed on each link, in the order of its first row."""
    first = rows[0][1]
    shares = ", ".join(f"{link} {exposed / (computing + exposed):.0%}"
                       for link, order, computing, exposed in rows if order == first)
    return f"Exposed share of the step, {first}: {shares}"


def _bar(row, phases, unit) -> LabelledBar:
    _, _, computing, exposed = row
    total = computing + exposed
    return LabelledBar({name: seconds / unit.size for name, seconds in
                        {**phases, "exposed": exposed}.items()},
                       f"{unit.number(total)} ({exposed / total:.0%})")


def _words(title, rows) -> str:
    lines = [f"  {link}, {order}: {1e3 * (computing + exposed):.4g} ms, "
             f"{exposed / (computing + exposed):.0%} exposed"
             for link, order, computing, exposed in rows]
    return "\n".join([f"{title}, modelled:", *lines])

"""Where the time of a step went: phases, communication, how much of it is exposed, and the buckets
in flight. Times are read in seconds and drawn in milliseconds."""

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.meters.trace import PHASES, Trace, subtract, union
from labs.pictures import palette
from labs.pictures.marks import draw_stack, legend_above, name_rows
from labs.pictures.picture import WIDTH, Picture, canvas

MS = 1e3


def step_timelines(by_variant: dict[str, list[Trace]]) -> Picture:
    """Draws one step of each variant on every rank (a trace for each). A rank has two lanes: the
    phases, with a gap where it only waits, and below them communication, red where exposed."""
    rows = [(variant, rank, trace) for variant, traces in by_variant.items()
            for rank, trace in enumerate(traces)]
    figure, ax = canvas(WIDTH, 1.1 + 0.52 * len(rows) + 0.3 * len(by_variant))
    y, ticks = 0.0, []
    for number, (variant, rank, trace) in enumerate(rows):
        if rank == 0:
            y += 0.55 if number else 0.25
            ax.text(0, y - 0.14, _headline(variant, by_variant[variant]), fontsize=10, va="bottom",
                    weight="bold")
        _lanes(ax, y, trace)
        ticks.append((y + 0.4, f"rank {rank}"))
        y += 1.0
    ax.set_yticks(*zip(*ticks, strict=True))
    for label, (_, rank, _) in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_color(palette.rank(rank))
    ax.set_ylim(y + 0.05, -0.35)
    ax.set_xlim(0, max(trace.seconds for _, _, trace in rows) * MS * 1.01)
    ax.set_xlabel("milliseconds since the step began (recording makes it longer)")
    legend_above(figure, _patches(forward="forward", backward="backward", optimizer="optimizer",
                                  communication="communication, overlapped",
                                  exposed="communication, exposed"))
    return Picture(figure, "\n".join(_headline(*item) for item in by_variant.items()),
                   data=by_variant)


def _headline(variant, traces) -> str:
    exposed, total = (_mean(trace.seconds_of()[part] for trace in traces) * MS
                      for part in ("exposed", "total"))
    return f"{variant}: {total:.1f} ms of communication, {exposed:.1f} ms exposed"


def _lanes(ax, y, trace):
    for phase in PHASES:
        for interval in subtract(union(trace.labelled(f"labs::{phase}")), trace.exposed):
            _bar(ax, y + 0.2, interval, phase, height=0.38)
    for one in trace.collectives:
        _bar(ax, y + 0.62, (one.begin, one.end), "communication", height=0.34, edgecolor="white",
             linewidth=0.6)
    for interval in trace.exposed:
        _bar(ax, y + 0.62, interval, "exposed", height=0.34)


def _bar(ax, y, interval, phase, **style):
    begin, end = interval
    ax.barh(y, (end - begin) * MS, left=begin * MS, color=palette.PHASES[phase], **style)


def _patches(**labels) -> list[Patch]:
    return [Patch(color=palette.PHASES[phase], label=label) for phase, label in labels.items()]


def buckets_in_flight(trace: Trace, buckets: list[list[str]]) -> Picture:
    """Draws one rank's backward, a row for each bucket: when its gradients were ready (dots), when
    it left (the bar's begin) and arrived (its end). buckets: the parameter names in each."""
    ready = {span.name.removeprefix("labs::ready ").removeprefix("transformer."): span.begin
             for span in trace.labelled("labs::ready")}
    [backward] = trace.labelled("labs::backward")
    rows = [(names, one.issued, one.end)
            for names, one in zip(buckets, trace.collectives, strict=False)]
    figure, ax = canvas(WIDTH, 1.3 + 0.42 * len(buckets))
    computed = max((*ready.values(), *(left for _, left, _ in rows)), default=backward.end)
    _shade(ax, "backward", "backward computes", backward.begin, computed)
    _shade(ax, "exposed", "waits", computed, backward.end)
    for row, (names, left, arrived) in enumerate(rows):
        times = [ready[name] * MS for name in names if name in ready]
        _bar(ax, row, (left, arrived), "communication", height=0.5)
        ax.plot(times, [row] * len(times), "o", markersize=5.5, color=palette.PHASES["backward"],
                markeredgecolor="white", markeredgewidth=0.7)
        ax.vlines(left * MS, row - 0.36, row + 0.36, color=palette.INK, linewidth=2, zorder=1.9)
    name_rows(ax, [_bucket_label(number, names) for number, names in enumerate(buckets)])
    ax.tick_params(axis="y", labelsize=9)
    ax.set_ylim(len(buckets) - 0.4, -0.9)
    ax.set_xlabel("milliseconds since the step began")
    legend_above(figure, [Line2D([], [], marker="o", linestyle="none", label="a gradient is ready",
                                 color=palette.PHASES["backward"]),
                          Line2D([], [], marker="|", linestyle="none", markersize=12,
                                 markeredgewidth=2, color=palette.INK, label="its bucket leaves"),
                          *_patches(communication="and is in flight")])
    words = (f"{len(rows)} buckets; the first leaves {(rows[0][1] - backward.begin) * MS:.1f} ms "
             f"into a backward of {backward.seconds * MS:.1f} ms")
    return Picture(figure, words, data={"rows": rows, "backward": backward})


def _shade(ax, phase, label, begin, end):
    ax.axvspan(begin * MS, end * MS, color=palette.PHASES[phase], alpha=0.1, linewidth=0)
    ax.text(begin * MS, -0.62, f" {label}", color=palette.PHASES[phase], fontsize=10)


def _bucket_label(number, names):
    return f"bucket {number}: {names[0]}" + (f" … +{len(names) - 1}" if len(names) > 1 else "")


def step_phases(by_variant: dict[str, list[Trace]]) -> Picture:
    """Draws the seconds of each phase and of exposed communication as stacked bars, mean over the
    ranks, and the ratio of all communication, overlapped or exposed, to computing."""
    figure, ax = canvas(WIDTH, 1.2 + 0.5 * len(by_variant))
    words, longest = [], 0.0
    for row, (variant, traces) in enumerate(by_variant.items()):
        parts = {name: _mean(trace.seconds_by_phase[name] for trace in traces) * MS
                 for name in traces[0].seconds_by_phase}
        end = draw_stack(ax, row, ((milliseconds, {"color": palette.PHASES[name]})
                                   for name, milliseconds in parts.items()))
        communication = _mean(trace.seconds_of()["total"] for trace in traces) * MS
        ratio = f"communication / computing = {communication / (end - parts['exposed']):.2f}"
        ax.text(end, row, f"  {ratio}", va="center", fontsize=9.5)
        longest = max(longest, end)
        words.append(f"{variant}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts.items())
                     + f"; {ratio}")
    name_rows(ax, list(by_variant), above=0.5)
    ax.set_xlim(0, 1.6 * longest)
    ax.set_xlabel("milliseconds of a recorded step, mean over ranks")
    legend_above(figure, _patches(forward="forward", backward="backward", exposed="exposed",
                                  optimizer="optimizer"))
    return Picture(figure, "\n".join(words), data=by_variant)


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)

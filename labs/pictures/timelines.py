"""Where the time of a step went, drawn: phases, communication, what of it is exposed, flights."""

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.meters.trace import PHASES, subtract, union
from labs.pictures import palette
from labs.pictures.marks import draw_stack, legend_above, name_rows
from labs.pictures.picture import WIDTH, Picture, canvas

MS = 1e3


def by_rank(timelines: dict) -> Picture:
    """timelines: variant -> one timeline per rank. Two lanes a rank: the phases of the step, with a
    gap where the rank only waits, and communication below, red where it is waited for."""
    rows = [(variant, rank, timeline) for variant, group in timelines.items()
            for rank, timeline in enumerate(group)]
    figure, ax = canvas(WIDTH, 1.1 + 0.52 * len(rows) + 0.3 * len(timelines))
    y, ticks = 0.0, []
    for number, (variant, rank, timeline) in enumerate(rows):
        if rank == 0:
            y += 0.55 if number else 0.25
            ax.text(0, y - 0.14, _headline(variant, timelines[variant]), fontsize=10, va="bottom",
                    weight="bold")
        _lanes(ax, y, timeline)
        ticks.append((y + 0.4, f"rank {rank}"))
        y += 1.0
    ax.set_yticks([place for place, _ in ticks], [words for _, words in ticks])
    for label, (_, rank, _) in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_color(palette.rank(rank))
    ax.set_ylim(y + 0.05, -0.35)
    ax.set_xlim(0, max(timeline.seconds for _, _, timeline in rows) * MS * 1.01)
    ax.set_xlabel("milliseconds since the step began (recording takes time, too)")
    legend_above(figure, [Patch(color=palette.PHASES[name], label=words) for name, words in
                          (("forward", "forward"), ("backward", "backward"),
                           ("optimizer", "optimizer"), ("communication", "communication, hidden"),
                           ("exposed", "communication, exposed"))])
    return Picture(figure, "\n".join(_headline(v, group) for v, group in timelines.items()),
                   data=timelines)


def _headline(variant, group) -> str:
    exposed, total = (_mean(trace.seconds_of()[part] for trace in group) * MS
                      for part in ("exposed", "total"))
    return f"{variant}: {total:.1f} ms of communication, {exposed:.1f} ms exposed"


def _lanes(ax, y, timeline):
    for phase in PHASES:
        for begin, end in subtract(union(timeline.labelled(f"labs::{phase}")), timeline.exposed):
            ax.barh(y + 0.2, (end - begin) * MS, left=begin * MS, height=0.38,
                    color=palette.PHASES[phase])
    for span in timeline.collectives:
        ax.barh(y + 0.62, span.seconds * MS, left=span.begin * MS, height=0.34,
                color=palette.PHASES["communication"], edgecolor="white", linewidth=0.6)
    for begin, end in timeline.exposed:
        ax.barh(y + 0.62, (end - begin) * MS, left=begin * MS, height=0.34,
                color=palette.PHASES["exposed"])


def flights(timeline, buckets: list) -> Picture:
    """timeline: one rank's. buckets: the parameter names in each. When each gradient got ready
    (dots, in its bucket's row), when the bucket left (the bar's begin) and arrived (its end)."""
    ready = {span.name.removeprefix("labs::ready ").removeprefix("transformer."): span.begin * MS
             for span in timeline.labelled("labs::ready")}
    [backward] = timeline.labelled("labs::backward")
    sent = [one.issued * MS for one in timeline.collectives]
    arrived = [one.end * MS for one in timeline.collectives]
    figure, ax = canvas(WIDTH, 1.3 + 0.42 * len(buckets))
    computed = max((*ready.values(), *sent), default=backward.end * MS)
    _spans(ax, {"backward": (backward.begin * MS, computed),
                "exposed": (computed, backward.end * MS)})
    rows = list(zip(buckets, sent, arrived, strict=False))
    for row, (names, left, arrived) in enumerate(rows):
        times = [ready[name] for name in names if name in ready]
        ax.barh(row, arrived - left, left=left, height=0.5, color=palette.PHASES["communication"])
        ax.plot(times, [row] * len(times), "o", markersize=5.5, color=palette.PHASES["backward"],
                markeredgecolor="white", markeredgewidth=0.7)
        ax.vlines(left, row - 0.36, row + 0.36, color=palette.INK, linewidth=2, zorder=1.9)
    ax.set_yticks(range(len(buckets)), [_bucket_label(n, names) for n, names in enumerate(buckets)])
    ax.tick_params(axis="y", labelcolor=palette.INK, labelsize=9)
    ax.set_ylim(len(buckets) - 0.4, -0.9)
    ax.set_xlabel("milliseconds since the step began")
    first = rows[0][1] - backward.begin * MS
    words = (f"{len(rows)} buckets; the first leaves {first:.1f} ms into a backward of "
             f"{backward.seconds * MS:.1f} ms")
    legend_above(figure, [Line2D([], [], marker="o", linestyle="none", label="a gradient is ready",
                                 color=palette.PHASES["backward"]),
                          Line2D([], [], marker="|", linestyle="none", markersize=12,
                                 markeredgewidth=2, color=palette.INK, label="its bucket leaves"),
                          Patch(color=palette.PHASES["communication"], label="and is under way")])
    return Picture(figure, words, data={"rows": rows, "backward": backward})


def _spans(ax, spans):
    """The parts of backward: while it computes, and while it only waits for what is under way."""
    names = {"backward": "backward computes", "exposed": "waits"}
    for phase, (begin, end) in spans.items():
        ax.axvspan(begin, end, color=palette.PHASES[phase], alpha=0.1, linewidth=0)
        ax.text(begin, -0.62, f" {names[phase]}", color=palette.PHASES[phase], fontsize=10)


def _bucket_label(number, names):
    return f"bucket {number}: {names[0]}" + (f" … +{len(names) - 1}" if len(names) > 1 else "")


def shares(by_variant: dict) -> Picture:
    """by_variant: variant -> one timeline per rank. Stacked bars of the mean step, and how much
    communication there was for the computing, hidden or not."""
    figure, ax = canvas(WIDTH, 1.2 + 0.5 * len(by_variant))
    words, longest = [], 0.0
    for row, (variant, group) in enumerate(by_variant.items()):
        parts = {name: _mean(trace.seconds_by_phase[name] for trace in group) * MS
                 for name in group[0].seconds_by_phase}
        left = draw_stack(ax, row, ((milliseconds, {"color": palette.PHASES[name]})
                                    for name, milliseconds in parts.items()))
        communication = _mean(trace.seconds_of()["total"] for trace in group) * MS
        ratio = f"communication / computing = {communication / (left - parts['exposed']):.2f}"
        ax.text(left, row, f"  {ratio}", va="center", fontsize=9.5)
        longest = max(longest, left)
        words.append(f"{variant}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts.items())
                     + f"; {ratio}")
    name_rows(ax, list(by_variant), above=0.5)
    ax.set_xlim(0, 1.6 * longest)
    ax.set_xlabel("milliseconds of a recorded step, mean over ranks")
    legend_above(figure, [Patch(color=palette.PHASES[name], label=name) for name in
                          ("forward", "backward", "exposed", "optimizer")])
    return Picture(figure, "\n".join(words), data=by_variant)


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)

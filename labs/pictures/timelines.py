"""Where the time of a step went, drawn: phases, communication, what of it is exposed, flights."""

from matplotlib.patches import Patch

from labs.pictures import palette
from labs.pictures.picture import Picture, canvas

MS = 1e3


def by_rank(timelines: dict) -> Picture:
    """timelines: variant -> one timeline per rank. Two lanes a rank: the phases of the step, and
    communication below, red where the rank computed nothing meanwhile."""
    rows = [(variant, rank, timeline) for variant, group in timelines.items()
            for rank, timeline in enumerate(group)]
    figure, ax = canvas(9, 1.1 + 0.52 * len(rows) + 0.3 * len(timelines))
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
    ax.set_xlabel("milliseconds since the step began (recorded: slower than an unrecorded step)")
    figure.legend(handles=[Patch(color=palette.PHASES[name], label=words) for name, words in
                           (("forward", "forward"), ("backward", "backward"),
                            ("optimizer", "optimizer"),
                            ("communication", "communication, hidden behind computing"),
                            ("exposed", "exposed"))],
                  loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return Picture(figure, "\n".join(_headline(v, group) for v, group in timelines.items()),
                   data=timelines)


def _headline(variant, group) -> str:
    exposed, total = (sum(getattr(t, name) for t in group) / len(group) * MS
                      for name in ("exposed_seconds", "communication"))
    return f"{variant}: {total:.1f} ms of communication, {exposed:.1f} ms exposed"


def _lanes(ax, y, timeline):
    for phase in ("forward", "backward", "optimizer"):
        for span in timeline.of(phase):
            ax.barh(y + 0.2, span.seconds * MS, left=span.begin * MS, height=0.38,
                    color=palette.PHASES[phase])
    for span in timeline.of("communication"):
        ax.barh(y + 0.62, span.seconds * MS, left=span.begin * MS, height=0.34,
                color=palette.PHASES["communication"], edgecolor="white", linewidth=0.6)
    for begin, end in timeline.exposed:
        ax.barh(y + 0.62, (end - begin) * MS, left=begin * MS, height=0.34,
                color=palette.PHASES["exposed"])


def flights(timeline, buckets: list) -> Picture:
    """timeline: one rank's. buckets: the parameter names in each. When each gradient got ready
    (dots, in its bucket's row), when the bucket left (the bar's begin) and arrived (its end)."""
    ready = {span.name.removeprefix("transformer."): span.begin * MS
             for span in timeline.of("ready")}
    [backward] = timeline.of("backward")
    sent = sorted(span.begin * MS for span in timeline.of("issued"))
    under_way = sorted((span.begin * MS, span.end * MS) for span in timeline.of("communication"))
    figure, ax = canvas(9, 1.3 + 0.42 * len(buckets))
    ax.axvspan(backward.begin * MS, backward.end * MS, color=palette.PHASES["backward"], alpha=0.08)
    rows = list(zip(buckets, sent, under_way, strict=False))
    for row, (names, left, (_, arrived)) in enumerate(rows):
        times = [ready[name] for name in names if name in ready]
        ax.barh(row, arrived - left, left=left, height=0.5, color=palette.PHASES["communication"])
        ax.plot(times, [row] * len(times), "o", markersize=4.5, color=palette.PHASES["backward"])
        ax.plot([left], [row], marker=">", markersize=8, color=palette.INK)
    ax.set_yticks(range(len(buckets)), [_bucket_label(n, names) for n, names in enumerate(buckets)])
    ax.tick_params(axis="y", labelcolor=palette.INK, labelsize=9)
    ax.set_ylim(len(buckets) - 0.4, -0.9)
    ax.set_xlabel("milliseconds since the step began")
    ax.text(backward.begin * MS, -0.62, " backward", color=palette.PHASES["backward"], fontsize=10)
    first = rows[0][1] - backward.begin * MS
    words = (f"{len(rows)} buckets; the first leaves {first:.1f} ms into a backward of "
             f"{backward.seconds * MS:.1f} ms")
    ax.set_title("• a gradient is ready    ▶ its bucket leaves    the bar ends when it has arrived",
                 fontsize=9.5, color=palette.MUTED, loc="left")
    return Picture(figure, words, data={"rows": rows, "backward": backward})


def _bucket_label(number, names):
    return f"bucket {number}: {names[0]}" + (f" … +{len(names) - 1}" if len(names) > 1 else "")


def shares(seconds: dict) -> Picture:
    """seconds: variant -> [forward, backward without exposed communication, exposed, optimizer,
    all communication], in seconds. Stacked bars, and the ratio of communication to computing."""
    names = ("forward", "backward", "exposed", "optimizer")
    figure, ax = canvas(9, 1.2 + 0.5 * len(seconds))
    lines = []
    for row, (variant, (*parts, communication)) in enumerate(seconds.items()):
        left = 0.0
        for name, part in zip(names, parts, strict=True):
            ax.barh(row, part * MS, left=left * MS, height=0.62, color=palette.PHASES[name])
            left += part
        ratio = communication / (left - parts[2])
        ax.text(left * MS, row, f"  communication / computing = {ratio:.2f}", va="center",
                fontsize=9.5)
        lines.append(f"{variant}: forward {parts[0] * MS:.1f} ms, backward {parts[1] * MS:.1f} ms, "
                     f"exposed {parts[2] * MS:.1f} ms; communication / computing = {ratio:.2f}")
    ax.set_yticks(range(len(seconds)), list(seconds))
    ax.tick_params(axis="y", labelcolor=palette.INK)
    ax.set_ylim(len(seconds) - 0.5, -0.5)
    ax.set_xlim(0, 1.4 * max(sum(parts[:4]) for parts in seconds.values()) * MS)
    ax.set_xlabel("milliseconds of a recorded step, mean over ranks")
    figure.legend(handles=[Patch(color=palette.PHASES[name], label=words) for name, words in
                           (("forward", "forward"), ("backward", "backward"),
                            ("exposed", "exposed communication"), ("optimizer", "optimizer"))],
                  loc="outside upper left", ncols=4, frameon=False)
    return Picture(figure, "\n".join(lines), data=seconds)

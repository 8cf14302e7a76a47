"""A modelled step on several links: what it computes, and what of its communication is exposed."""

from matplotlib.patches import Patch

from labs.meters.trace import PHASES
from labs.pictures import palette
from labs.pictures.marks import draw_stack, format_number, legend_above
from labs.pictures.picture import WIDTH, Picture, canvas


def modelled(panels: dict[str, list[tuple]], phases: dict[str, dict[str, float]],
             ranks: int) -> Picture:
    """Draws the modelled steps, one panel for each speed of computing.

    panels: title -> rows (link, order of the collectives, seconds computing, and exposed).
    phases: title -> the seconds of computing in forward, backward and optimizer.
    """
    rows = next(iter(panels.values()))
    figure, axes = canvas(WIDTH, 1.25 + 0.3 * len(rows), ncols=len(panels), sharey=True)
    links = [link for link, _, _, _ in rows]
    places = [row + 0.35 * len(set(links[:row + 1])) - 0.35 for row in range(len(rows))]
    for ax, (title, rows) in zip(axes, panels.items(), strict=True):
        _panel(ax, title, rows, phases[title], places)
    axes[0].set_yticks(places, [f"{link}, {order}" for link, order, _, _ in rows])
    axes[0].tick_params(axis="y", labelcolor=palette.INK, labelsize=9)
    axes[0].set_ylim(places[-1] + 0.6, -0.6)
    legend_above(figure, [*(Patch(color=palette.PHASES[name], label=name)
                            for name in (*PHASES, "exposed")),
                          Patch(color="none", label=f"a model for {ranks} ranks, "
                                                    "not a measurement")])
    return Picture(figure, "\n".join(_words(title, rows) for title, rows in panels.items()),
                   data=panels)


def _panel(ax, title, rows, phases, places):
    longest = max(computing + exposed for _, _, computing, exposed in rows)
    scale, unit = next((scale, unit) for scale, unit in (
        (1, "seconds"), (1e3, "milliseconds"), (1e6, "microseconds")) if longest * scale >= 1)
    for place, (_, _, computing, exposed) in zip(places, rows, strict=True):
        draw_stack(ax, place, ((seconds * scale, {"color": palette.PHASES[name]})
                               for name, seconds in {**phases, "exposed": exposed}.items()),
                   thickness=0.7)
        total = computing + exposed
        ax.text(total * scale, place, f" {format_number(total * scale)} ({exposed / total:.0%})",
                va="center", fontsize=9)
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(f"{unit} (exposed share)")
    ax.set_xlim(0, 1.35 * scale * longest)


def _words(title, rows) -> str:
    lines = [f"  {link}, {order}: {1e3 * (computing + exposed):.3g} ms, "
             f"{exposed / (computing + exposed):.0%} exposed"
             for link, order, computing, exposed in rows]
    return "\n".join([f"{title}, modelled:", *lines])

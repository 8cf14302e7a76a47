"""Whether several ways to train agree: gradients as strips of colour, losses over the steps."""

import torch
from matplotlib.ticker import MaxNLocator

from labs.meters.metrics import Metric, name_of
from labs.pictures import palette
from labs.pictures.marks import HEADLINE, headline, note_below
from labs.pictures.picture import WIDTH, Picture, canvas

SHOWN = 28  # values of each gradient that are drawn
ByParameter = list[tuple[str, torch.Tensor, torch.Tensor]]


def gradients_by_rank(by_rank: list[ByParameter]) -> Picture:
    """Draws the values of each gradient on each rank, before (left) and after (right) averaging:
    equal strips are equal gradients. by_rank[r]: (parameter name, gradient before, after)."""
    ranks, names = len(by_rank), [name for name, _, _ in by_rank[0]]
    figure, axes = canvas(WIDTH, 1.0 + HEADLINE + 0.5 * len(names), nrows=len(names),
                          ncols=2 * ranks + 1,
                          gridspec_kw={"width_ratios": [1] * ranks + [0.12] + [1] * ranks})
    same = all(torch.equal(one[row][2], by_rank[0][row][2])
               for one in by_rank for row in range(len(names)))
    lesson = (f"After averaging, {'all' if same else 'not all'} {ranks} ranks have the same "
              "gradients")
    headline(figure, lesson)
    note_below(figure, "Each parameter has a scale of its own, the same for all ranks.")
    for row, name in enumerate(names):
        before = [gradients[row][1] for gradients in by_rank]
        # One scale for all ranks of a parameter: equal numbers have equal colours.
        scale = max(gradient.abs().max().item() for gradient in before) or 1.0
        shown = _largest(before)
        for rank, gradients in enumerate(by_rank):
            for column, values in zip((rank, ranks + 1 + rank), gradients[row][1:], strict=True):
                _strip(axes[row, column], values, shown, scale)
        _name(axes[row, 0], name)
        axes[row, ranks].axis("off")
    for rank in range(ranks):
        for column, when in ((rank, "before"), (ranks + 1 + rank, "after")):
            axes[0, column].set_title(f"rank {rank} {when}", fontsize=9, weight="bold", pad=4,
                                      color=palette.readable(palette.rank(rank)))
    return Picture(figure, "\n".join([lesson, *(_norms(by_rank, row)
                                                for row in range(len(names)))]), data=by_rank)


def gradient_strips(named: dict[str, torch.Tensor], title: str = "") -> Picture:
    """Draws a strip for each gradient, all of one shape, beside it its difference from the first,
    and the scale of all strips. title: what is to be seen."""
    first, *_ = named.values()
    figure, axes = canvas(WIDTH, 1.65 + 0.5 * len(named), nrows=len(named), ncols=2)
    shown, scale, words = _largest([first]), first.abs().max().item(), []
    for (ax, beside), (name, values) in zip(axes, named.items(), strict=True):
        _strip(ax, values, shown, scale)
        _name(ax, name)
        error = relative_error(values, first)
        _strip(beside, values - first, shown, scale,
               "the reference" if values is first else "all differences are 0")
        if values is not first:
            words.append(f"{name}: {percent(error)} off, of the norm of the first")
    axes[0, 0].set_title(f"gradient: its {len(shown)} largest values", fontsize=9.5, loc="left")
    axes[0, 1].set_title("its difference from the first row", fontsize=9.5, loc="left")
    colours = figure.colorbar(axes[-1, 0].images[0], ax=axes, orientation="horizontal", aspect=60,
                              fraction=0.08, pad=0.06, ticks=[-scale, 0, scale])
    colours.ax.set_xticklabels([f"{-scale:.2f}", "0", f"{scale:.2f}"])
    colours.set_label("derivative of the loss, one scale for all strips", fontsize=9.5)
    colours.outline.set_visible(False)
    headline(figure, title)
    return Picture(figure, "\n".join([title, *words] if title else words), data=named)


def relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over the norm of the reference."""
    return ((values - reference).norm() / reference.norm()).item()


def percent(share: float) -> str:
    """A share in percent: 0.24 is 24 %, and 3e-8 is below 0.001 %."""
    return f"{100 * share:.2g} %" if share >= 1e-5 else "below 0.001 %"


def _largest(gradients):
    """The places of the values that are largest over all ranks, in their order."""
    # (elements,): the same places on all ranks, or strips of equal gradients would differ.
    size = sum(gradient.flatten().abs() for gradient in gradients)
    return size.topk(min(SHOWN, len(size))).indices.sort().values


def _name(ax, name):
    ax.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8, fontsize=9.5)


def _strip(ax, values, shown, scale, nothing="no gradient"):
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    if values.any():
        ax.imshow(values.flatten()[shown][None].numpy(), aspect="auto", cmap="RdBu",
                  vmin=-scale, vmax=scale, interpolation="nearest")
        return
    ax.text(0.5, 0.5, nothing, ha="center", va="center", fontsize=9, color=palette.MUTED,
            transform=ax.transAxes)
    ax.set_facecolor(palette.SURFACE)


def _norms(by_rank, row) -> str:
    before, after = (", ".join(f"{gradients[row][when].norm().item():.3f}" for gradients in by_rank)
                     for when in (1, 2))
    return f"{by_rank[0][row][0]}: norm by rank {before}  →  {after}"


def loss_curves(runs: dict[str, list[float]], difference: float) -> Picture:
    """Draws the loss of each step, by run: the first run broad and pale, the others on top of it.
    difference: the largest between two runs at the same step, which the title says."""
    figure, ax = canvas(WIDTH, 3.4)
    most = max(map(max, runs.values()))
    headline(figure, f"The losses of {len(runs)} runs differ by at most {difference:.1e} nats, "
                     f"{percent(difference / most)} of the first")
    for number, (name, values) in enumerate(runs.items()):
        style = {"linewidth": 7} if number == 0 else {"linewidth": 1.8}
        ax.plot(range(1, len(values) + 1), values, label=name, color=palette.RUNS[number], **style)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
    ax.set_xlabel("step")
    ax.set_ylabel("loss, nats per byte")
    ax.grid(axis="y", color=palette.GRID)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, loc="upper right")
    ends = ", ".join(f"{name}: {values[0]:.2f} → {values[-1]:.2f}" for name, values in runs.items())
    return Picture(figure, f"{ends}; largest difference {difference:.1e}", data=runs,
                   metrics=[Metric(name_of(name, "last loss"), values[-1], "nats per byte")
                            for name, values in runs.items()])

"""The gradients of every rank, before and after they are averaged."""

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture, canvas

SHOWN = 28  # values of each gradient that are drawn


def before_and_after(by_rank: list) -> Picture:
    """by_rank[r]: list of (parameter name, gradient before, gradient after) of rank r. Every strip
    shows the values of one gradient on one rank: equal strips are equal gradients."""
    ranks, names = len(by_rank), [name for name, _, _ in by_rank[0]]
    figure, axes = canvas(WIDTH, 0.75 + 0.5 * len(names), nrows=len(names), ncols=2 * ranks + 1,
                          gridspec_kw={"width_ratios": [1] * ranks + [0.12] + [1] * ranks})
    for row, name in enumerate(names):
        scale = max(gradients[row][1].abs().max().item() for gradients in by_rank) or 1.0
        shown = _shown([gradients[row][1] for gradients in by_rank])
        for rank, gradients in enumerate(by_rank):
            _, before, after = gradients[row]
            _strip(axes[row, rank], before, shown, scale)
            _strip(axes[row, ranks + 1 + rank], after, shown, scale)
        axes[row, 0].set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8, fontsize=9.5)
        axes[row, ranks].axis("off")
    for rank in range(ranks):
        for column, when in ((rank, "before"), (ranks + 1 + rank, "after")):
            axes[0, column].set_title(f"rank {rank} {when}", fontsize=10, weight="bold", pad=4,
                                      color=palette.rank(rank))
    return Picture(figure, _words(by_rank, names), data=by_rank)


def rows(named: dict) -> Picture:
    """named: name -> gradient, all of one shape. A strip each, and how far it is from the first."""
    first, *_ = named.values()
    figure, axes = canvas(WIDTH, 0.35 + 0.5 * len(named), nrows=len(named))
    shown, scale, words = _shown([first]), first.abs().max().item(), []
    for ax, (name, values) in zip(axes, named.items(), strict=True):
        _strip(ax, values, shown, scale)
        ax.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8, fontsize=9.5)
        distance = (values - first).abs().max().item()
        far = "" if values is first else f"largest difference {distance:.1e}"
        ax.set_title(far, fontsize=9, loc="right", pad=2, color=palette.MUTED)
        words.append(f"{name}: {far or f'norm {first.norm().item():.3f}'}")
    return Picture(figure, "\n".join(words), data=named)


def _shown(gradients):
    """Which values to draw: the largest over all ranks, in their order."""
    size = sum(gradient.flatten().abs() for gradient in gradients)
    return size.topk(min(SHOWN, len(size))).indices.sort().values


def _strip(ax, values, shown, scale):
    ax.set_xticks([])
    ax.set_yticks([])
    if not values.any():
        ax.text(0.5, 0.5, "no gradient", ha="center", va="center", fontsize=9,
                color=palette.MUTED, transform=ax.transAxes)
        ax.set_facecolor(palette.SURFACE)
        ax.spines["bottom"].set_visible(False)
        return
    ax.imshow(values.flatten()[shown][None].numpy(), aspect="auto", cmap="RdBu",
              vmin=-scale, vmax=scale, interpolation="nearest")
    for side in ax.spines.values():
        side.set_visible(False)


def _words(by_rank, names):
    lines = []
    for row, name in enumerate(names):
        before, after = (", ".join(f"{gradients[row][when].norm().item():.3f}"
                                   for gradients in by_rank) for when in (1, 2))
        lines.append(f"{name}: norm by rank {before}  →  {after}")
    return "\n".join(lines)

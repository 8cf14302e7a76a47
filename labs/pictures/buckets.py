"""A model's gradients, cut into buckets."""

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture, canvas


def blocks(buckets: list, cap: float) -> Picture:
    """buckets: lists of (parameter name, bytes), in the order in which they leave; cap in bytes.
    One bar, the model from its last layer to its first; every bucket has its colour."""
    total = sum(nbytes for bucket in buckets for _, nbytes in bucket)
    figure, ax = canvas(WIDTH, 1.9)
    left = 0.0
    for number, bucket in enumerate(buckets):
        began = left
        for _, nbytes in bucket:
            ax.barh(0, nbytes / 1e6, left=left / 1e6, height=0.5, linewidth=0.5,
                    color=palette.rank(number), edgecolor="white")
            left += nbytes
        _label(ax, number, bucket, began, left, total)
    ax.set_ylim(-0.6, 0.62)
    ax.set_yticks([])
    ax.set_xlim(0, total / 1e6)
    ax.set_xlabel("MB of gradients, from the last layer (left) to the first")
    words = (f"cap {cap / 1e6:g} MB: {len(buckets)} bucket{'s' * (len(buckets) != 1)}, so "
             f"{len(buckets)} all-reduce{'s' * (len(buckets) != 1)} per step")
    ax.set_title(words, loc="left", fontsize=11, weight="bold")
    return Picture(figure, words, data=buckets)


def _label(ax, number, bucket, began, end, total):
    share = (end - began) / total
    if share < 0.025:
        return
    name = f"bucket {number}" if share > 0.075 else f"{number}"
    ax.text((began + end) / 2e6, 0.32, name, ha="center", va="bottom", fontsize=9.5,
            weight="bold", color=palette.rank(number))
    if share < 0.065:
        return
    ax.text((began + end) / 2e6, -0.3, f"{sum(b for _, b in bucket) / 1e6:.2f} MB", ha="center",
            va="top", fontsize=9, color=palette.MUTED)

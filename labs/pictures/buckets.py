"""A model's gradients, cut into buckets."""

from labs.pictures import palette
from labs.pictures.picture import Picture, canvas


def blocks(buckets: list, cap: float) -> Picture:
    """buckets: lists of (parameter name, bytes), in the order in which they leave; cap in bytes.
    One bar, the model from its last layer to its first; every bucket has its colour."""
    total = sum(nbytes for bucket in buckets for _, nbytes in bucket)
    figure, ax = canvas(9, 2.1)
    left = 0.0
    for number, bucket in enumerate(buckets):
        began = left
        for _, nbytes in bucket:
            ax.barh(0, nbytes / 1e6, left=left / 1e6, height=0.5, linewidth=0.5,
                    color=palette.rank(number), edgecolor="white")
            left += nbytes
        _label(ax, number, bucket, began, left, total)
    ax.set_ylim(-0.62, 0.8)
    ax.set_yticks([])
    ax.set_xlim(0, total / 1e6)
    ax.set_xlabel("MB of gradients, from the last layer (left) to the first")
    words = (f"cap {cap / 1e6:g} MB: {len(buckets)} bucket{'s' * (len(buckets) != 1)}, so "
             f"{len(buckets)} all-reduce{'s' * (len(buckets) != 1)} per step")
    ax.set_title(words, loc="left", fontsize=11, weight="bold")
    return Picture(figure, words, data=buckets)


def _label(ax, number, bucket, began, end, total):
    if (end - began) / total < 0.06:
        return
    ax.text((began + end) / 2e6, 0.32, f"bucket {number}", ha="center", va="bottom", fontsize=9.5,
            weight="bold", color=palette.rank(number))
    ax.text((began + end) / 2e6, -0.3, f"{sum(b for _, b in bucket) / 1e6:.2f} MB", ha="center",
            va="top", fontsize=9, color=palette.MUTED)

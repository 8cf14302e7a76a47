"""A model's gradients, cut into buckets."""

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.words import counted


def bucket_bar(buckets: list[list[tuple[str, int]]], cap: float) -> Picture:
    """Draws one bar, the gradients from the last layer to the first, each bucket in its colour.
    buckets: (parameter name, bytes) in each, in the order in which they leave. cap: in bytes."""
    total = sum(nbytes for bucket in buckets for _, nbytes in bucket)
    figure, ax = canvas(WIDTH, 1.9)
    end = 0
    for number, bucket in enumerate(buckets):
        begin = end
        for _, nbytes in bucket:
            ax.barh(0, nbytes / 1e6, left=end / 1e6, height=0.5, linewidth=0.5,
                    color=palette.rank(number), edgecolor="white")
            end += nbytes
        _label(ax, number, begin, end, (end - begin) / total)
    ax.set_ylim(-0.6, 0.62)
    ax.set_yticks([])
    ax.set_xlim(0, total / 1e6)
    ax.set_xlabel("MB of gradients, from the last layer (left) to the first")
    words = (f"cap {cap / 1e6:g} MB: {counted(len(buckets), 'bucket')}, so "
             f"{counted(len(buckets), 'all-reduce')} per step")
    ax.set_title(words, loc="left", fontsize=11, weight="bold")
    return Picture(figure, words, data=buckets)


def _label(ax, number, begin, end, share):
    """Writes above a bucket its number and below it its size, where it is wide enough."""
    middle = (begin + end) / 2e6
    if share >= 0.025:
        ax.text(middle, 0.32, f"bucket {number}" if share > 0.075 else f"{number}", ha="center",
                va="bottom", fontsize=9.5, weight="bold", color=palette.rank(number))
    if share >= 0.065:
        ax.text(middle, -0.3, f"{(end - begin) / 1e6:.2f} MB", ha="center", va="top", fontsize=9,
                color=palette.MUTED)

"""How a model is split: parameters into the shards that ranks own, gradients into buckets."""

from labs.pictures import palette
from labs.pictures.marks import NOTE_LINE, answered, headline, note_below
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.sheet import box, sheet, write
from labs.words import counted

LEFT, HIGH = 0.12, 0.42  # inches

Flat = list[tuple[int, int]]  # by rank: (elements, zeros of padding) of a flat tensor's shards


def shard_owners(layers: list[tuple[str, int]], rows: dict[str, list[Flat]], ranks: int) -> Picture:
    """Draws each row as the full model, coloured by the rank that owns each shard. layers: (name,
    elements), in order. rows: title -> the flat tensors into which the model is laid, in order."""
    total = sum(size for _, size in layers)
    room = WIDTH - 2 * LEFT
    figure, ax = sheet(WIDTH, 0.6 + 0.95 * len(rows))
    _draw_layers(ax, layers, total, room, ranks)
    lines = []
    for number, (title, flats) in enumerate(rows.items()):
        y = 0.92 + 0.95 * number
        write(ax, LEFT, y - 0.14, title, size=10, weight="bold")
        _draw_row(ax, y, flats, total, room)
        lines.append(f"{title}: {_in_words(flats, ranks)}")
        write(ax, WIDTH - LEFT, y - 0.14, _in_words(flats, ranks), size=9.5, ha="right",
              colour=palette.MUTED)
    return Picture(figure, "\n".join(lines), data=rows)


def _draw_layers(ax, layers, total, room, ranks):
    edges, free = [LEFT], LEFT  # free: inches from which on nothing is written
    for name, size in layers:
        width, wide = room * size / total, 0.072 * len(name)
        middle = edges[-1] + width / 2
        # The name of a piece that is too narrow for it begins where the piece begins.
        begin = middle - wide / 2 if width > wide else edges[-1]
        if begin >= free and (width > wide or not edges[1:]):
            write(ax, begin + wide / 2, 0.4, name, size=9, ha="center", colour=palette.MUTED)
            free = begin + wide
        edges.append(edges[-1] + width)
    ax.vlines(edges, 0.34, 0.52, color=palette.MUTED, linewidth=0.8)
    title = f"{total:,} parameters, from the first layer to the last, on {ranks} ranks"
    write(ax, LEFT, 0.14, title, size=9.5)


def _draw_row(ax, y, flats, total, room):
    x = LEFT
    for flat in flats:
        for rank, (size, _) in enumerate(flat):
            width = room * size / total
            box(ax, x + 0.008, y, max(width - 0.016, 0.01), HIGH, [palette.rank(rank)])
            if width > 0.5:
                write(ax, x + width / 2, y + HIGH / 2, f"rank {rank}", size=9.5, ha="center",
                      colour=palette.text_on(palette.rank(rank)), weight="bold")
            x += width
        if len(flats) > 1:
            ax.vlines(x, y - 0.05, y + HIGH + 0.05, color=palette.INK, linewidth=1)


def _in_words(flats, ranks) -> str:
    owned = [sum(flat[rank][0] for flat in flats) for rank in range(ranks)]
    padding = sum(zeros for flat in flats for _, zeros in flat)
    each = " and ".join(f"{size:,}" for size in sorted(set(owned), reverse=True))
    return (f"{counted(len(flats), 'flat tensor')}; {each} parameters a rank, "
            f"{counted(padding, 'zero')} of padding")


def bucket_bar(buckets: list[list[tuple[str, int]]], cap: float,
               guessed: float | None = None) -> Picture:
    """Draws one bar, the gradients from the last layer to the first, the buckets in turn in two
    shades. buckets: (parameter name, bytes) in each, in the order in which they leave. cap: in
    bytes. guessed: how many all-reduces."""
    total = sum(nbytes for bucket in buckets for _, nbytes in bucket)
    figure, ax = canvas(WIDTH, 1.95 + NOTE_LINE * (guessed is not None))
    end = 0
    for number, bucket in enumerate(buckets):
        begin = end
        for _, nbytes in bucket:
            ax.barh(0, nbytes / 1e6, left=end / 1e6, height=0.5, linewidth=0.5,
                    color=palette.BUCKETS[number % 2], edgecolor="white")
            end += nbytes
        _label_bucket(ax, number, begin, end, (end - begin) / total)
    ax.set_ylim(-0.6, 0.62)
    ax.set_yticks([])
    ax.set_xlim(0, total / 1e6)
    ax.set_xlabel("MB of gradients, from the last layer (left) to the first")
    words = (f"cap {cap / 1e6:g} MB: {counted(len(buckets), 'bucket')}, so "
             f"{counted(len(buckets), 'all-reduce')} per step"
             + (f"; your guess: {guessed:g}" if guessed is not None else ""))
    headline(figure, words)
    answer = answered(guessed, len(buckets), "all-reduces")
    note_below(figure, answer)
    return Picture(figure, "\n".join(filter(None, [words, answer])), data=buckets)


def _label_bucket(ax, number, begin, end, share):
    """Writes above a bucket its number and below it its size, where it is wide enough."""
    middle = (begin + end) / 2e6
    if share >= 0.025:
        ax.text(middle, 0.32, f"bucket {number}" if share > 0.075 else f"{number}", ha="center",
                va="bottom", fontsize=9.5, weight="bold")
    if share >= 0.065:
        ax.text(middle, -0.3, f"{(end - begin) / 1e6:.2f} MB", ha="center", va="top", fontsize=9,
                color=palette.MUTED)

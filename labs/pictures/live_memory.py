"""One rank's memory as HTML that is redrawn while a slider moves: what `memory_bars` draws for
one row, in a hundredth of its time. Its colours follow the page, light or dark."""

import html
from itertools import accumulate, pairwise

from matplotlib.ticker import MaxNLocator

from labs.pictures import palette
from labs.pictures.marks import OVERHEAD, format_number
from labs.pictures.memory import merge_close
from labs.pictures.picture import WIDTH
from labs.training.memory_categories import GB, NAMES, Memory

_INK = f"var(--jp-ui-font-color1, {palette.INK})"
_MUTED = f"var(--jp-ui-font-color2, {palette.MUTED})"
_PAPER = f"var(--jp-layout-color0, {palette.PAPER})"
_FIT = {True: ("✓ ", palette.PASSED), False: ("✗ ", palette.REJECTED), None: ("", _MUTED)}
_LEFT, _RIGHT = 6, round(96 * WIDTH) - 6  # pixels: the axis
_LEVEL = 17  # pixels from one capacity's name to the next
_BAR = 46  # pixels: the bar's height
_TICKS = MaxNLocator(6, steps=[1, 2, 5, 10])


def memory_html(held: Memory | None, overhead: float, gpus: list[tuple[float, str, bool | None]],
                verdict: str, more: str = "", interval: tuple[float, float] | None = None) -> str:
    """HTML with one rank's bar, the capacities of GPUs and a legend with all bytes.

    held: bytes by category, or None where there is nothing to draw. overhead: bytes that CUDA and
    NCCL hold. gpus: (bytes, name, whether it fits, or None). verdict, more: sentences above the
    bar. interval: bytes between which the bar's end lies, as a whisker."""
    # Without a job (held is None) the axis is that of the largest GPU.
    end = _end(gpus, held.total + overhead if held else max(gpus)[0])
    colour = _INK if held else palette.REJECTED
    text = (f"<b style='color:{colour}'>{html.escape(verdict)}</b> "
            f"<span style='color:{_MUTED}'>{html.escape(more)}</span>")
    return (f"<div style='font-size:13px;line-height:1.5;color:{_INK};max-width:{96 * WIDTH:.0f}px;"
            f"white-space:normal'><div style='min-height:3.2em;padding:0 {_LEFT}px'>{text}</div>"
            f"{_chart(held, overhead, gpus, end, verdict, interval)}"
            f"{_legend(held, overhead)}</div>")


def _end(gpus, total) -> float:
    """Bytes at the axis's right end: one of few values, so that the lines do not move with every
    step of a slider; there is room for the label of the bar and for the last line's name."""
    ends = sorted(1.28 * size for size, *_ in gpus)
    while ends[-1] < 1.2 * total:
        ends.append(2 * ends[-1])
    return next(end for end in ends if end >= 1.2 * total)


def _chart(held, overhead, gpus, end, verdict, interval) -> str:
    lines = merge_close([(size, name) for size, name, _ in gpus], 0.004 * end)
    top = _LEVEL * len(lines) + 8
    base = top + _BAR + 8

    def x(nbytes):
        return _LEFT + (_RIGHT - _LEFT) * nbytes / end

    shown = [line for line in lines if line[0] < end]
    parts = [_capacity(x(size), _LEVEL * level, base, size, name, gpus) for level, (size, name)
             in enumerate(shown, start=len(lines) - len(shown))]
    parts += [_bar(held, overhead, x, top, interval)] if held else []
    parts += [f"<line x1='{_LEFT}' x2='{_RIGHT}' y1='{base}' y2='{base}' stroke='{_MUTED}'/>"]
    parts += [_text(x(tick * GB), base + 17, f"{tick:,g}", "middle" if tick else "start")
              for tick in _TICKS.tick_values(0, end / GB) if tick * GB <= end]
    parts += [_text((_LEFT + _RIGHT) / 2, base + 36, "GB (10⁹ bytes) of one rank at its peak",
                    "middle", _INK)]
    return (f"<svg viewBox='0 0 {96 * WIDTH:.0f} {base + 44}' width='100%' role='img' "
            f"style='display:block' aria-label='{html.escape(verdict, quote=True)}'>"
            f"{''.join(parts)}</svg>")


def _capacity(x, y, base, size, names, gpus) -> str:
    """A dashed line and the names of the GPUs with this capacity, marked where the job fits."""
    fit = {name: fits for _, name, fits in gpus}
    words = ", ".join(f"<tspan fill='{_FIT[fit[name]][1]}'>{_FIT[fit[name]][0]}{name}</tspan>"
                      for name in names.split(", "))
    return (f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y + 2}' y2='{base}' stroke='{_MUTED}' "
            f"stroke-dasharray='4 3'><title>{names}: CUDA reports {format_number(size / GB)} GB"
            f"</title></line>{_text(x + 4, y + 13, words)}")


def _bar(held, overhead, x, top, interval) -> str:
    """A box for each category and one for the overhead, the whisker, and right of it the sizes."""
    sizes = {**held.by_name(), OVERHEAD: overhead}
    ends = [x(end) for end in accumulate(sizes.values(), initial=0.0)]
    boxes = "".join(
        f"<rect x='{left:.2f}' y='{top}' width='{right - left:.2f}' height='{_BAR}' {_fill(name)}>"
        f"<title>{name}: {_gigabytes(nbytes)} GB</title></rect>"
        for (name, nbytes), (left, right) in zip(sizes.items(), pairwise(ends), strict=True)
        if nbytes or name != OVERHEAD)
    words = f"{format_number(held.total / GB)} + {format_number(overhead / GB)} GB"
    if interval:
        low, high = map(x, interval)
        ends.append(max(high, ends[-1]))
        middle = top + _BAR / 2
        boxes += (f"<path d='M{low:.2f} {middle - 6}v12M{high:.2f} {middle - 6}v12M{low:.2f} "
                  f"{middle}H{high:.2f}' stroke='{_INK}' stroke-width='1.5'><title>between "
                  f"{_gigabytes(interval[0])} and {_gigabytes(interval[1])} GB</title></path>")
    return (f"{boxes}<g font-size='14' font-weight='600' paint-order='stroke' stroke='{_PAPER}' "
            f"stroke-width='4' stroke-linejoin='round'>"
            f"{_text(ends[-1] + 8, top + _BAR / 2 + 5, words, 'start', _INK)}</g>")


def _fill(name) -> str:
    if name == OVERHEAD:
        return f"fill='{_PAPER}' stroke='{_MUTED}' stroke-dasharray='3 2'"
    return f"fill='{palette.MEMORY[name]}'"


def _text(x, y, words, anchor="start", colour=_MUTED) -> str:
    return f"<text x='{x:.1f}' y='{y}' text-anchor='{anchor}' fill='{colour}' font-size='12'>" \
           f"{words}</text>"


def _legend(held, overhead) -> str:
    """Each category at its fixed place, with its bytes."""
    sizes = held.by_name() if held else dict.fromkeys(NAMES)
    cells = "".join(
        f"<span style='opacity:{1 if nbytes else 0.75};white-space:nowrap'>"
        f"<svg width='16' height='11' aria-hidden='true' style='margin-right:6px'>"
        f"<rect x='1' y='1' width='14' height='9' {_fill(name)}/></svg>"
        f"{name} <b>{'' if nbytes is None else f'{_gigabytes(nbytes)} GB'}</b></span>"
        for name, nbytes in {**sizes, OVERHEAD: overhead}.items())
    columns = "repeat(auto-fill,minmax(185px,1fr))"
    return (f"<div style='display:grid;grid-template-columns:{columns};gap:2px 12px;"
            f"padding:6px {_LEFT}px 0'>{cells}</div>")


def _gigabytes(nbytes) -> str:
    """The GB of one category: a step counter's 4 bytes are none that anybody wants to read."""
    return format_number(round(nbytes / GB, 4))

"""A figure that draws itself as the last expression of a cell, the same in every front end."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from labs.meters.metrics import Metric
from labs.pictures import palette

PIXELS = 2  # of the image per CSS pixel
WIDTH = 8.625  # inches; as wide as JupyterLab shows unscaled in a window of 1280 pixels
_STYLE = {"font.size": 10, "axes.edgecolor": palette.MUTED, "axes.labelcolor": palette.INK,
          "text.color": palette.INK, "xtick.color": palette.MUTED, "ytick.color": palette.MUTED}


class Picture:
    """A matplotlib figure; text says in words what it shows, for readers without pictures; data, if
    given, holds the numbers that were drawn; metrics those that were measured."""

    def __init__(self, figure: Figure, text: str, data: object = None,
                 metrics: Sequence[Metric] = ()):
        self.figure, self.text, self.data, self._metrics = figure, text, data, list(metrics)

    def metrics(self) -> list[Metric]:
        """The measured numbers that are drawn, with their units."""
        return self._metrics

    def __repr__(self):
        return self.text

    def png(self) -> bytes:
        """The picture as a PNG file with a palette of 256 colours, a third of the bytes."""
        small = io.BytesIO()
        self.image().quantize(256, dither=Image.Dither.NONE).save(small, "png")
        return small.getvalue()

    def image(self, pixels: float = PIXELS) -> Image.Image:
        """The picture in RGB, with so many pixels to a CSS pixel."""
        drawn, dpi = io.BytesIO(), 96 * pixels
        # not as a PNG, which would be compressed and read again only to lose its colours
        self.figure.savefig(drawn, format="rgba", dpi=dpi, facecolor=palette.PAPER)
        size = tuple(int(dpi * inches) for inches in self.figure.get_size_inches())
        return Image.frombuffer("RGBA", size, drawn.getbuffer()).convert("RGB")

    def html(self, image: str | None = None) -> str:
        """The picture as an element that has its words for screen readers and suits the dark
        theme. image: its PNG file in base64, if that is there already."""
        width, height = self._pixels()
        return (f"<img alt='{html.escape(self.text, quote=True)}' width='{width}' "
                f"height='{height}' style='max-width:100%;height:auto;"
                f"filter:{palette.DARK_FILTER}' "
                f"src='data:image/png;base64,{image or self._base64()}'>")

    def _repr_mimebundle_(self, include=None, exclude=None):
        # JupyterLab gives an image/png no alternative text and shows the HTML; where a saved
        # notebook is rendered without a kernel, the HTML's image may be taken out, and the PNG is
        # shown.
        width, height = self._pixels()
        image = self._base64()
        return ({"text/html": self.html(image), "image/png": image, "text/plain": self.text},
                {"image/png": {"width": width, "height": height, "alt": self.text}})

    def _pixels(self) -> tuple[int, int]:
        """(width, height) in CSS pixels."""
        width, height = (round(96 * inches) for inches in self.figure.get_size_inches())
        return width, height

    def _base64(self) -> str:
        return base64.b64encode(self.png()).decode()


def canvas(width: float = WIDTH, height: float = 3, **subplots) -> tuple[Figure, Any]:
    """(figure, axes) of so many inches in the house style, at most WIDTH wide so that no front end
    scales it. subplots: keywords of `Figure.subplots`."""
    # Whole pixels, or every line would be blurred; no pyplot, or figures would be drawn twice and
    # stay open.
    width, height = (round(96 * inches) / 96 for inches in (width, height))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor=palette.PAPER)
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(rect=(0.006, 0.012, 0.988, 0.976))
        axes = figure.subplots(**subplots)
    for ax in getattr(axes, "flat", [axes]):
        _take_off_frame(ax)
    return figure, axes


def _take_off_frame(ax):
    """Removes all lines around the axes but the bottom one."""
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)

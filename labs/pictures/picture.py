"""A drawing that shows itself as the last expression of a cell, the same in every front end."""

import base64
import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from labs.pictures import palette

SHARPNESS = 2  # pixels per CSS pixel
WIDTH = 8.625  # inches; as wide as JupyterLab shows unscaled in a window of 1280 pixels
_STYLE = {"font.size": 10, "axes.edgecolor": palette.MUTED, "axes.labelcolor": palette.INK,
          "text.color": palette.INK, "xtick.color": palette.MUTED, "ytick.color": palette.MUTED}


class Picture:
    """Wraps a matplotlib figure. text says in words what the picture shows (and is what a reader
    without pictures gets); data, if given, holds the numbers that were drawn."""

    def __init__(self, figure: Figure, text: str, data=None):
        self.figure, self.text, self.data = figure, text, data

    def __repr__(self):
        return self.text

    def png(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=96 * SHARPNESS, facecolor=palette.PAPER,
                            metadata={"Software": None})
        return _small(file)

    def save(self, path) -> None:
        """Writes the picture as a PNG file."""
        with open(path, "wb") as file:
            file.write(self.png())

    def _repr_mimebundle_(self, include=None, exclude=None):
        width, height = (round(96 * inches) for inches in self.figure.get_size_inches())
        image = base64.b64encode(self.png()).decode()
        return ({"image/png": image, "text/plain": self.text},
                {"image/png": {"width": width, "height": height}})


def _small(file) -> bytes:
    """The same picture with a palette of 256 colours: a third of the bytes in the notebook."""
    small = io.BytesIO()
    Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png")
    return small.getvalue()


def canvas(width: float = WIDTH, height: float = 3, **subplots):
    """(figure, axes) in the house style; inches, at most WIDTH wide so that no front end scales it,
    and rounded to whole pixels, or every line would be blurred. Takes no pyplot, so nothing is
    drawn twice and no figure stays open."""
    import matplotlib

    width, height = (round(96 * inches) / 96 for inches in (width, height))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor=palette.PAPER)
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(rect=(0.006, 0.012, 0.988, 0.976))
        axes = figure.subplots(**subplots)
    for ax in getattr(axes, "flat", [axes]):
        plain(ax)
    return figure, axes


def plain(ax):
    """Takes the frame off an axes, keeps the bottom line."""
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)
    return ax

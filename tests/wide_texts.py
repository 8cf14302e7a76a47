"""Titles of pictures and notes below them that are wider than the picture."""

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure


def too_wide(figure: Figure) -> list[str]:
    """Those texts of the figure, each as one string; of legends the titles."""
    renderer = RendererAgg(1, 1, figure.dpi)  # not every figure has a canvas that draws
    # matplotlib has no public way to the texts themselves
    texts = [text for text in (figure._suptitle, figure._supxlabel) if text]
    texts += [legend.get_title() for legend in figure.legends]
    return [text.get_text() for text in texts if text.get_text()
            and text.get_window_extent(renderer).width > 0.985 * figure.bbox.width]

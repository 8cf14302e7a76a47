"""What every drawing made on a sheet must be."""


def on_the_sheet(picture):
    """All text lies within the figure, which is at most as wide as JupyterLab shows."""
    figure = picture.figure
    figure.canvas.draw()
    width, height = figure.get_size_inches() * figure.dpi
    assert width <= 9.5 * figure.dpi
    for text in figure.axes[0].texts:
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, (
            f"{text.get_text()!r} is cut off")
        assert text.get_fontsize() >= 8.5

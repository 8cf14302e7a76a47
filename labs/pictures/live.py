"""A picture that is drawn again below a running cell, and is gone when the cell has ended."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from labs.pictures.picture import Picture
from labs.workers.progress import OFF, in_notebook

EVERY = 1.0  # seconds between two drawings, at least
SHARE = 5  # a drawing takes at most one of so many parts of the time


class LivePicture:
    """`show(draw)` draws where the last drawing is old enough. Shows nothing outside of a notebook,
    nor where outputs are compared or kept."""

    def __init__(self):
        self._handle, self._next = None, 0.0
        self._shown = in_notebook() and os.environ.get(OFF) != "0"

    def show(self, draw: Callable[[], Picture]) -> None:
        """Calls `draw` and shows what it returns, unless it is too early."""
        # A drawing that takes long comes less often: the cell's own work must not wait for it.
        began = time.monotonic()
        if not self._shown or began < self._next:
            return
        self._write(draw().html())
        now = time.monotonic()
        self._next = now + max(EVERY, SHARE * (now - began))

    def _write(self, html):
        from IPython.display import display

        data = {"text/html": html, "text/plain": ""}
        if self._handle:
            self._handle.update(data, raw=True)
        else:
            self._handle = display(data, raw=True, display_id=True)

    def clear(self) -> None:
        """Takes the picture away."""
        if self._handle:
            self._write("")


@contextlib.contextmanager
def live_picture() -> Iterator[LivePicture]:
    """Yields a LivePicture, which is taken away when the block exits."""
    picture = LivePicture()
    try:
        yield picture
    finally:
        picture.clear()

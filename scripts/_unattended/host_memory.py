"""How much memory of the host something takes, with all processes that it starts."""

import psutil


class Growth:
    """`look()` now and then, while something runs: `most` is the largest number of bytes by which
    the memory that programs may still take has shrunk since the start. What else runs on the
    machine counts too."""

    def __init__(self):
        self._before, self.most = psutil.virtual_memory().available, 0

    def look(self) -> None:
        """Notes how much is in use now."""
        self.most = max(self.most, self._before - psutil.virtual_memory().available)

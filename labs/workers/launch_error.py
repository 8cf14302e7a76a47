"""The bases of what this package raises, importable without torch."""


class LaunchError(RuntimeError):
    """A launch that could not give results. In a notebook it shows its message, and no traceback
    through the launcher. output[r]: all that rank r had printed."""

    output: list[str] = ()

    def _render_traceback_(self):  # IPython's hook
        return [f"{type(self).__name__}: {self}"]


class Stopped(KeyboardInterrupt):
    """The student interrupted the cell, and what had been started was stopped: in a notebook its
    message, and no traceback."""

    def _render_traceback_(self):
        return [str(self)]

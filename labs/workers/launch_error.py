"""The bases of what this package raises, importable without torch."""

from labs.words import wrapped

RUN_AGAIN = ("To continue, run this cell again, and then those below it: what the cells above have "
             "defined is still there.")


class LaunchError(RuntimeError):
    """A launch that could not give results. In a notebook it shows its message, and no traceback
    through the launcher. output[r]: all that rank r had printed."""

    output: list[str] = ()

    def _render_traceback_(self):  # IPython's hook
        return [wrapped(f"{type(self).__name__}: {self}")]


class NotRunYet(NameError):
    """A cell used a name that a cell which has not run defines: in a notebook the message, and what
    to run first, without a traceback, because no line of the student's is wrong."""

    def __init__(self, message: str, what_to_run: str):
        super().__init__(message)
        self.what_to_run = what_to_run

    def _render_traceback_(self):
        return [wrapped(f"NameError: {self}"), wrapped(self.what_to_run)]


class Stopped(KeyboardInterrupt):
    """The student interrupted the cell, and what had been started was stopped: in a notebook its
    message, what was being done and what to run next, and no traceback."""

    def _render_traceback_(self):
        return [*map(wrapped, [str(self), *_was_doing(self), RUN_AGAIN])]


def _was_doing(error: BaseException | None) -> list[str]:
    """What `labs.workers.progress.status` noted on an interrupt, or on the one it was made of."""
    while error is not None:
        # How many ranks were at work is no news: the message says what became of each.
        doing = [words for words in getattr(error, "doing", ()) if not words.endswith(" at work")]
        if doing:
            return [f"The cell was at work on {', '.join(doing)}."]
        error = error.__context__
    return []

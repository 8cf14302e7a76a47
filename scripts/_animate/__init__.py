"""Moving pictures for README and the web book, by the notebooks' own drawing code, of real runs.

`ring`, `prefetch` and `deadlock` each launch ranks (`record`), then draw the run frame by frame
(`frames`). What was recorded is kept beside the pictures, so that `scripts/animate --redraw` can
draw it again, for instance in other colours.
"""


class NotShown(Exception):
    """A run that does not show what its animation is to teach; the message says why."""

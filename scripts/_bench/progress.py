"""A line on stderr that says how far a bench has come."""

import sys


def say(text: str) -> None:
    """Shows progress without touching the result on stdout."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
    else:
        sys.stderr.write(text + "\n")
    sys.stderr.flush()


def done() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")

"""Converters that the commands' argument parsers share. Python 3.6."""

import argparse


def positive(kind):
    """A converter for argparse: a number of this kind, int or float, above 0."""
    def convert(text):
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    convert.__name__ = kind.__name__  # argparse names it where the text is no number
    return convert

"""The colours of all pictures: the same thing has the same colour in all notebooks.

What belongs together shares a colour: parameters and the all-gather that moves them; gradients, the
backward that computes them and the reduce-scatter that moves them; activations and the forward that
makes them; the optimizer's state and its step. Ranks have colours of their own, and a rank's number
always stands with it.
"""

import functools

INK = "#1f2933"
DARKEST = "#0f151b"  # of text on a bright colour
MUTED = "#5f6773"
GRID = "#e5e7eb"
PAPER = "#ffffff"
SURFACE = "#f6f7f9"  # of a box that holds other things
BORDER = "#c5ccd3"  # of such a box, and of what is left over
RULE = "#8a929c"  # a table's line, on a light and on a dark page

RANKS = ("#3b6fb6", "#e07b39", "#4a9d6b", "#a05bb0", "#c2a13a", "#3aa6b9", "#b9415f", "#7a6a58")

PLAIN = "#64758c"  # of a number that is none of what has a colour: calls, tokens per second
RUNS = (PLAIN, "#0f9d94", "#b3558c", "#8f7a2c")  # of the curves of several runs

_PARAMETERS, _GRADIENTS, _ACTIVATIONS, _OPTIMIZER = "#3b6fb6", "#e07b39", "#7fb069", "#7a62b3"

PHASES = {"forward": _ACTIVATIONS, "backward": _GRADIENTS, "communication": "#45b3c4",
          "exposed": "#c62f45", "optimizer": _OPTIMIZER, "other": BORDER}

MEMORY = {"parameters": _PARAMETERS, "gradients": _GRADIENTS, "optimizer state": _OPTIMIZER,
          "activations": _ACTIVATIONS, "buffers": "#a3764e", "other": BORDER}

COLLECTIVES = {"all_reduce": "#edbb4a", "reduce_scatter": _GRADIENTS, "all_to_all": "#f2b391",
               "all_gather": _PARAMETERS, "broadcast": "#94b8e6", "other": BORDER}

# What a layer keeps for backward.
SAVED = {"norms": _OPTIMIZER, "inputs of attention and MLP": "#b08a3c",
         "inside attention and MLP": _ACTIVATIONS}

# Seconds of a step that are no phase's: products, norms and attention; the host's under offload.
STEP = {"computing": "#8795a5", "host": "#d3b947"}

BUCKETS = (_GRADIENTS, "#f0b792")  # in turn: buckets are gradients

# Whatever a bar may be made of, in the order of legends.
PARTS = {name: colour for kind in (MEMORY, COLLECTIVES, STEP, PHASES, SAVED)
         for name, colour in kind.items() if name != "other"} | {"other": BORDER}
HATCHES = {"exposed": "//////"}  # also for who cannot tell its colour from the others

PREDICTED = INK  # the prediction's tick
GUESSED = "#e0007a"  # the student's tick, with a diamond; no rank, phase or verdict has its colour

# What a rank did in a launch; RANK_FAILED is also the limit that a rank's memory ran into.
RANK_RETURNED, RANK_FAILED, RANK_WAITS = "#176d30", "#b42318", "#b45309"
COLLECTIVE_DONE = "#dcefe2"
UNKNOWN_ORIGIN = "#9aa3ad"  # of a number that no rank's digits explain

MACHINE = {"core": "#8795a5", "memory": "#b7c0ca", "GPU": "#eef6ea", "link": "#4d7f38"}

# JupyterLab's only number that tells its themes apart: 0 in the light one, 32 in the dark one. It
# is not set in other front ends, where pictures and texts are as on a light page.
_DARK = "var(--jp-shadow-base-lightness, 0) / 32"
# Turns the lightness of a picture round on a dark page, and keeps its hues.
DARK_FILTER = f"invert(calc({_DARK} * 0.93)) hue-rotate(calc({_DARK} * 180deg))"


def _on_page(light: str, dark: str) -> str:
    """A CSS colour that is one on a light and another one on a dark page."""
    return f"color-mix(in srgb, {dark} calc({_DARK} * 100%), {light})"


# Verdicts of checks, and whether a job fits a GPU, on the page itself.
PASSED = _on_page("#1a7f37", "#57d177")
REJECTED = _on_page("#c42b20", "#ff8a7d")
PENDING = _on_page("#5f6773", "#a7b0ba")
GUESS_CARD = _on_page("#c9006d", "#ff7cc4")


def rank(number: int) -> str:
    """The colour of a rank; it repeats after eight."""
    return RANKS[number % len(RANKS)]


def contrast(one: str, other: str) -> float:
    """How well two colours can be told apart, 1 to 21: WCAG 2.2's contrast ratio."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def text_on(colour: str) -> str:
    """The colour of text on a surface of this colour: white, or almost black."""
    return max((PAPER, DARKEST), key=lambda text: contrast(text, colour))


@functools.cache
def readable(colour: str, least: float = 4.6) -> str:
    """The colour for text on paper: darkened, if it must be, until its contrast is `least`; WCAG
    asks for 4.5."""
    channels = _channels(colour)
    for percent in range(100, 0, -2):
        darker = "#" + "".join(f"{round(255 * percent / 100 * value):02x}" for value in channels)
        if contrast(darker, PAPER) >= least:
            return darker
    return INK


def _channels(colour):
    return [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]


def _luminance(colour) -> float:
    """WCAG 2.2's relative luminance of a colour `#rrggbb`."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
              for value in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

"""The colours of all pictures: the same thing has the same colour in all notebooks.

What belongs together shares a colour: parameters and the all-gather that moves them; gradients, the
backward that computes them and the reduce-scatter that moves them; activations and the forward that
makes them; the optimizer's state and its step. Collectives are dotted, so that what is sent differs
from what is held. Ranks have colours of their own, and a rank's number always stands with it.

Any two colours of one entry of TOGETHER differ by a CIEDE2000 of 15 or more, for normal sight and
for protan, deutan and tritan (tests/pictures/test_palette.py). A new colour needs a search.
"""

import functools

INK = "#1f2933"
DARKEST = "#0f151b"  # of text on a bright colour
MUTED = "#5f6773"
GRID = "#e5e7eb"
PAPER = "#ffffff"
SURFACE = "#f6f7f9"  # of a box that holds other things
BORDER = "#c5ccd3"  # of such a box
RULE = "#8a929c"  # a table's line, on a light and on a dark page

# in words: blue, orange, green, purple, yellow, light blue, dark red, dark grey
RANKS = ("#1a4480", "#f49d7a", "#3d8359", "#965cc0", "#ffe047", "#72b9cb", "#76262c", "#625663")

PLAIN = "#b8d0f8"  # of a number that is none of what has a colour: calls, tokens per second
RUNS = (PLAIN, "#18baa7", "#7c0f77", "#cfa542")  # of the curves of several runs

# in words: dark blue, orange, light green, purple
_PARAMETERS, _GRADIENTS, _ACTIVATIONS, _OPTIMIZER = "#274e83", "#ffa734", "#bce3a7", "#6f66ce"
_COMMUNICATION = "#1ed6f9"  # light blue
_OTHER = "#ded8d9"  # of what is left over

PHASES = {"forward": _ACTIVATIONS, "backward": _GRADIENTS, "communication": _COMMUNICATION,
          "exposed": "#b62446", "optimizer": _OPTIMIZER, "other": _OTHER}

MEMORY = {"parameters": _PARAMETERS, "gradients": _GRADIENTS, "optimizer state": _OPTIMIZER,
          "activations": _ACTIVATIONS, "buffers": "#5a3600", "other": _OTHER}

COLLECTIVES = {"all_reduce": _COMMUNICATION, "reduce_scatter": _GRADIENTS, "all_to_all": "#9b5027",
               "all_gather": _PARAMETERS, "broadcast": "#3994ea", "other": _OTHER}

# What a layer keeps for backward.
SAVED = {"norms": _OPTIMIZER, "inputs of attention and MLP": "#a98831",
         "inside attention and MLP": _ACTIVATIONS}

# Seconds of a step that are no phase's: products, norms and attention; the host's under offload.
STEP = {"computing": "#89a3ac", "host": "#a38011"}

# What a step on several ranks loses against one rank alone.
LOST = {"communication": PHASES["exposed"], "waiting": _OPTIMIZER,
        "data loading": MEMORY["buffers"], "computing": _ACTIVATIONS}

BUCKETS = (_GRADIENTS, "#965c1a")  # in turn: buckets are gradients
IDLE = "#a9abb1"  # of a rank in a pipeline

# Whatever a bar may be made of, in the order of legends.
PARTS = {name: colour for kind in (MEMORY, COLLECTIVES, STEP, PHASES, SAVED)
         for name, colour in kind.items() if name != "other"} | {"other": _OTHER}
# A second sign beside the colour: exposed time, and what is sent where it could be what is held.
HATCHES = {"exposed": "//////", **{name: "..." for name in COLLECTIVES if name != "other"}}

PREDICTED = INK  # the prediction's tick
GUESSED = "#e75181"  # the student's tick, with a diamond; no rank, phase or verdict has its colour

# What a rank did in a launch; RANK_FAILED is also the limit that a rank's memory ran into.
RANK_RETURNED, RANK_FAILED, RANK_WAITS = "#014d0a", "#c8474e", "#286dc5"
COLLECTIVE_DONE = "#dcefe2"
UNKNOWN_ORIGIN = "#eaecef"  # of a number that no rank's digits explain

# What follows a failure: noticed, the others stopped, rendezvous, start, load, steps run again.
RESTART = {"notices": RANK_FAILED, "stops": MEMORY["buffers"], "meets": _COMMUNICATION,
           "starts": _OPTIMIZER, "loads": _PARAMETERS, "again": _GRADIENTS}
TRAINS = _ACTIVATIONS  # beside them: a rank that trains
MARKS = {"predicted": PREDICTED, "your guess": GUESSED}
# title -> name -> colour: what is drawn into one picture.
TOGETHER: dict[str, dict[str, str]] = {
    "memory and the parts of a step": {**MEMORY, **PHASES, **STEP, **MARKS},
    "memory and its limit": {**MEMORY, "predicted": PREDICTED, "limit": RANK_FAILED},
    "what was lost": LOST,
    "collectives": {**COLLECTIVES, **MARKS},
    "saved for backward": {**SAVED, "other": _OTHER, **MARKS},
    "schedules": {"F": _ACTIVATIONS, "B": _GRADIENTS, "W": BUCKETS[1], "idle": IDLE, **MARKS},
    "restarts": {**RESTART, "trains": TRAINS},
    "restarts over time": {"joined": RUNS[1], **{name: RESTART[name] for name in (
        "notices", "starts", "again")}, "checkpoint": INK},
    "ranks": {**{f"rank {rank}": colour for rank, colour in enumerate(RANKS)},
              "unknown": UNKNOWN_ORIGIN},
    "runs": {**{f"run {run}": colour for run, colour in enumerate(RUNS)}, **MARKS},
    "outcomes": {"returned": RANK_RETURNED, "failed": RANK_FAILED, "waits": RANK_WAITS,
                 "computes": MUTED}}

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
